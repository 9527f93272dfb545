"""Comparison in every bit, of whatever a run leaves behind."""

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch


def difference_in_bits(a: Any, b: Any, where: str = "") -> list[str]:
    """Name what differs between two nested structures; tensors by shape, dtype and every bit, the rest by `==`.

    Minus zero differs from zero here, and a NaN equals a NaN of the same bits.
    """
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        if hasattr(a, "to_local") and type(a) is type(b):  # a DTensor: each process compares what it has
            return _tensors(a.to_local(), b.to_local(), where)
        return _tensors(a, b, where)
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        return [] if a.dtype == b.dtype and a.tobytes() == b.tobytes() else [f"{where}: arrays differ"]
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        if list(a) != list(b):
            return [f"{where}: keys {list(a)} and {list(b)}"]
        return [text for key in a for text in difference_in_bits(a[key], b[key], f"{where}.{key}".lstrip("."))]
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        if len(a) != len(b):
            return [f"{where}: {len(a)} and {len(b)} entries"]
        pairs = enumerate(zip(a, b, strict=True))
        return [text for i, (x, y) in pairs for text in difference_in_bits(x, y, f"{where}[{i}]")]
    return [] if type(a) is type(b) and a == b else [f"{where}: {a!r} and {b!r}"]


def _tensors(a: torch.Tensor, b: torch.Tensor, where: str) -> list[str]:
    if a.shape != b.shape or a.dtype is not b.dtype:
        return [f"{where}: {tuple(a.shape)} {a.dtype} and {tuple(b.shape)} {b.dtype}"]
    left, right = (t.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for t in (a, b))
    if torch.equal(left, right):
        return []
    distance = (a.detach().double() - b.detach().double()).abs().max().item()
    return [f"{where}: {tuple(a.shape)} {a.dtype} differ by up to {distance:g}"]


def random_streams() -> dict[str, Any]:
    """Where PyTorch's, NumPy's and Python's generators stand."""
    return {"torch": torch.get_rng_state(), "numpy": list(np.random.get_state()), "python": random.getstate()}
