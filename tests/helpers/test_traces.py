"""Traces by hand are steps that could have happened."""

from itertools import pairwise

import pytest

from lightning_remat.planning.simulation import simulate
from lightning_remat.planning.trace import NEED, RELEASE, RUN, SAVE, Trace
from tests.helpers.traces import TraceBuilder, block_of, drop_where, front_by_hand, plan_by_hand, transformer_trace

PLANS = [lambda index, op: False, lambda index, op: op.kind == "cheap", lambda index, op: True]


@pytest.mark.parametrize("dropout", [False, True])
@pytest.mark.parametrize("wanted", PLANS)
def test_nothing_stays(wanted, dropout: bool) -> None:
    """Under any plan all memory is given back, and never less than none is in use."""
    trace = transformer_trace(3, dropout=dropout)
    found = simulate(trace, drop_where(trace, wanted), timeline=True)
    assert found.levels[-1] == 0
    assert min(found.levels) == 0


def test_gradients_that_are_new_stay() -> None:
    """Without gradients from the step before, each parameter's stays."""
    trace = transformer_trace(2, width=8, vocabulary=16, builder=TraceBuilder(gradients_stay=False))
    block = 2 * 16 + (8 * 24 + 24 + 8 * 8 + 8 + 8 * 32 + 32 + 32 * 8 + 8)
    weights = 2 * block + 16 * 8 + 16 + (8 * 16 + 16)
    assert simulate(trace, [False] * len(trace.ops), timeline=True).levels[-1] == 2 * weights


def test_events_come_in_order() -> None:
    """Each op runs once, each slot is saved, needed and released once, in this order."""
    trace = transformer_trace(2)
    assert [a for kind, a, _ in trace.events if kind == RUN] == list(range(len(trace.ops)))
    for kind in (SAVE, NEED, RELEASE):
        assert sorted(a for k, a, _ in trace.events if k == kind) == list(range(trace.slots))
    assert [block_of(trace, i) for i in (0, 1, 10, 11, len(trace.ops) - 1)] == [0, 1, 1, 2, 3]
    assert Trace.from_json(trace.to_json()) == trace


def test_the_front_falls() -> None:
    """More memory, less time; the plan is the last one that fits."""
    trace = transformer_trace(4)
    front = front_by_hand(trace)
    assert len(front) > 5
    assert all(a.peak_bytes < b.peak_bytes and a.extra_seconds > b.extra_seconds for a, b in pairwise(front))
    assert plan_by_hand(trace, budget_bytes=front[3].peak_bytes + 7, static_bytes=7).chosen == front[3]
    assert plan_by_hand(trace, budget_bytes=0).chosen == front[0]
