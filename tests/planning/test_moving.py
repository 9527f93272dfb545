"""The rules for what leaves and comes back, each on a step written by hand, with figures worked out by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from lightning_remat.planning.moving import fetch_order, leaving, paces
from lightning_remat.planning.plan import judged
from lightning_remat.planning.simulation import simulate
from lightning_remat.planning.simulator import Simulation
from lightning_remat.planning.trace import EXIT, Trace
from lightning_remat.planning.transfer import Transfer
from tests.planning.small_traces import Writer, check

AT_ONCE = Transfer(out_bytes_per_second=math.inf, in_bytes_per_second=math.inf, min_bytes=1)
"""No window, and nothing ahead but one content."""


def chain(*sizes: int, seconds: float = 1.0) -> Trace:
    """Ops in a row, each of whose outputs autograd saves and the program lets go of; backward asks from the last on."""
    out = Writer()
    slots: list[int] = []
    before: tuple[int, ...] = ()
    for size in sizes:
        made = out.run("op", before, [size], seconds=seconds)
        slots.append(out.save(made[0]))
        for v in before:
            out.free(v)
        before = made
    for v in before:
        out.free(v)
    out.trace.events.append((EXIT, 0, 0))
    for slot in reversed(slots):
        out.need(slot)
        out.release(slot)
    check(out.trace)
    return out.trace


def run(trace: Trace, move: str, transfer: Transfer = AT_ONCE, drop: str = "") -> Simulation:
    """By flags as text, ``"101"``; what is missing is 0."""
    count = len(trace.ops)
    flags = [[c == "1" for c in text.ljust(count, "0")] for text in (drop, move)]
    return simulate(trace, flags[0], True, flags[1], transfer)


def test_what_leaves_is_gone_when_the_program_lets_go() -> None:
    """Four contents of 10: kept, all four are there at the turn; moved, each lives from its op to the next one's end.

    Events: RUN SAVE, then RUN SAVE FREE three times, FREE, EXIT, then NEED RELEASE four times.
    """
    trace = chain(10, 10, 10, 10)
    assert run(trace, "0000").peak == 40
    found = run(trace, "1111", replace(AT_ONCE, ahead_bytes=0))
    assert found.levels[:13] == [10, 10, 20, 20, 10, 20, 20, 10, 20, 20, 10, 0, 0]
    # Asked for the last: it comes back, and one more ahead of its time. Released, that one is left.
    assert found.levels[13:] == [20, 10, 20, 10, 20, 10, 10, 0]
    assert found.peak == 20
    assert (found.extra_seconds, found.waited_seconds) == (0, 0)
    assert (found.moved_bytes, found.fetched_bytes) == (40, 40)
    assert (found.left, found.asked) == ([0, 1, 2, 3], [3, 2, 1, 0])


def test_what_is_below_the_least_size_stays() -> None:
    trace = chain(10, 9, 10)
    found = run(trace, "111", replace(AT_ONCE, min_bytes=10))
    assert found.left == [0, 2]
    assert run(trace, "111", replace(AT_ONCE, min_bytes=11)).left == []
    assert run(trace, "111", replace(AT_ONCE, min_bytes=11)).peak == run(trace, "000").peak == 29


def test_what_is_dropped_does_not_move() -> None:
    found = run(chain(10, 10, 10), "111", drop="010")
    assert found.left == [0, 2]
    assert found.replayed == [1]
    # The op that runs again reads what has left: it comes back first.
    assert found.asked == [2, 0]


def test_an_op_that_cannot_be_dropped_moves() -> None:
    trace = chain(10, 10)
    trace.ops[0].droppable = False
    assert run(trace, "10", drop="10").left == [0]


def test_window_is_first_in_first_out() -> None:
    """A window of 20 holds the last two; what is in it when it is asked for was never away."""
    trace = chain(10, 10, 10, 10)
    found = run(trace, "1111", replace(AT_ONCE, window_bytes=20))
    # Each leaves when it is saved. The third pushes the first out, which the program no longer holds; the same again.
    assert found.levels[:13] == [10, 10, 20, 20, 20, 30, 20, 20, 30, 20, 20, 20, 20]
    # The last as it is, and one ahead (the second, 10).
    assert found.levels[13] == 30
    assert found.fetched_bytes == 20
    assert found.asked == [3, 2, 1, 0]
    assert found.peak == 30


def test_held_and_in_the_window_counts_once() -> None:
    """A content that the program still holds is pushed out for nothing until it lets go."""
    out = Writer()
    (a,) = out.run("a", (), [10])
    first = out.save(a)
    (b,) = out.run("b", (a,), [10])
    second = out.save(b)
    out.free(b)
    out.free(a)
    out.trace.events.append((EXIT, 0, 0))
    for slot in (second, first):
        out.need(slot)
        out.release(slot)
    check(out.trace)
    one = replace(AT_ONCE, window_bytes=10)
    # RUN a, SAVE, RUN b, SAVE (pushes a out: still held), FREE b (in the window), FREE a (gone), EXIT; then b is asked
    # for, and a comes ahead.
    assert run(out.trace, "11", one).levels == [10, 10, 20, 20, 20, 10, 10, 20, 10, 10, 0]
    # b stays, a is in the window all the time.
    assert run(out.trace, "10", one).levels == [10, 10, 20, 20, 20, 20, 20, 20, 10, 10, 0]


def test_larger_than_the_window_is_released_at_once() -> None:
    found = run(chain(30, 10), "10", replace(AT_ONCE, window_bytes=20))
    # RUN 30, SAVE, RUN 10, SAVE, FREE 30
    assert found.levels[:5] == [30, 30, 40, 40, 10]


def test_asked_for_while_the_program_holds_it() -> None:
    """From the window it is the same storage; fetched, it is another one beside the program's."""
    out = Writer()
    (a,) = out.run("a", (), [10])
    slot = out.save(a)
    out.trace.events.append((EXIT, 0, 0))
    out.need(slot)
    out.release(slot)
    out.free(a)
    check(out.trace)
    assert run(out.trace, "1", replace(AT_ONCE, window_bytes=10)).levels == [10, 10, 10, 10, 10, 0]
    assert run(out.trace, "1").levels == [10, 10, 10, 20, 10, 0]


