"""What is out of memory, and what only sounds like it."""

from __future__ import annotations

import re

import torch

_ASKED = re.compile(r"tried to allocate ([\d.]+) ?(bytes|KiB|MiB|GiB|B)", re.IGNORECASE)
_UNITS = {"b": 1, "bytes": 1, "kib": 1024, "mib": 1024**2, "gib": 1024**3}
_TEXTS = ("can't allocate memory", "CUDA out of memory", "could not create a primitive")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that memory could not be had."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _TEXTS)


def bytes_asked(error: BaseException) -> int | None:
    """How many bytes could not be had, as far as the error says."""
    found = _ASKED.search(str(error))
    return int(float(found[1]) * _UNITS[found[2].lower()]) if found else None
