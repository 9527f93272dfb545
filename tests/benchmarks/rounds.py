"""Timing several variants so that what disturbs one disturbs all: rounds, in each of which every variant has a turn."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

from models import Variant
from rich.progress import track
from torch import nn

WARM_UP = 3


class Seconds(NamedTuple):
    """One step: processor time of its two halves, and the time on the clock."""

    forward: float
    backward: float
    wall: float

    @property
    def processor(self) -> float:
        return self.forward + self.backward


def interleaved(
    variants: list[Variant], model: nn.Module, batch: Any, rounds: int, in_a_row: int, warm_up: int = WARM_UP
) -> dict[str, list[Seconds]]:
    """Times of each variant, one for each round: of the last of ``in_a_row`` steps. The order rotates."""
    found: dict[str, list[Seconds]] = {variant.name: [] for variant in variants}
    for turn in track(range(-warm_up, rounds), description="rounds", transient=True):
        first = turn % len(variants)
        for variant in variants[first:] + variants[:first]:
            with variant.installed():
                for _ in range(in_a_row):
                    seconds = timed_step(variant, model, batch)
            if turn >= 0:
                found[variant.name].append(seconds)
    return found


def timed_step(variant: Variant, model: nn.Module, batch: Any) -> Seconds:
    """Run a step; the model is left without gradients."""
    clock = time.perf_counter()
    started = time.process_time()
    loss = variant.forward(model, batch)
    middle = time.process_time()
    loss.backward()
    del loss  # the end of the graph, and of what a tape has attached to it, is part of the step
    ended = time.process_time()
    wall = time.perf_counter() - clock
    model.zero_grad()
    return Seconds(middle - started, ended - middle, wall)
