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
    size = _parse("budget", budget, accepted)
    if isinstance(size, float):
        if not 0 < size <= 1:
            raise ConfigurationError(f"budget={budget!r}: a share of the device is above 0% and at most 100%.")
    elif size < 1:
        raise ConfigurationError(f"budget={budget!r}: a step needs more than no memory; {accepted}.")
    return size


def parse_margin(margin: object) -> int | float:
    """What is to stay free, in bytes (int) or as a share of the device's memory (float in [0, 1)).

    Raises:
        ConfigurationError: it is neither, with what is accepted.
    """
    accepted = "give a share of the device ('5%', not 0.05), a size ('1GiB', '500MiB') or bytes (500_000_000)"
    size = _parse("margin", margin, accepted)
    if isinstance(size, float) and size >= 1:
        raise ConfigurationError(f"margin={margin!r}: a share of the device that stays free is below 100%.")
    if size < 0:
        raise ConfigurationError(f"margin={margin!r}: less than nothing cannot stay free; {accepted}.")
    return size


def parse_amount(name: str, given: object, *, least: int = 1, share: bool = False) -> int | float:
    """An amount of memory or disk in bytes (int) or, if ``share`` allows it, a share of all there is (float in (0, 1]).

    Raises:
        ConfigurationError: it is neither, or below ``least`` bytes, with what is accepted.
    """
    accepted = "give bytes (20_000_000_000) or a size ('20GiB', '500MiB')"
    if share:
        accepted = "give bytes (20_000_000_000), a size ('20GiB', '500MiB') or a share ('50%', not 0.5)"
    size = _parse(name, given, accepted)
    if isinstance(size, float):
        if not share:
            raise ConfigurationError(f"{name}={given!r}: a share of what? {accepted}.")
        if not 0 < size <= 1:
            raise ConfigurationError(f"{name}={given!r}: a share is above 0% and at most 100%.")
    elif size < least:
        raise ConfigurationError(f"{name}={given!r} is less than can be used; {accepted}, {least} at least.")
    return size


def _parse(name: str, given: object, accepted: str) -> int | float:
    """Bytes (int) or a share (float), of whatever size."""
    if isinstance(given, bool) or not isinstance(given, (int, str)):
        raise ConfigurationError(f"{name}={given!r} is not a size; {accepted}.")
    if isinstance(given, int):
        return given
    match = _PATTERN.fullmatch(given)
    if match is None or (match[2] != "%" and match[2].lower() not in _UNITS):
        raise ConfigurationError(f"{name}={given!r} is not a size; {accepted}.")
    if match[2] == "%":
        return float(match[1]) / 100
    size = float(match[1]) * _UNITS[match[2].lower()]
    if size == float("inf"):
        raise ConfigurationError(f"{name}={given!r} is more than can be counted; {accepted}.")
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
