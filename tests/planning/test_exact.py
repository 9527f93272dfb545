"""The exact planner is exact, and the planner is close to it."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache

import pytest

from lightning_remat.planning.planner import plan
from lightning_remat.planning.simulation import simulate
from lightning_remat.planning.simulator import Simulator
from lightning_remat.planning.trace import NEVER, OTHER, Trace
from tests.planning.exact import brute_force, budgets, least_peak, least_time
from tests.planning.exact_model import Model, Point, value
from tests.planning.small_models import MODELS
from tests.planning.small_traces import random_trace

CLOSE = 1.02


class Watched(Simulator):
    """Notes the level whenever the simulator looks at it: the highest, for each event and op that runs again in it."""

    def __init__(self, trace: Trace, drop: list[bool]) -> None:
        super().__init__(trace, drop)
        self.levels: dict[Point, int] = {}
        self._again = -1

    def _replay(self, o: int) -> None:
        self._again = o
        super()._replay(o)
        self._again = -1

    def _reach(self, level: int) -> None:
        kind, top, _ = self.trace.events[self.now]
        if kind != OTHER or top != NEVER:
            point = self.now, self._again
            self.levels[point] = max(level, self.levels.get(point, level))
        super()._reach(level)


def assert_same_levels(trace: Trace, rng: random.Random, plans: int) -> None:
    """The model's expressions give the simulator's levels at every point, its peak, and what is replayed."""
    model = Model(trace)
    for _ in range(plans):
        drop = [rng.random() < 0.7 for _ in trace.ops]
        watched = Watched(trace, drop)
        run = watched.run()
        x = model.of_plan(drop)
        assert {point: value(model.points[point], x) for point in watched.levels} == watched.levels
        assert max(0, *(value(level, x) for level in model.points.values())) == run.peak
        assert {o for o, column in enumerate(model.final) if column >= 0 and x[column]} == set(run.replayed)


def assert_optimal(trace: Trace) -> int:
    """Least peak and least times are those among all plans; returns at how many budgets anything had to be dropped."""
    model = Model(trace)
    plans = brute_force(trace)
    plain = simulate(trace, [False] * len(trace.ops)).peak
    lowest = min(p.peak_bytes for p in plans)
    assert least_peak(model).plan.peak_bytes == lowest
    assert least_time(model, lowest - 1) is None
    tight = 0
    for budget in sorted({lowest, (2 * lowest + plain) // 3, (lowest + 2 * plain) // 3, max(lowest, plain - 1)}):
        best = min(p.extra_seconds for p in plans if p.peak_bytes <= budget)
        found = least_time(model, budget)
        assert found is not None
        assert found.proven
        assert found.plan.peak_bytes <= budget
        assert found.plan.extra_seconds == pytest.approx(best)
        assert found.bound == pytest.approx(best)
        tight += best > 0
    return tight


def test_model_has_the_simulators_levels() -> None:
    for seed in range(300):
        rng = random.Random(seed)
        assert_same_levels(random_trace(rng, 12), rng, plans=4)


@pytest.mark.parametrize("name", MODELS)
def test_model_has_the_simulators_levels_on(name: str) -> None:
    trace = MODELS[name]()
    assert 12 <= sum(op.droppable for op in trace.ops) <= 45
    assert_same_levels(trace, random.Random(0), plans=20)


def test_optimum_is_that_among_all_plans() -> None:
    assert sum(assert_optimal(random_trace(random.Random(seed), 9)) for seed in range(60)) > 50


@pytest.mark.slow
def test_optimum_is_that_among_all_plans_on_many() -> None:
    for seed in range(60, 2000):
        assert_optimal(random_trace(random.Random(seed), 10))


def test_nothing_to_drop() -> None:
    trace = random_trace(random.Random(0), 4)
    trace.ops = [replace(op, droppable=False) for op in trace.ops]
    assert_optimal(trace)


@cache
def exact(name: str) -> tuple[Model, list[int]]:
    """A model's program, and the ten budgets of `tests/benchmarks/optimality.py`."""
    model = Model(MODELS[name]())
    return model, budgets(model)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("step", [2, 5, 8])
def test_planner_is_close_to_the_optimum(name: str, step: int) -> None:
    """Three of the ten budgets."""
    model, ten = exact(name)
    budget = ten[step]
    best = least_time(model, budget)
    assert best is not None
    assert best.proven
    chosen = plan(model.trace, budget).chosen
    assert chosen.peak_bytes <= budget
    assert best.plan.extra_seconds <= chosen.extra_seconds * (1 + 1e-9)
    assert chosen.extra_seconds <= CLOSE * best.plan.extra_seconds
