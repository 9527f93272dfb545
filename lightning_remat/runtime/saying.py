"""Saying things: a plan in a line, and warnings that point at the user's own line, wherever in a step they arise."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import torch

from lightning_remat.planning.plan import PlanResult
from lightning_remat.sizes import format_bytes

_ON_THE_WAY = tuple([str(Path(file).parent) for file in (str(torch.__file__), str(Path(__file__).parent))])


def warn(text: str) -> None:
    """A warning for the first line on the stack that is neither ours nor PyTorch's."""
    level = 2
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_ON_THE_WAY):
        frame = frame.f_back
        level += 1
    warnings.warn(text, stacklevel=level)


class Once:
    """Warnings of one engine, each topic once.

    Args:
        about: what they begin with.
    """

    def __init__(self, about: str) -> None:
        self.about = about
        self.said: set[str] = set()

    def __call__(self, topic: str, text: str) -> None:
        """Warn, unless there was something on that topic before."""
        if topic not in self.said:
            self.said.add(topic)
            warn(f"{self.about}: {text}")


def in_words(result: PlanResult) -> str:
    """A plan in one line."""
    chosen = result.chosen
    drops, ops = sum(chosen.drop), len(result.trace.ops)
    moved = f", {format_bytes(chosen.moved_bytes)} moved" if chosen.moves else ""
    return (
        f"budget {format_bytes(result.budget_bytes)}: predicted peak {format_bytes(result.peak_bytes)}, "
        f"{drops} of {ops} ops run again{moved}, {chosen.extra_seconds * 1e3:.1f} ms a step"
    )