def test_what_nobody_holds_does_not_leave() -> None:
    out = Writer()
    (a,) = out.run("a", (), [10])
    out.free(a)
    (b,) = out.run("b", (), [10])
    slot = out.save(b)
    out.free(b)
    out.trace.events.append((EXIT, 0, 0))
    out.need(slot)
    check(out.trace)
    found = run(out.trace, "11", replace(AT_ONCE, window_bytes=10))
    assert found.levels == [10, 0, 10, 10, 10, 10, 10]
    assert found.left == [b]
    assert (found.moved_bytes, found.fetched_bytes) == (10, 0)


def test_what_is_read_by_what_is_dropped_leaves_when_that_has_run() -> None:
    """Its memory goes after the op, which takes 7 bytes more while it runs, and not before."""
    out = Writer()
    (a,) = out.run("a", (), [10])
    (b,) = out.run("b", (a,), [5], seconds=3)
    out.other(7, 0)
    slot = out.save(b)
    out.free(a)
    (c,) = out.run("c", (b,), [5])
    out.other(7, 0)
    out.free(b)
    out.free(c)
    out.trace.events.append((EXIT, 0, 0))
    out.need(slot)
    out.release(slot)
    check(out.trace)
    found = run(out.trace, "1", drop="010")
    # RUN a; RUN b (a leaves, still held); OTHER; SAVE; FREE a; RUN c; OTHER; FREE b; FREE c; EXIT; NEED; RELEASE
    assert found.levels == [10, 15, 15, 15, 5, 10, 10, 5, 0, 0, 5, 0]
    assert found.tops[2] == 22
    assert found.tops[10] == 15  # what has come back, and what is made of it
    assert (found.left, found.asked, found.replayed) == ([a], [a], [1])


def test_pushed_out_after_the_op_that_pushes() -> None:
    """The content that goes since another leaves is there while the op runs that holds the other."""
    out = Writer()
    (a,) = out.run("a", (), [10])
    first = out.save(a)
    out.free(a)
    (b,) = out.run("b", (), [10])
    (c,) = out.run("c", (b,), [5])
    out.other(7, 0)
    second = out.save(c)
    out.free(b)
    out.free(c)
    out.trace.events.append((EXIT, 0, 0))
    for slot in (second, first):
        out.need(slot)
        out.release(slot)
    check(out.trace)
    found = run(out.trace, "11", replace(AT_ONCE, window_bytes=10), drop="001")
    # RUN a, SAVE, FREE (in the window), RUN b, RUN c: a goes when b leaves, and was there while c ran: 25, and 7 more.
    assert found.levels[:6] == [10, 10, 10, 20, 15, 15]
    assert (found.tops[4], found.tops[5]) == (25, 32)
    assert found.peak == 32


def test_what_dies_within_the_step_goes_with_the_window() -> None:
    """There the tape finds it by its storage, which the window holds; once the step is left it goes at once."""
    out = Writer()
    (a,) = out.run("a", (), [10])
    first = out.save(a)
    out.free(a)
    out.release(first)
    (b,) = out.run("b", (), [10])
    second = out.save(b)
    out.free(b)
    (c,) = out.run("c", (), [10])
    third = out.save(c)
    out.free(c)
    out.release(third)
    out.trace.events.append((EXIT, 0, 0))
    out.release(second)
    check(out.trace)
    # RUN a, SAVE, FREE, RELEASE (in the window), RUN b, SAVE (pushes a out), FREE, RUN c, SAVE (b is gone), FREE,
    # RELEASE (in the window), EXIT, RELEASE
    found = run(out.trace, "111", replace(AT_ONCE, window_bytes=10))
    assert found.levels == [10, 10, 10, 10, 20, 10, 10, 20, 10, 10, 10, 0, 0]


