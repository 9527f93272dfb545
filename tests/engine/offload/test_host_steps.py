"""Whole training steps with host memory as the place, on a device whose copies come as late as they can."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_remat import Offload
from lightning_remat.engine.offload.host import HostPlace
from lightning_remat.runtime.offloading import Offloading
from tests.helpers.exact import assert_exact
from tests.helpers.late_streams import LateStreams


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(16, 64), nn.Linear(64, 16), nn.LayerNorm(16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = nn.functional.dropout(nn.functional.gelu(self.up(self.norm(x))).mul_(2), 0.1)
        return x + self.down(hidden.relu_())


def loss_of(model: nn.Module) -> torch.Tensor:
    return model(torch.randn(8, 5, 16)).square().mean()


@pytest.fixture
def places(monkeypatch: pytest.MonkeyPatch) -> list[HostPlace]:
    """What engines with ``offload="disk"`` move to instead."""
    made: list[HostPlace] = []

    def place(self: Offloading, device: torch.device) -> HostPlace:
        made.append(HostPlace(device, budget=budget, streams=LateStreams()))
        return made[-1]

    budget = 1 << 24
    monkeypatch.setattr(Offloading, "_place", place)
    return made


@pytest.mark.parametrize("in_flight", [1, 20_000, None])
@pytest.mark.parametrize("policy", ["offload_only", "full", "selective"])
def test_steps_are_exact(places: list[HostPlace], policy: str, in_flight: int | None) -> None:
    """However much waits on the device, and although no copy is made before somebody waits for it."""
    model = nn.Sequential(Block(), Block(), Block())
    assert_exact(model, loss_of, policy, offload=Offload("disk", min_bytes=0, in_flight=in_flight))

    (place,) = places
    traffic = place.traffic
    assert traffic.bytes_out > 0
    if in_flight == 1:
        assert traffic.bytes_in > 0
    assert place.used_bytes == 0
    assert (traffic.refused, traffic.failures) == (0, 0)


def test_steps_are_exact_without_room(places: list[HostPlace], monkeypatch: pytest.MonkeyPatch) -> None:
    """What is refused stays."""

    def place(self: Offloading, device: torch.device) -> HostPlace:
        places.append(HostPlace(device, budget=16 * 1024, streams=LateStreams()))
        return places[-1]

    monkeypatch.setattr(Offloading, "_place", place)
    model = nn.Sequential(Block(), Block(), Block())
    with pytest.warns(UserWarning, match="no room"):
        assert_exact(model, loss_of, "offload_only", offload=Offload("disk", min_bytes=0, in_flight=1))
    assert places[0].traffic.refused > 0
