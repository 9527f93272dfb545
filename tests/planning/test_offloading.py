"""Plans with moves: never slower than without, close to the best of all, and the same each time."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import pairwise

import pytest

from lightning_remat.errors import BudgetError
from lightning_remat.planning.plan import Candidate, judged
from lightning_remat.planning.planner import Planner, plan
from lightning_remat.planning.trace import Trace
from lightning_remat.planning.transfer import Transfer
from tests.planning.small_models import MODELS, cnn, lstm, transformer, unet
from tests.planning.small_traces import random_trace

SHARES = tuple(round(0.95 - 0.08 * i, 2) for i in range(10))
CLOSE = 1.05


def place(trace: Trace, speed: float, **others: float) -> Transfer:
    """One that takes the plain step's whole peak ``speed`` times while forward runs."""
    plain = judged(trace, [False] * len(trace.ops)).peak_bytes
    pace = speed * plain / sum(op.seconds for op in trace.ops)
    return Transfer(
        out_bytes_per_second=pace, in_bytes_per_second=pace, window_bytes=plain // 25, ahead_bytes=plain // 25, **others
    )


SMALL: dict[str, Callable[[], Trace]] = {
    "transformer": lambda: transformer(blocks=1),
    "cnn": lambda: cnn(blocks=1),
    "unet": lambda: unet(levels=1),
    "lstm": lambda: lstm(steps=3),
}


@cache
def trace_of(name: str) -> Trace:
    return MODELS[name]()


@cache
def small(name: str) -> Trace:
    return SMALL[name]()


@cache
def without(name: str) -> tuple[Candidate | None, ...]:
    planner = Planner(small(name))
    return tuple(attempt(planner, share) for share in SHARES)


def attempt(planner: Planner, share: float) -> Candidate | None:
    budget = int(share * planner.plain.peak_bytes)
    try:
        chosen = planner.result(budget).chosen
    except BudgetError:
        return None
    assert chosen.peak_bytes <= budget
    again = judged(planner.trace, chosen.drop, chosen.move, chosen.transfer)
    assert replace(again, move=chosen.move) == chosen
    return chosen


@pytest.mark.parametrize("speed", [0.001, 0.1, 1.0])
@pytest.mark.parametrize("name", SMALL)
def test_never_slower_than_without(name: str, speed: float) -> None:
    """At any of ten budgets, nor larger: with a place as slow as can be, and with one that hides what it takes."""
    trace = small(name)
    largest = max(trace.nbytes)
    bounds = {"window_bytes": 2 * largest, "ahead_bytes": 2 * largest, "adjustable": True}
    planner = Planner(trace, replace(place(trace, speed), **bounds))
    for share, base in zip(SHARES, without(name), strict=True):
        found = attempt(planner, share)
        assert base is None or found is not None, "what fits without moves fits"
        if base is not None and found is not None:
            assert found.extra_seconds <= base.extra_seconds
            assert not any(d and m for d, m in zip(found.drop, found.move, strict=False))
            # The price of waiting is as high as can be: what fits without it does without.
            assert speed >= 0.01 or not found.moves


def test_what_is_in_flight_is_chosen() -> None:
    """Little where room is short, much where transfers have to hide; the plan says how much its figures are for."""
    trace = trace_of("transformer")
    largest = max(trace.nbytes)
    given = replace(place(trace, 1.0), window_bytes=2 * largest, ahead_bytes=2 * largest)
    planner = Planner(trace, replace(given, adjustable=True))
    tight = planner.result(planner.smallest().peak_bytes)
    assert tight.chosen.moves
    assert tight.transfer == replace(given, window_bytes=0, ahead_bytes=0)
    assert planner.smallest().peak_bytes < Planner(trace, given).smallest().peak_bytes
    easy = planner.result(int(0.9 * planner.plain.peak_bytes))
    assert (easy.transfer, easy.chosen.extra_seconds) == (given, 0)
    for c in (*tight.front, *easy.front):
        assert replace(judged(trace, c.drop, c.move, c.transfer), move=c.move) == c


def test_what_is_in_flight_stays_where_it_is_given() -> None:
    trace = transformer(blocks=1)
    given = replace(place(trace, 1.0), window_bytes=1000, ahead_bytes=2000)
    assert given.choices() == [given]
    front = Planner(trace, given).front(3)
    assert {c.transfer for c in front} == {given, None}


def test_a_fast_place_for_nothing_takes_it_all() -> None:
    """Nothing runs again where moving costs nothing."""
    trace = trace_of("transformer")
    found = attempt(Planner(trace, place(trace, math.inf)), 0.5)
    assert found is not None
    assert (found.extra_seconds, found.waited_seconds) == (0, 0)
    assert found.moves
    assert not any(d and op.droppable and op.seconds for d, op in zip(found.drop, trace.ops, strict=True))