def test_ahead_is_bounded() -> None:
    """Up to 25 bytes come early: two contents of 10; with 0, still one at a time."""
    trace = chain(10, 10, 10, 10, 10)
    for ahead, early in ((0, 10), (19, 10), (25, 20), (30, 30), (1000, 40)):
        found = run(trace, "11111", replace(AT_ONCE, ahead_bytes=ahead))
        turn = len(trace.events) - 10
        assert found.levels[turn] == 10 + early
    # A request for what was kept does the same: here the last one.
    assert run(trace, "11110", replace(AT_ONCE, ahead_bytes=20)).levels[turn] == 10 + 20


def test_one_that_does_not_fit_ahead_holds_up_those_behind_it() -> None:
    trace = chain(5, 30, 10, 10)
    found = run(trace, "1111", replace(AT_ONCE, ahead_bytes=20))
    turn = len(trace.events) - 8
    # 3 is asked for, 2 comes; 1 (30 bytes) would be too much, so 0 has to wait as well.
    assert found.levels[turn] == 20
    assert found.levels[turn + 2] == 10 + 30


def test_full_place_takes_nothing() -> None:
    found = run(chain(10, 10, 10), "111", replace(AT_ONCE, cap_bytes=20))
    assert found.left == [0, 1]
    assert found.peak == run(chain(10, 10, 10), "110").peak


def test_written_in_place() -> None:
    """What is written over before anything holds it does not leave; the new content does."""
    out = Writer()
    (a,) = out.run("a", (), [10])
    (b,) = out.run("write", (a,), writes=a)
    (c,) = out.run("c", (b,), [10])
    slot = out.save(b)
    out.free(b)
    out.free(c)
    out.trace.events.append((EXIT, 0, 0))
    out.need(slot)
    out.release(slot)
    check(out.trace)
    slow = replace(AT_ONCE, out_bytes_per_second=2.0, window_bytes=20)
    found = run(out.trace, "110", slow)
    assert found.left == [b]
    assert found.waited_seconds == 0
    assert found.levels == [10, 10, 20, 20, 20, 10, 10, 10, 0]
    # Without a window: b is pushed out as it leaves, and gone when the program lets go.
    assert run(out.trace, "110").levels == [10, 10, 20, 20, 10, 0, 0, 10, 0]


def test_written_over_on_its_way_out() -> None:
    """A content's transfer is over before it is written over; the new one leaves in its turn."""
    out = Writer()
    (a,) = out.run("a", (), [10])
    (r,) = out.run("r", (a,), [4])
    first = out.save(r)
    out.free(r)
    (b,) = out.run("write", (a,), writes=a)
    (c,) = out.run("c", (b,), [10])
    second = out.save(b)
    out.free(b)
    out.free(c)
    out.trace.events.append((EXIT, 0, 0))
    for slot in (second, first):
        out.need(slot)
        out.release(slot)
    check(out.trace)
    slow = replace(AT_ONCE, out_bytes_per_second=2.0, window_bytes=20)
    found = run(out.trace, "101", slow, drop="0100")
    # a leaves at 2, when r has run, and is out at 7; the write waits for that.
    assert (found.left, found.asked) == ([a, b], [b, a])
    assert found.waited_seconds == 5
    # RUN a, RUN r, SAVE, FREE r, RUN write (in a's place), RUN c, SAVE (b leaves), FREE b (in the window), FREE c,
    # EXIT, NEED b (and a comes ahead), RELEASE, NEED r (made of a, which goes), RELEASE
    assert found.levels == [10, 14, 14, 10, 10, 20, 20, 20, 10, 10, 20, 10, 4, 0]
    assert found.tops[12] == 14


def test_what_reads_a_content_that_was_written_over_runs_again_on_what_comes_back() -> None:
    out = Writer()
    (a,) = out.run("a", (), [10])
    (b,) = out.run("b", (a,), [10], seconds=3)
    (c,) = out.run("write", (a,), writes=a)
    slot = out.save(b)
    out.free(b)
    out.free(c)
    out.trace.events.append((EXIT, 0, 0))
    out.need(slot)
    out.release(slot)
    check(out.trace)
    # Kept, the old content would need a copy before it is written over; it has left, so b can be made from it.
    assert run(out.trace, "0", drop="010").levels == [10, 20, 30, 30, 20, 10, 10, 10, 0]
    found = run(out.trace, "1", drop="010")
    assert found.levels == [10, 20, 20, 20, 10, 0, 0, 10, 0]
    assert found.tops[7] == 20  # both at once, while it runs
    assert (found.asked, found.replayed, found.extra_seconds) == ([a], [1], 3)


