"""The simulator of moves against real steps: models of several kinds, any plan that keeps, drops and moves.

What leaves goes where no allocator of PyTorch's counts it. Peaks are as near as without moves, which is to the byte
nearly always; what leaves, what is read back and in which order agrees exactly, and every result is that of the plain
step, bit for bit.
"""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_remat import Offload, Remat
from lightning_remat.engine.offload.mover import Mover
from lightning_remat.planning.moving import fetch_order
from lightning_remat.planning.simulation import simulate
from lightning_remat.planning.trace import Trace
from lightning_remat.planning.transfer import Transfer
from lightning_remat.runtime.bandwidth import Bandwidth
from lightning_remat.runtime.offloading import Offloading
from tests.helpers.places import OutsidePlace
from tests.helpers.plans import CLOSE, Run, Traced, measured_peak, random_plan
from tests.helpers.zoo import CASES
from tests.planning.test_simulator_on_traps import WHAT, Net, cells

RATES = Bandwidth(
    out_bytes_per_second=1e12,
    in_bytes_per_second=1e12,
    latency_seconds=0.0,
    cpu_seconds_per_byte=0.0,
    delay_seconds_per_byte=0.0,
    measured_at=0.0,
    place="memory",
    where="",
)


@pytest.fixture(autouse=True)
def _outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every engine moves to a place in memory that nobody measures."""
    monkeypatch.setattr(Offloading, "_place", lambda self, device: OutsidePlace())
    monkeypatch.setattr(Offloading, "_measured", lambda self, place, device: RATES)
    # Plans are the tests' own.
    monkeypatch.setattr("lightning_remat.runtime.tuning.choosing.Chooser.place_changed", lambda self, known: False)


class UNet(nn.Module):
    """Skips from each level of the way down to the same one of the way up."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.begin = nn.Conv2d(3, width, 3, padding=1)
        self.down = nn.ModuleList([nn.Conv2d(width, width, 3, padding=1, stride=2) for _ in range(3)])
        self.up = nn.ModuleList([nn.Conv2d(2 * width, width, 3, padding=1) for _ in range(3)])
        self.norms = nn.ModuleList([nn.BatchNorm2d(width) for _ in range(3)])

    def forward(self, x: Tensor) -> Any:
        x = self.begin(x)
        skips = []
        for down, norm in zip(self.down, self.norms, strict=True):
            skips.append(x)
            x = F.relu(norm(down(x)), inplace=True)
        for up in self.up:
            x = F.interpolate(x, scale_factor=2)
            x = F.dropout(F.gelu(up(torch.cat([x, skips.pop()], 1))), 0.1)
        return SimpleNamespace(loss=x.square().mean())


def random_moves(trace: Trace, generator: random.Random) -> tuple[list[bool], list[bool], Transfer]:
    """Drops, moves, and the bounds under which contents move."""
    largest = max(trace.nbytes)
    share = generator.random()
    drop = random_plan(trace, generator) if generator.random() < 0.8 else [False] * len(trace.ops)
    move = [bool(op.outputs) and generator.random() < share for op in trace.ops]
    bounds = (0, 0, largest // 2, 2 * largest, 6 * largest)
    transfer = Transfer(
        out_bytes_per_second=1e9,
        in_bytes_per_second=1e9,
        min_bytes=generator.choice((1, 1000, largest // 4)),
        window_bytes=generator.choice(bounds),
        ahead_bytes=generator.choice(bounds),
    )
    return drop, move, transfer


def check(traced: Traced, plans: int, foreseen: bool = True) -> None:
    """Random plans of a model."""
    offloading: Any = traced.run.remat.offloading
    mover: Mover = offloading.on(torch.device("cpu"))
    place: Any = mover.place
    generator = random.Random(3)
    trace = traced.trace
    left = back = 0
    for _ in range(plans):
        drop, move, transfer = random_moves(trace, generator)
        expected = simulate(trace, drop, False, move, transfer)
        mover.min_bytes = transfer.min_bytes
        place.sizes = []
        before = place.traffic.bytes_in
        measured, differing = traced.expected.under(traced.run, drop, move, transfer)
        assert differing == []
        assert place.sizes == [trace.nbytes[v] for v in expected.left]
        assert mover._asked == fetch_order(trace, drop, move, transfer)
        assert place.traffic.bytes_in - before == expected.fetched_bytes
        if foreseen:
            assert abs(expected.peak - measured) <= CLOSE * measured
        left, back = left + len(expected.left), back + expected.fetched_bytes
    assert left > plans
    assert back > 0


def everything(directory: Path) -> Offload:
    """Whatever its size."""
    return Offload(directory, min_bytes=1)


@pytest.mark.parametrize("name", CASES)
def test_any_plan_of_a_model_is_exact_and_foreseen(name: str, tmp_path: Path) -> None:
    check(Traced(*CASES[name].make(tiny=True), offload=everything(tmp_path)), 5)


def test_any_plan_with_skips_is_exact_and_foreseen(tmp_path: Path) -> None:
    torch.manual_seed(0)
    check(Traced(UNet().train(), {"x": torch.randn(2, 3, 16, 16)}, offload=everything(tmp_path)), 8)


@pytest.mark.parametrize("what", WHAT, ids=lambda what: what.__name__)
def test_any_plan_of_a_trap_is_exact_and_foreseen(what: Any, tmp_path: Path) -> None:
    """What a GRU cell saves shares a storage with what is written later: there, peaks are not foreseen."""
    torch.manual_seed(0)
    traced = Traced(Net(what).train(), {"x": torch.randn(64, 16)}, offload=everything(tmp_path))
    check(traced, 5, foreseen=what is not cells)


@pytest.mark.parametrize("share", [0.85, 0.6])
@pytest.mark.parametrize("name", ["gpt2-eager", "resnet"])
def test_plans_under_a_budget_are_foreseen(name: str, share: float, tmp_path: Path) -> None:
    """What the planner chooses where something moves, followed by the engine."""
    model, batch = CASES[name].make(tiny=True)
    plain = Run(model, batch)
    plain.step(1)
    budget = plain.static_bytes() + int(share * plain.measured(2))
    plain.forget()
    model, batch = CASES[name].make(tiny=True)
    remat = Remat(policy="auto", budget=budget, offload=everything(tmp_path))
    run = Run(model, batch, remat)
    for seed in range(4):
        run.step(seed)
    result: Any = remat.plan
    assert result is not None
    measured = run.measured(5)
    assert abs(measured - result.chosen.peak_bytes) <= CLOSE * measured
    assert abs(measured_peak(remat) - result.chosen.peak_bytes) <= CLOSE * measured
    assert result.chosen.moves
