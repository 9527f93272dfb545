"""Trainings with offload that something happens to, and what they are compared with."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_remat import Offload, Remat
from lightning_remat.engine.offload.disk import DiskPlace
from tests.helpers.bits import random_streams
from tests.helpers.seed import seed_everything
from tests.helpers.training import Net

CPU = torch.device("cpu")


class Smooth(nn.Sequential):
    """All that it makes can be computed again."""

    def __init__(self, width: int = 32, depth: int = 3) -> None:
        super().__init__(*[nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(depth)])


class Training:
    """A model in training from a known seed, plainly or under an engine.

    Args:
        make: the model.
        remat: None: plainly.
        guarded: by :meth:`Remat.attempt`.
        parts: forward and backward passes in a step.
    """

    def __init__(
        self, make: Callable[[], nn.Module], remat: Remat | None = None, *, guarded: bool = False, parts: int = 1
    ) -> None:
        seed_everything(3)
        self.model = make()
        width = next(self.model.parameters()).shape[1]
        self.batches = torch.randn(50, 16, width)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-2)
        self.remat, self.guarded, self.parts = remat, guarded, parts
        self.losses: list[Tensor] = []
        self.between: Callable[[], object] = lambda: None
        """Called between forward and backward."""

    def _tried(self) -> Tensor:
        whole = torch.zeros(())
        for part in range(self.parts):
            batch = self.batches[len(self.losses) % 50] + part
            if self.remat is None:
                loss = self.model(batch).square().mean()
            else:
                with self.remat:
                    loss = self.model(batch).square().mean()
            self.between()
            loss.backward()
            whole = whole + loss.detach()
        return whole

    def step(self, between: Callable[[], object] = lambda: None) -> None:
        self.between = between
        self.optimizer.zero_grad()
        loss = self.remat.attempt(self._tried, self.model) if self.remat and self.guarded else self._tried()
        self.losses.append(loss)
        self.optimizer.step()

    @property
    def left(self) -> dict[str, Any]:
        return {
            "losses": self.losses,
            "state": dict(self.model.state_dict()),
            "gradients": [p.grad for p in self.model.parameters()],
            "optimizer": self.optimizer.state_dict(),
            "streams": random_streams(),
        }


def plainly(make: Callable[[], nn.Module], steps: int, parts: int = 1) -> dict[str, Any]:
    training = Training(make, parts=parts)
    for _ in range(steps):
        training.step()
    return training.left


def everything(directory: Path, **options: Any) -> Offload:
    """All that is kept leaves at once."""
    return Offload(directory, min_bytes=0, in_flight=1, **options)


def place_of(remat: Remat) -> DiskPlace:
    """Where it is, before the first step as well."""
    assert remat.offloading is not None
    place = remat.offloading.on(CPU).place
    assert isinstance(place, DiskPlace)
    return place


def recorded(steps: Callable[[], object]) -> list[str]:
    """Run something; returns what it warned of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        steps()
    return [str(w.message) for w in caught]


POLICIES = pytest.mark.parametrize("policy", ["offload_only", "full", "selective"], ids=["only", "full", "selective"])
MODELS = pytest.mark.parametrize("make", [Smooth, Net])