def test_clock() -> None:
    """Ops of 1 s, contents of 10 bytes at 5 bytes/s out and 4 back, 1 s of latency, no window.

    Forward: each content takes 3 s to leave and is waited for at once: 9 s. Backward: nothing was read before the first
    request: 3.5 s. After each request come 2 s of work, while the next content is read: 1.5 s of waiting are left.
    """
    trace = chain(10, 10, 10)
    slow = replace(AT_ONCE, out_bytes_per_second=5.0, in_bytes_per_second=4.0, latency_seconds=1.0)
    found = run(trace, "111", slow)
    assert found.waited_seconds == pytest.approx(9 + 3.5 + 1.5 + 1.5)
    assert found.extra_seconds == found.waited_seconds
    assert judged(trace, [False] * 3, [True] * 3, slow).waited_seconds == found.waited_seconds


def test_window_hides_transfers() -> None:
    """With room for one: the first is waited for when the second has been made, 1 s after its 3 s began."""
    trace = chain(10, 10, 10)
    slow = replace(AT_ONCE, out_bytes_per_second=5.0, latency_seconds=1.0, window_bytes=10)
    # First leaves at 1, out at 4; waited for at 2. Second leaves at 2, queue free at 4, out at 7; third is made at 5.
    # Nothing takes time on the way back but latency: 1 s for the second, and the first came meanwhile.
    assert run(trace, "111", slow).waited_seconds == pytest.approx(2 + 2)
    # The latency of the way back is hidden by 2 s of backward after the first request.


def test_processor_time() -> None:
    """Charged for each byte and direction, hidden or not; what never comes back, once."""
    trace = chain(10, 10, 10)
    found = run(trace, "111", replace(AT_ONCE, cpu_seconds_per_byte=0.5))
    assert found.extra_seconds == 0.5 * (30 + 30)
    found = run(trace, "111", replace(AT_ONCE, cpu_seconds_per_byte=0.5, window_bytes=10))
    assert found.extra_seconds == 0.5 * (30 + 20)


def test_time_of_both_halves_is_shared_out() -> None:
    trace = replace(chain(10, 10), forward_seconds=4.0, backward_seconds=12.0)
    trace.ops[1].seconds = 3.0
    forward, backward = paces(trace)
    assert forward == [1.0, 3.0]
    needs = sorted(backward)
    assert [backward[e] for e in needs] == [9.0, 3.0]
    trace.forward_seconds = trace.backward_seconds = 0.0
    forward, backward = paces(trace)
    assert forward == [1.0, 3.0]
    assert [backward[e] for e in needs] == [6.0, 2.0]


def test_order_for_those_who_follow_a_plan() -> None:
    """By number of leaving: of the three that leave, the last comes back first, from wherever it is."""
    trace = chain(10, 10, 10, 10)
    move = [True, False, True, True]
    transfer = replace(AT_ONCE, window_bytes=10)
    assert leaving(trace, move, transfer) == [0, 2, 3]
    assert fetch_order(trace, [False] * 4, move, transfer) == [2, 1, 0]
    assert leaving(trace, move, transfer, [True, False, False, False]) == [2, 3]


def test_moves_need_a_place() -> None:
    with pytest.raises(ValueError, match="transfer="):
        simulate(chain(10), [False], False, [True])


def test_no_moves_need_none() -> None:
    trace = chain(10, 10)
    assert simulate(trace, [True, False], False, [False, False]) == simulate(trace, [True, False])


def test_transfer_as_numbers() -> None:
    for transfer in (AT_ONCE, replace(AT_ONCE, out_bytes_per_second=3.5, cap_bytes=10, latency_seconds=0.1)):
        assert Transfer.from_dict(transfer.to_dict()) == transfer
    for content in (
        {},
        {"out_bytes_per_second": 1},
        AT_ONCE.to_dict() | {"more": 1},
        AT_ONCE.to_dict() | {"out_bytes_per_second": 0},
        AT_ONCE.to_dict() | {"latency_seconds": None},
        AT_ONCE.to_dict() | {"latency_seconds": "1"},
        AT_ONCE.to_dict() | {"window_bytes": -1},
        AT_ONCE.to_dict() | {"window_bytes": 1.5},
        AT_ONCE.to_dict() | {"window_bytes": None},
        AT_ONCE.to_dict() | {"in_bytes_per_second": True},
    ):
        with pytest.raises(ValueError, match=r"transfer|must be"):
            Transfer.from_dict(content)
