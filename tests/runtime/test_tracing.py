"""A traced step: what it tells of itself, and of the same step under other plans, against what is measured then."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_remat import Remat
from lightning_remat.planning.simulation import simulate
from lightning_remat.planning.simulator import Simulator
from lightning_remat.planning.trace import Trace
from lightning_remat.runtime.memory import measure_peak
from lightning_remat.runtime.tracer import Tracer
from tests.helpers.exact import assert_exact
from tests.helpers.plans import BUDGET, follow, trace_of


class Stem(nn.Module):
    """Two outputs of one op, of which a border keeps one: where pooling took its values from is dropped."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.GELU()) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.max_pool2d(self.conv(x), 2)
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()


def traced(model: nn.Module, *batch: Tensor) -> tuple[Remat, Tracer, Trace]:
    """Trace one step; the engine goes on from there."""
    remat = Remat(policy="auto", budget=BUDGET)
    with remat:
        loss = model(*batch)
    loss.backward()
    model.zero_grad()
    tracer: Any = remat._pilot._tracer
    tracer.stop()
    return remat, tracer, tracer.trace()


def measured(remat: Remat, model: nn.Module, *batch: Tensor) -> int:
    """The peak of one more step."""

    def step() -> None:
        with remat:
            loss = model(*batch)
        loss.backward()

    peak = measure_peak(step).peak_bytes
    model.zero_grad()
    return peak


def under(remat: Remat, drop: list[bool], model: nn.Module, *batch: Tensor) -> int:
    """The peak of a step under another plan."""
    if remat.plan is None:
        measured(Remat(policy="none"), model, *batch)  # whatever PyTorch makes once is there
        with remat:
            loss = model(*batch)
        loss.backward()
        model.zero_grad()
    follow(remat, drop)
    return measured(remat, model, *batch)


def test_a_border_that_keeps_one_of_several_outputs_drops_the_others() -> None:
    """The step is simulated as it was, and so is the plain one: the dropped output's bytes are not booked twice."""
    model, x = Stem(), torch.randn(4, 3, 32, 32)
    remat, tracer, trace = traced(model, x)
    several = next(op for op in trace.ops if "max_pool2d" in op.name)
    assert len(several.outputs) == 2
    assert len(tracer.tape.kept_values.intersection(several.outputs)) == 1

    lean = Simulator(trace, tracer.tape.drop(), tracer.tape.kept_values).run()
    assert lean.peak == tracer.measured().peak_bytes
    plain = under(remat, [False] * len(trace.ops), model, x)
    assert abs(simulate(trace_of(remat), [False] * len(trace.ops)).peak - plain) <= 0.002 * plain


class Hoarder(nn.Module):
    """Holds on to what every block returns until the step is over, or until the model has returned."""

    def __init__(self, *, whole_step: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            [nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(6)]
        )
        self.whole_step = whole_step
        self.held: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        held = []
        for block in self.blocks:
            x = x + block(x)
            held.append(x)
        self.held = held if self.whole_step else []
        return x.square().mean()


@pytest.mark.parametrize("whole_step", [False, True])
def test_what_the_program_holds_of_a_kept_value_is_seen(whole_step: bool) -> None:
    """Block outputs in a list of the user's need memory whether they are dropped or not."""
    model, x = Hoarder(whole_step=whole_step), torch.randn(64, 64)
    remat, tracer, trace = traced(model, x)
    model.held = []

    lean = Simulator(trace, tracer.tape.drop(), tracer.tape.kept_values).run()
    assert lean.peak == tracer.measured().peak_bytes
    everything = [op.droppable for op in trace.ops]
    for drop in ([False] * len(trace.ops), everything):
        peak = under(remat, drop, model, x)
        model.held = []
        assert abs(simulate(trace_of(remat), drop).peak - peak) <= 0.005 * peak


def test_a_step_with_jagged_tensors_is_traced() -> None:
    """A subclass has more than its memory: what autograd saves of it is not to be seen through an alias."""

    def step(net: nn.Module) -> Tensor:
        rows = net(torch.linspace(-1, 1, 32).reshape(8, 4))
        ragged = torch.nested.as_nested_tensor([rows[:3], rows[3:]], layout=torch.jagged)
        return net(ragged).sin().values().square().sum() + (ragged * ragged).values().sum()

    assert_exact(nn.Linear(4, 4), step, "auto", budget=BUDGET)
