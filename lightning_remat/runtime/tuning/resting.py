"""Batches that are known to need no tape: what they look like, without running anything on them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

Look = tuple[tuple[Any, ...], tuple[int, ...]]
"""What a batch is built of, and all sizes of its tensors."""

_MOST_ITEMS = 2_000
_DEEPEST = 8
_MOST_LOOKS = 32  # of one structure, none of which is at least as large as another everywhere


def look(batch: Any) -> Look | None:
    """Structure and sizes of a batch; None if there is too much to look at."""
    structure: list[Any] = []
    sizes: list[int] = []
    return (tuple(structure), tuple(sizes)) if _walk(batch, structure, sizes, 0) else None


def _walk(item: Any, structure: list[Any], sizes: list[int], depth: int) -> bool:
    if depth > _DEEPEST or len(structure) > _MOST_ITEMS:
        return False
    if isinstance(item, Tensor):
        if item.is_nested or item.layout is not torch.strided:
            return False  # its shape does not say how much there is
        structure.append((item.dtype, item.dim(), item.device.type))
        sizes.extend(item.shape)
        return True
    kind = type(item)
    structure.append(kind)
    if isinstance(item, Mapping):
        structure.append(len(item))
        for key in item:
            structure.append(key if isinstance(key, (str, int)) else type(key))
        parts: Any = item.values()
    elif isinstance(item, (list, tuple, set, frozenset)):
        structure.append(len(item))
        parts = item
    elif is_dataclass(item):
        parts = [getattr(item, f.name, None) for f in fields(item)]
    elif hasattr(item, "__dict__"):
        parts = [value for value in vars(item).values() if isinstance(value, (Tensor, Mapping, list, tuple))]
    else:
        return True
    return all(_walk(part, structure, sizes, depth + 1) for part in parts)


class Covered:
    """Batches of steps in which nothing had to be dropped."""

    def __init__(self) -> None:
        self._known: dict[tuple[bool, tuple[Any, ...]], list[tuple[int, ...]]] = {}

    def add(self, accumulating: bool, seen: Look) -> None:
        """A step ran on such a batch, everything was kept, and it fitted."""
        structure, sizes = seen
        known = self._known.setdefault((accumulating, structure), [])
        if not _covers(known, sizes):
            known[:] = [other for other in known if not _covers([sizes], other)]
            known.append(sizes)
            del known[:-_MOST_LOOKS]

    def covers(self, accumulating: bool, seen: Look) -> bool:
        """Whether one of the same structure and at least of its size in every dimension was among them."""
        structure, sizes = seen
        return _covers(self._known.get((accumulating, structure), []), sizes)

    def clear(self) -> None:
        """Nothing is known any more."""
        self._known.clear()


def _covers(known: list[tuple[int, ...]], sizes: tuple[int, ...]) -> bool:
    return any(len(k) == len(sizes) and all(a >= b for a, b in zip(k, sizes, strict=True)) for k in known)
