"""What holds for the simulator whatever the trace and the plan."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace

import hypothesis
import hypothesis.strategies as st

from lightning_remat.planning.simulation import simulate
from lightning_remat.planning.simulator import Simulator
from lightning_remat.planning.trace import FREE, NEED, OTHER, RELEASE, SAVE, Trace
from tests.planning.small_traces import random_trace


@dataclass
class Case:
    """A trace, a plan, and chance for what else a test needs."""

    trace: Trace
    drop: list[bool]
    rng: random.Random


@st.composite
def cases(draw: st.DrawFn) -> Case:
    rng = draw(st.randoms(use_true_random=False))
    trace = random_trace(rng, 12)
    return Case(trace, [rng.random() < 0.6 for _ in trace.ops], rng)


def given_case(test: Callable[[Case], None]) -> Callable[[], None]:
    return hypothesis.settings(max_examples=50)(hypothesis.given(cases())(test))


@given_case
def test_keeping_everything_takes_no_time(case: Case) -> None:
    run = simulate(case.trace, [False] * len(case.trace.ops))
    assert run.extra_seconds == 0
    assert run.replayed == []


@given_case
def test_replayed_once_and_only_what_was_dropped(case: Case) -> None:
    run = simulate(case.trace, case.drop)
    assert len(set(run.replayed)) == len(run.replayed)
    assert all(case.drop[o] and case.trace.ops[o].droppable for o in run.replayed)
    assert run.extra_seconds == sum(case.trace.ops[o].seconds for o in run.replayed)


@given_case
def test_peak_is_the_highest_level(case: Case) -> None:
    run = simulate(case.trace, case.drop, timeline=True)
    assert run.peak == max(0, *run.tops)
    assert all(level <= top for level, top in zip(run.levels, run.tops, strict=True))
    assert run.peak == 0 or run.tops[run.peak_event] == run.peak


@given_case
def test_values_never_weigh_less_than_nothing(case: Case) -> None:
    """Levels without what is nobody's value are sums of bytes that are there."""
    levels = simulate(case.trace, case.drop, timeline=True).levels
    others = 0
    for level, (kind, _, net) in zip(levels, case.trace.events, strict=True):
        others += net if kind == OTHER else 0
        assert level >= others


@given_case
def test_nothing_remains_when_all_has_been_let_go(case: Case) -> None:
    """With every slot released and every storage freed, only what is nobody's value is left."""
    trace = case.trace
    filled = {a for kind, a, _ in trace.events if kind == SAVE} - {a for kind, a, _ in trace.events if kind == RELEASE}
    overwritten = {op.writes for op in trace.ops}
    shown = set(range(len(trace.nbytes))) - overwritten - {a for kind, a, _ in trace.events if kind == FREE}
    trace.events += [(RELEASE, slot, 0) for slot in sorted(filled)]
    trace.events += [(FREE, v, 0) for v in sorted(shown)]
    levels = simulate(trace, case.drop, timeline=True).levels
    assert levels[-1] == sum(net for kind, _, net in trace.events if kind == OTHER)


@given_case
def test_what_nobody_needs_takes_no_time(case: Case) -> None:
    """Flipping ops of which no NEED can come to depend changes no time."""
    trace = case.trace
    saved = {a: b for kind, a, b in trace.events if kind == SAVE}
    needed = {saved[a] for kind, a, _ in trace.events if kind == NEED}
    for o in range(len(trace.ops) - 1, -1, -1):
        if needed.intersection(trace.ops[o].outputs):
            needed.update(trace.ops[o].inputs)
    other = [
        drop if needed.intersection(op.outputs) else case.rng.random() < 0.5
        for drop, op in zip(case.drop, trace.ops, strict=True)
    ]
    assert simulate(trace, other).replayed == simulate(trace, case.drop).replayed


@given_case
def test_flags_of_ops_that_cannot_be_dropped_do_not_count(case: Case) -> None:
    other = [drop if op.droppable else not drop for drop, op in zip(case.drop, case.trace.ops, strict=True)]
    assert simulate(case.trace, other, timeline=True) == simulate(case.trace, case.drop, timeline=True)


@given_case
def test_dropping_more_never_keeps_an_op_from_running_again(case: Case) -> None:
    """More dropped means more replayed: what was replayed before still is, and time only grows."""
    more = [drop or case.rng.random() < 0.3 for drop in case.drop]
    assert set(simulate(case.trace, case.drop).replayed) <= set(simulate(case.trace, more).replayed)


@given_case
def test_bytes_and_times_scale(case: Case) -> None:
    """Every byte doubled is the peak doubled, and the same for seconds."""
    trace = case.trace
    before = simulate(trace, case.drop)
    double = Trace.from_json(trace.to_json())
    double.nbytes = [2 * n for n in trace.nbytes]
    double.ops = [replace(op, seconds=2 * op.seconds, scratch=2 * op.scratch, state=2 * op.state) for op in trace.ops]
    double.events = [(kind, 2 * a, 2 * b) if kind == OTHER else (kind, a, b) for kind, a, b in trace.events]
    after = simulate(double, case.drop)
    assert (after.peak, after.extra_seconds) == (2 * before.peak, 2 * before.extra_seconds)
    assert after.replayed == before.replayed


@given_case
def test_a_run_can_be_cut_short(case: Case) -> None:
    """What comes later changes nothing of what came before: the simulator can be driven event by event."""
    trace = case.trace
    cut = case.rng.randint(0, len(trace.events))
    whole = simulate(trace, case.drop, timeline=True)
    simulator = Simulator(trace, case.drop)
    for simulator.now, event in enumerate(trace.events[:cut]):
        simulator.step(*event)
    assert simulator.live == (whole.levels[cut - 1] if cut else 0)
