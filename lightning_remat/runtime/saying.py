"""Warnings that point at the user's own line, wherever in a step the reason for them is found."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import torch

_ON_THE_WAY = tuple([str(Path(file).parent) for file in (str(torch.__file__), str(Path(__file__).parent))])


def warn(text: str) -> None:
    """A warning for the first line on the stack that is neither ours nor PyTorch's."""
    level = 2
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_ON_THE_WAY):
        frame = frame.f_back
        level += 1
    warnings.warn(text, stacklevel=level)
