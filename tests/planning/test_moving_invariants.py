"""What holds for plans with moves whatever the trace, the plan and the place."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise

import hypothesis
import hypothesis.strategies as st

from lightning_remat.planning.moving import MovingSimulator
from lightning_remat.planning.simulation import simulate
from lightning_remat.planning.trace import EXIT, FREE, NEED, OTHER, RELEASE, RUN, SAVE, Trace
from lightning_remat.planning.transfer import Transfer
from tests.planning.small_traces import random_trace


@dataclass
class Case:
    """A trace, a plan and a place."""

    trace: Trace
    drop: list[bool]
    move: list[bool]
    transfer: Transfer

    def run(self, transfer: Transfer | None = None, timeline: bool = False):
        return simulate(self.trace, self.drop, timeline, self.move, transfer or self.transfer)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    rng: random.Random = draw(st.randoms(use_true_random=False))
    trace = random_trace(rng, 12)
    transfer = Transfer(
        out_bytes_per_second=rng.choice((1.0, 5.0, 50.0, math.inf)),
        in_bytes_per_second=rng.choice((1.0, 5.0, 50.0, math.inf)),
        latency_seconds=rng.choice((0.0, 0.5)),
        cpu_seconds_per_byte=rng.choice((0.0, 0.1)),
        min_bytes=rng.choice((0, 1, 8)),
        window_bytes=rng.choice((0, 10, 60, 1000)),
        ahead_bytes=rng.choice((0, 20, 500)),
        cap_bytes=rng.choice((None, None, 50)),
    )
    return Case(trace, [rng.random() < 0.4 for _ in trace.ops], [rng.random() < 0.6 for _ in trace.ops], transfer)


def given_case(test: Callable[[Case], None]) -> Callable[[], None]:
    return hypothesis.settings(max_examples=100)(hypothesis.given(cases())(test))


@given_case
def test_without_moves_it_is_the_simulator(case: Case) -> None:
    """To the last figure, whether the fast way or event by event."""
    none = [False] * len(case.trace.ops)
    for timeline in (False, True):
        alone = MovingSimulator(case.trace, case.drop, none, case.transfer).run(timeline)
        assert alone == simulate(case.trace, case.drop, timeline)


@given_case
def test_events_in_a_row_do_what_they_do_one_by_one(case: Case) -> None:
    whole = case.run(timeline=True)
    fast = case.run()
    for name in ("extra_seconds", "waited_seconds"):
        assert math.isclose(getattr(whole, name), getattr(fast, name))  # sums in another order
    others = {"extra_seconds": 0.0, "waited_seconds": 0.0, "peak_event": 0}
    assert replace(whole, levels=[], tops=[], **others) == replace(fast, **others)
    assert whole.peak == max(0, *whole.tops)
    assert whole.peak == 0 or whole.tops[whole.peak_event] == whole.peak
    assert all(level <= top for level, top in zip(whole.levels, whole.tops, strict=True))


@given_case
def test_memory_does_not_depend_on_speed(case: Case) -> None:
    slow = case.run(replace(case.transfer, out_bytes_per_second=0.1, in_bytes_per_second=0.1), timeline=True)
    found = case.run(timeline=True)
    assert (found.levels, found.tops, found.left, found.asked) == (slow.levels, slow.tops, slow.left, slow.asked)


@given_case
def test_nobody_waits_where_everything_is_there_at_once(case: Case) -> None:
    at_once = replace(case.transfer, out_bytes_per_second=math.inf, in_bytes_per_second=math.inf, latency_seconds=0.0)
    assert case.run(at_once).waited_seconds == 0


@given_case
def test_a_faster_place_is_never_waited_for_longer(case: Case) -> None:
    speeds = [0.5, 1.0, 2.0, 8.0, math.inf]
    for name in ("out_bytes_per_second", "in_bytes_per_second"):
        waits = [case.run(replace(case.transfer, **{name: speed})).waited_seconds for speed in speeds]
        assert all(after <= before + 1e-9 for before, after in pairwise(waits))


@given_case
def test_waits_are_no_longer_than_all_transfers(case: Case) -> None:
    found = case.run()
    contents = len(found.left) + len(found.asked)
    longest = contents * case.transfer.latency_seconds
    longest += found.moved_bytes / case.transfer.out_bytes_per_second
    longest += found.fetched_bytes / case.transfer.in_bytes_per_second
    assert 0 <= found.waited_seconds <= longest + 1e-9
    replayed = sum(case.trace.ops[o].seconds for o in found.replayed)
    moved = case.transfer.cpu_seconds_per_byte * (found.moved_bytes + found.fetched_bytes)
    assert math.isclose(found.extra_seconds, replayed + found.waited_seconds + moved)


@given_case
def test_each_content_leaves_once_and_comes_back_once(case: Case) -> None:
    found = case.run()
    assert len(set(found.left)) == len(found.left)
    assert len(set(found.asked)) == len(found.asked)
    assert set(found.asked) <= set(found.left)
    assert found.fetched_bytes <= found.moved_bytes
    for v in found.left:
        maker = case.trace.makers[v]
        assert case.move[maker]
        assert case.trace.nbytes[v] >= max(1, case.transfer.min_bytes)
    # In the order in which something first holds them: an op that is recorded, or autograd.
    held: dict[int, None] = {}
    away = set[int]()
    for kind, a, b in case.trace.events:
        op = case.trace.ops[a] if kind == RUN else None
        if op is not None and op.droppable and case.drop[a] and (op.writes < 0 or op.writes in away):
            held |= dict.fromkeys(op.inputs)
            away.update(op.outputs)
        elif kind == SAVE:
            held[b] = None
        away.update(set(held) & set(found.left))
    assert found.left == [v for v in held if v in found.left]


@given_case
def test_values_never_weigh_less_than_nothing(case: Case) -> None:
    others = 0
    for level, (kind, _, net) in zip(case.run(timeline=True).levels, case.trace.events, strict=True):
        others += net if kind == OTHER else 0
        assert level >= others


@given_case
def test_nothing_remains_when_all_has_been_let_go(case: Case) -> None:
    """On the device, in the window, and at the place."""
    trace = case.trace
    filled = {a for kind, a, _ in trace.events if kind == SAVE} - {a for kind, a, _ in trace.events if kind == RELEASE}
    overwritten = {op.writes for op in trace.ops}
    shown = set(range(len(trace.nbytes))) - overwritten - {a for kind, a, _ in trace.events if kind == FREE}
    if (EXIT, 0, 0) not in trace.events:
        trace.events.append((EXIT, 0, 0))
    trace.events += [(RELEASE, slot, 0) for slot in sorted(filled)]
    trace.events += [(FREE, v, 0) for v in sorted(shown)]
    simulator = MovingSimulator(trace, case.drop, case.move, case.transfer)
    levels = simulator.run(timeline=True).levels
    assert levels[-1] == sum(net for kind, _, net in trace.events if kind == OTHER)
    assert (simulator.windowed, simulator.stored) == (0, 0)


@given_case
def test_an_unlimited_window_moves_nothing_back(case: Case) -> None:
    """What never leaves the device is never fetched, and only writing in place has to wait."""
    found = case.run(replace(case.transfer, window_bytes=10**6))
    if not any(op.writes >= 0 for op in case.trace.ops):
        assert (found.fetched_bytes, found.waited_seconds) == (0, 0)


@given_case
def test_in_forward_moving_never_takes_more_than_keeping(case: Case) -> None:
    """Until backward begins, whatever the window: what has left is at most as much as what would have been kept."""
    trace = case.trace
    turn = next((e for e, (kind, _, _) in enumerate(trace.events) if kind in (NEED, RELEASE)), len(trace.events))
    none = [False] * len(trace.ops)
    kept = simulate(trace, none, True).levels[:turn]
    moved = simulate(trace, none, True, case.move, case.transfer).levels[:turn]
    assert all(after <= before for before, after in zip(kept, moved, strict=True))