def test_a_place_that_costs_processor_time_takes_what_is_dear_to_run_again() -> None:
    """A move costs 2 units of time for a content; expensive ops take 50, cheap ones 0.1."""
    trace = transformer(blocks=2)
    for op in trace.ops:
        size = sum(trace.nbytes[v] for v in op.outputs)
        op.seconds = size * (50.0 if op.name in ("linear", "attention") else 0.1)
    found = attempt(Planner(trace, place(trace, math.inf, cpu_seconds_per_byte=1.0)), 0.5)
    assert found is not None
    assert any(found.drop)
    assert found.moves
    for op, drop, move in zip(trace.ops, found.drop, found.move, strict=True):
        dear = op.name in ("linear", "attention")
        assert not (drop and dear)
        # Of the cheap ones, only sums of the residual stream: to make one again takes the one before, or a dear one.
        assert not (move and op.droppable and not dear and op.name != "add")


@pytest.mark.parametrize("name", ["transformer", "cnn", "unet"])
def test_smaller_peaks_than_without(name: str) -> None:
    trace = trace_of(name)
    assert Planner(trace, place(trace, 1.0)).smallest().peak_bytes < Planner(trace).smallest().peak_bytes


def test_the_error_speaks_of_the_smallest_peak_with_moves() -> None:
    trace = trace_of("cnn")
    planner = Planner(trace, place(trace, 1.0))
    with pytest.raises(BudgetError) as error:
        planner.result(1)
    assert error.value.smallest_bytes == planner.smallest().peak_bytes < Planner(trace).smallest().peak_bytes
    assert "offload=" not in str(error.value)
    with pytest.raises(BudgetError, match="or let values leave with offload="):
        Planner(trace).result(1)
    assert planner.result(planner.smallest().peak_bytes).chosen.peak_bytes == planner.smallest().peak_bytes


def test_nothing_is_dropped_where_nothing_may_be() -> None:
    trace = trace_of("transformer")
    planner = Planner(trace, place(trace, 1.0), recompute=False)
    for share in (0.8, 0.6):
        found = attempt(planner, share)
        assert found is not None
        assert found.moves
        assert not any(found.drop)
    assert not any(any(c.drop) for c in planner.front())
    with pytest.raises(BudgetError):
        Planner(trace, recompute=False).result(int(0.8 * planner.plain.peak_bytes))


def test_the_same_each_time() -> None:
    trace = trace_of("unet")
    first, second = (Planner(trace, place(trace, 3.0)).result(int(0.75 * 2**27)) for _ in range(2))
    assert first.chosen == second.chosen
    assert first.front == second.front


def test_the_front_has_both_kinds() -> None:
    trace = transformer(blocks=1)
    planner = Planner(trace, place(trace, 1.0))
    front = planner.front(5)
    assert all(a.peak_bytes < b.peak_bytes and a.extra_seconds > b.extra_seconds for a, b in pairwise(front))
    assert any(c.moves for c in front)
    assert front[-1].extra_seconds == 0
    assert plan(trace, planner.plain.peak_bytes, transfer=planner.transfer).chosen == planner.plain


def everything(trace: Trace, transfer: Transfer) -> list[Candidate]:
    """All plans: each op kept, dropped or moved."""
    ways = [(0, 1, 2) if op.droppable and op.outputs else (0, 2) if op.outputs else (0,) for op in trace.ops]
    return [
        judged(trace, [way == 1 for way in chosen], [way == 2 for way in chosen], transfer)
        for chosen in itertools.product(*ways)
    ]


def test_close_to_the_best_of_all_plans() -> None:
    """On random steps of up to seven ops: within a few per cent at nearly all budgets, and within their reach."""
    found, close, tight = 0, 0, 0
    for seed in range(40):
        rng = random.Random(seed)
        trace = random_trace(rng, 6)
        transfer = Transfer(
            out_bytes_per_second=rng.choice((2.0, 5.0, 20.0, math.inf)),
            in_bytes_per_second=rng.choice((2.0, 5.0, 20.0)),
            latency_seconds=rng.choice((0.0, 0.5)),
            min_bytes=rng.choice((1, 8)),
            window_bytes=rng.choice((0, 15, 40)),
            ahead_bytes=rng.choice((0, 30)),
        )
        if len(trace.ops) > 7:
            continue
        plans = everything(trace, transfer)
        least = min(c.peak_bytes for c in plans)
        planner = Planner(trace, transfer)
        assert planner.smallest().peak_bytes <= 1.1 * least
        for share in (0.1, 0.5, 0.9):
            budget = int(least + share * (planner.plain.peak_bytes - least))
            best = min(c.extra_seconds for c in plans if c.peak_bytes <= budget)
            found += 1
            try:
                mine = Planner(trace, transfer).result(budget).chosen.extra_seconds
            except BudgetError:
                continue
            assert mine >= best - 1e-9
            close += mine <= CLOSE * best + 1e-9
            tight += best > 0
    assert found > 60
    assert tight > 20
    assert close >= 0.95 * found
