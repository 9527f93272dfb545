"""Failures at random places of random steps leave no trace; `python -m tests.integrations.chaos` does it for long."""

from typing import Any

import pytest
import torch

from lightning_remat import RematStrategy
from tests.helpers.bits import difference_in_bits
from tests.integrations.chaos import SCENARIOS, compared, train
from tests.integrations.faults import Faults, may_allocate

# Far more failures than a training should have, which it rightly says.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Memory ran out again and again"),
    pytest.mark.filterwarnings("ignore:policy='auto'. memory runs out although"),
]

STEPS = 20
SEEDS = {name: i for i, name in enumerate(SCENARIOS)}


@pytest.mark.parametrize("name", SCENARIOS)
def test_failures_leave_no_trace(name: str) -> None:
    """Weights, optimizers, metrics, what was logged, hooks, progress and random streams are those without failures."""
    faults = Faults(SEEDS[name], 0.004)
    different, ours = compared(name, STEPS, RematStrategy(), faults)
    assert different == []
    assert faults.batches >= STEPS // 4
    assert {"op, forward", "op, backward", "function, forward", "function, backward"} & set(faults.happened)
    assert ours.counters.out_of_memory == sum(faults.happened.values())


@pytest.mark.parametrize("policy", ["full", "selective"])
def test_so_it_is_under_a_fixed_policy(policy: str) -> None:
    faults = Faults(7, 0.004)
    different, _ = compared("Adam, accumulated", STEPS, RematStrategy(policy=policy), faults)
    assert different == []
    assert faults.batches >= STEPS // 4


@pytest.mark.parametrize("strategy", ["auto", "remat"])
def test_without_failures_the_comparison_finds_nothing(strategy: str) -> None:
    """Two trainings are the same in every bit under the mode that makes ops fail, while it makes none fail."""
    different, _ = compared("Adam, accumulated", STEPS, strategy, Faults())
    assert different == []


def test_plain_training_ends_at_the_first_failure() -> None:
    """The failures are real ones, and reach whoever does nothing about them."""
    faults = Faults(1, 0.004)
    with pytest.raises(torch.OutOfMemoryError, match="made up"):
        train(SCENARIOS["Adam, clipped"], "auto", faults, STEPS)
    assert sum(faults.happened.values()) == 1


def test_the_comparison_sees_a_batch_that_was_counted_twice() -> None:
    """What a careless retry leaves behind shows: a metric, a random number, a gradient."""

    def careless(step: Any) -> Any:
        def twice(self: Any, batch: Any, index: int) -> Any:
            if index == 3:
                step(self, batch, index)
            return step(self, batch, index)

        return twice

    scenario = SCENARIOS["Adam, clipped"]
    module = type("Careless", (type(scenario.make()),), {})
    module.training_step = careless(module.training_step)
    plain = train(scenario, "auto", Faults(), STEPS)
    other = train(type(scenario)(make=module, options=scenario.options), "auto", Faults(), STEPS)
    differing = {kind for kind in plain.left if difference_in_bits(plain.left[kind], other.left[kind])}
    assert {"weights and buffers", "optimizers", "logged", "random streams"} <= differing


@pytest.mark.parametrize(
    ("op", "expected"),
    [
        (torch.ops.aten.mm.default, True),
        (torch.ops.aten.relu_.default, True),
        (torch.ops.aten.view.default, False),
        (torch.ops.aten.detach.default, False),
        (torch.ops.aten._local_scalar_dense.default, False),
        (torch.ops.aten.split.Tensor, False),
        (torch.ops.aten._foreach_mul.Scalar, True),
    ],
)
def test_what_can_fail(op: Any, expected: bool) -> None:
    assert may_allocate(op) is expected
