"""Our run for a given peak of a step: the one place that knows how a budget is handed over and read back."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from models import Variant, buffers_restored, differences, outcome
from torch import nn
from yards import Yard

from lightning_remat import Remat
from lightning_remat.runtime.memory import measure_peak

STEPS_TO_SETTLE = 4
"""The first step is lean and traced, the second one is planned for; a tuner may correct that."""


@dataclass(frozen=True, kw_only=True)
class Planned(Variant):
    """Ours under a budget."""

    engine: Remat
    step_peak: int
    """What the budget leaves for a step above what was there when it began."""


def ours_at(model: nn.Module, step_peak: int) -> Planned:
    """Ours, with a budget that allows a step the peak ``step_peak``, as `measure_peak` counts it.

    A step of these benchmarks begins without gradients, so that those are part of ``step_peak``.
    """
    engine = Remat(policy="auto", budget=static_bytes(model) + step_peak)
    around: Callable[[], AbstractContextManager[Any]] = lambda: engine  # noqa: E731 - a field, not a function's name
    return Planned(name=f"ours at {step_peak:,} bytes", around=around, engine=engine, step_peak=step_peak)


def static_bytes(model: nn.Module) -> int:
    """What is there between steps: parameters and buffers, each storage once."""
    storages = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in [*model.parameters(), *model.buffers()]
    }
    return sum(storages.values())


def predicted_peak(variant: Planned) -> int | None:
    """What the plan in force is predicted to take in a step; None where there is no plan."""
    # No public name says so yet.
    result = variant.engine.plan
    return None if result is None else result.chosen.peak_bytes


class NoPlan(Exception):
    """Nothing fits; the text says how much the leanest plan would need."""


def settled(variant: Planned, yard: Yard, expected: dict[str, list[torch.Tensor]]) -> list[str]:
    """Run the first steps of ours; returns the kinds in which any of them differs from plain.

    Raises:
        NoPlan: The budget is too small. Training would go on under the plan with the smallest peak.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="policy='auto'")  # a budget that no plan fits is a row like others
        different = [differences(expected, outcome(variant, yard.model, yard.batch)) for _ in range(STEPS_TO_SETTLE)]
    predicted = predicted_peak(variant)
    if predicted is not None and predicted > variant.step_peak:
        raise NoPlan(f"the leanest plan needs {predicted / 2**20:.1f} MiB")
    return sorted({kind for kinds in different for kind in kinds})


def step_peak(variant: Variant, yard: Yard) -> int:
    """The most bytes that a step has at once above what was there when it began."""

    def step() -> None:
        variant.step(yard.model, yard.batch)
        yard.model.zero_grad()

    with buffers_restored(yard.model), variant.installed():
        return measure_peak(step).peak_bytes
