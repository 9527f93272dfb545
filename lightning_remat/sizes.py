"""Byte sizes as users write them: ``20_000_000``, ``"20GiB"``, ``"80%"``."""

from __future__ import annotations

import os
import re

import torch

from lightning_remat.errors import ConfigurationError

_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgt", start=1):
    _UNITS[f"{_letter}b"] = 1000**_power
    _UNITS[f"{_letter}ib"] = 1024**_power
_PATTERN = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*|%)\s*", re.IGNORECASE)


def parse_budget(budget: object) -> int | float | None:
    """A budget in bytes (int), or a share of the device's memory (float in (0, 1]); None stays None.

    Raises:
        ConfigurationError: it is neither, with what is accepted.
    """
    if budget is None:
        return None
    accepted = "give bytes (20_000_000_000), a size ('20GiB', '500MiB') or a share of the device ('80%', not 0.8)"
    if isinstance(budget, bool) or not isinstance(budget, (int, str)):
        raise ConfigurationError(f"budget={budget!r} is not a size; {accepted}.")
    if isinstance(budget, int):
        size: float = budget
    else:
        match = _PATTERN.fullmatch(budget)
        if match is None or (match[2] != "%" and match[2].lower() not in _UNITS):
            raise ConfigurationError(f"budget={budget!r} is not a size; {accepted}.")
        if match[2] == "%":
            share = float(match[1]) / 100
            if not 0 < share <= 1:
                raise ConfigurationError(f"budget={budget!r}: a share of the device is above 0% and at most 100%.")
            return share
        size = float(match[1]) * _UNITS[match[2].lower()]
        if size == float("inf"):
            raise ConfigurationError(f"budget={budget!r} is more than can be counted; {accepted}.")
    if size < 1:
        raise ConfigurationError(f"budget={budget!r}: a step needs more than no memory; {accepted}.")
    return int(size)


def device_memory(device: torch.device) -> int:
    """All memory of a device in bytes; for the CPU, the machine's."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def format_bytes(count: float) -> str:
    """``1536`` as ``"1.5 KiB"``."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(count) < 1024 or unit == "TiB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError
