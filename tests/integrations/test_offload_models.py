"""Real architectures, and what Lightning does around a step, with contents on a disk: plain training in every bit."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from lightning_remat import RematStrategy
from tests.helpers.exact import EVERYTHING
from tests.helpers.training import Result
from tests.integrations import test_models as models
from tests.integrations import test_training as training

TIGHT = 1  # bytes, which no plan can do with: the one with the smallest peak is taken

POLICIES: dict[str, dict[str, Any]] = {
    "offload only": {"policy": "offload_only"},
    "full": {"policy": "full"},
    "selective": {"policy": "selective"},
    "selective, verified": {"policy": "selective", "verify": True},
    "auto": {"policy": "auto", "budget": TIGHT},
    "auto without recomputation": {"policy": "offload_only", "budget": TIGHT},
}

pytestmark = [
    pytest.mark.filterwarnings("ignore:policy='(auto|offload_only)'. budget=.* is not feasible"),  # asked for
    pytest.mark.filterwarnings("ignore:You have turned on `Trainer\\(detect_anomaly=True\\)`"),  # a case
    pytest.mark.filterwarnings("ignore:`training_step` returned `None`"),  # another one
]


def strategy(name: str) -> RematStrategy:
    return RematStrategy(offload=EVERYTHING, **POLICIES[name])


def bytes_moved(remat: Any) -> int:
    counters = remat.counters
    assert counters.bytes_out >= counters.last_bytes_out
    return int(counters.bytes_out)


# Planning takes as long for a small model as for a large one.
PLANNED = ("auto", "auto without recomputation")
SOON = ("gpt2", "lstm")
MODELS = [
    pytest.param(name, policy, marks=[pytest.mark.slow] if policy in PLANNED and name not in SOON else [])
    for name in models.CASES
    for policy in POLICIES
]


@pytest.mark.parametrize(("name", "policy"), MODELS)
def test_a_model_trains_the_same_in_every_bit(name: str, policy: str) -> None:
    """Losses, gradients of each step, parameters, buffers, optimizer state and random streams; and something left."""
    expected = models.plain(name)
    chosen = strategy(policy)
    result = models.run(name, chosen)
    assert result.difference(expected) == []
    assert result.steps_run == models.STEPS
    if policy != "auto":  # which may find it dearer than recomputation, down to the last byte
        assert bytes_moved(chosen.remat) > 0


@cache
def plain_training(name: str) -> Result:
    return training.run(training.CASES[name])


AROUND = [
    pytest.param(name, policy, marks=[pytest.mark.slow] if policy in PLANNED else [])
    for name in training.CASES
    for policy in ("offload only", "full", "selective, verified", "auto without recomputation")
]


@pytest.mark.parametrize(("name", "policy"), AROUND)
def test_what_lightning_does_around_a_step_is_the_same_in_every_bit(name: str, policy: str) -> None:
    """Accumulation, clipping, precisions, several optimizers, closures, gradients of gradients, copies in mid-step,
    weight averages."""
    chosen = strategy(policy)
    result = training.run(training.CASES[name], strategy=chosen)
    assert result.difference(plain_training(name)) == []
    if policy in ("offload only", "full"):  # elsewhere there may be nothing to keep, or nothing to gain
        assert bytes_moved(chosen.remat) > 0
