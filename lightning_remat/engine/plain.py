"""What PyTorch does otherwise while a dispatch mode is active, put back to what it does without one.

Many formulas of autograd ask whether a mode is active and if so avoid in-place and data-dependent ops: the gradient of
``prod`` or ``masked_fill`` is then a sum in another order. So backward runs with the tape off the mode stack.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Any

import torch
from torch.utils import _python_dispatch as dispatch

_lock = Lock()
_outside: list[Any] = []  # modes that stay outside of backward, once for each time they have been entered
_original: Callable[..., Any] | None = None


@contextmanager
def backward_outside(mode: Any) -> Iterator[None]:
    """While this lasts, a backward pass started on a thread where ``mode`` is active runs without it.

    There is no official switch. The function that ``torch.autograd.backward`` and ``grad`` both call is replaced, as
    PyTorch itself does for tracing; on a thread where no such mode is active, it does what it always does.
    """
    global _original
    with _lock:
        _outside.append(mode)
        if len(_outside) == 1:
            _original = torch.autograd._engine_run_backward  # type: ignore[attr-defined]
            torch.autograd._engine_run_backward = _run_backward  # type: ignore[attr-defined]
    try:
        yield
    finally:
        # The last to leave puts the function back: steps on several threads need not end in the order they began.
        with _lock:
            _outside.remove(mode)
            if not _outside:
                torch.autograd._engine_run_backward = _original  # type: ignore[attr-defined, assignment]


def _run_backward(*args: Any, **kwargs: Any) -> Any:
    original = _original
    assert original is not None
    stack = dispatch._get_current_dispatch_mode_stack()
    first = next((position for position, mode in enumerate(stack) if mode in _outside), None)
    if first is None:
        return original(*args, **kwargs)
    taken = stack[first:]
    others = [mode for mode in taken if mode not in _outside]
    _swap(len(taken), others)
    try:
        return original(*args, **kwargs)
    finally:
        _swap(len(others), taken)


def _swap(count: int, modes: list[Any]) -> None:
    """Take the innermost ``count`` modes off the stack and put ``modes`` there."""
    for _ in range(count):
        dispatch._pop_mode()
    for mode in modes:
        dispatch._push_mode(mode)
