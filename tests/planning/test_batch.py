"""Many plans simulated at once come to what each comes to alone."""

from __future__ import annotations

import random
from itertools import pairwise

import numpy as np
import pytest

from lightning_remat.planning.batch import Batch
from lightning_remat.planning.planner import Planner
from lightning_remat.planning.simulation import simulate
from lightning_remat.planning.simulator import Simulator
from lightning_remat.planning.trace import Trace
from tests.planning.small_models import MODELS
from tests.planning.small_traces import random_trace


def assert_as_alone(trace: Trace, seed: int, count: int) -> None:
    dice = np.random.default_rng(seed)
    drops = dice.random((len(trace.ops), count)) < dice.random(count)
    found = Batch(trace).run(drops, 0)
    for i in range(count):
        alone = simulate(trace, drops[:, i].tolist())
        assert found.peak[i] == alone.peak
        assert found.seconds[i] == pytest.approx(alone.extra_seconds)
        assert (found.excess[i] > 0) == (alone.peak > 0)


def test_as_alone_on_random_traces() -> None:
    for seed in range(150):
        assert_as_alone(random_trace(random.Random(seed), 6 + seed % 20), seed, count=10)


@pytest.mark.parametrize("name", MODELS)
def test_as_alone_on(name: str) -> None:
    assert_as_alone(MODELS[name](), seed=0, count=40)


class Stepwise(Simulator):
    """Takes every event for itself."""

    def step(self, kind: int, a: int, b: int) -> None:
        super().step(kind, a, b)


def test_events_in_a_row_do_what_they_do_one_by_one() -> None:
    for seed in range(150):
        dice = random.Random(seed)
        trace = random_trace(dice, 6 + seed % 20)
        drop = [dice.random() < 0.6 for _ in trace.ops]
        assert Simulator(trace, drop).run() == Stepwise(trace, drop).run()


@pytest.mark.parametrize("name", MODELS)
def test_more_memory_never_takes_more_time(name: str) -> None:
    """Neither from one planner nor from one for each budget."""
    trace = MODELS[name]()
    shared = Planner(trace)
    budgets = [int(shared.plain.peak_bytes * share) for share in (0.7, 0.85, 1)]
    for planners in ([shared] * 3, [Planner(trace) for _ in budgets]):
        found = [p.result(b).chosen.extra_seconds for p, b in zip(planners, budgets, strict=True)]
        assert all(after <= before * (1 + 1e-9) for before, after in pairwise(found))
        assert found[0] > found[-1] == 0
