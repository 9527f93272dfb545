"""``torch.func`` inside a step.

``torch.func.grad``, ``vjp`` and ``jacrev`` refuse to run while saved-tensor hooks are in force. The part that runs
under such a transform is left plain: our hooks step aside for it and come back. There is no official switch for that,
so the function that transforms call is replaced for the length of a step; outside of our hooks it does what it always
does.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from threading import Lock
from typing import Any

import torch

_warned = False


def top_hooks() -> Any:
    """The innermost (pack, unpack) pair in force on this thread, or None."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False)


_lock = Lock()
_ours: list[torch.autograd.graph.saved_tensors_hooks] = []  # in force somewhere, once for each step that is running
_original: Callable[[str], AbstractContextManager[None]] | None = None


@contextmanager
def transforms_allowed(hooks: torch.autograd.graph.saved_tensors_hooks) -> Iterator[None]:
    """Let ``torch.func`` transforms run inside ``hooks``, without them."""
    global _original
    with _lock:
        _ours.append(hooks)
        if len(_ours) == 1:
            _original = torch.autograd.graph.disable_saved_tensors_hooks
            torch.autograd.graph.disable_saved_tensors_hooks = _disable
    try:
        yield
    finally:
        # The last to leave puts the function back: steps on several threads need not end in the order they began.
        with _lock:
            _ours.remove(hooks)
            if not _ours:
                # Set by the first to enter.
                torch.autograd.graph.disable_saved_tensors_hooks = _original  # type: ignore[assignment]


@contextmanager
def _disable(error_message: str) -> Iterator[None]:
    original = _original
    assert original is not None
    top = top_hooks()
    mine = next((hooks for hooks in _ours if top is not None and top[0] == hooks.pack_hook), None)
    if mine is None:
        with original(error_message):
            yield
        return
    _warn_once()
    mine.__exit__()
    try:
        with original(error_message):
            yield
    finally:
        mine.__enter__()


def _warn_once() -> None:
    global _warned
    if not _warned:
        _warned = True
        warnings.warn(
            "torch.func transforms do not support saved-tensor hooks, so what they save is kept, not recomputed.",
            stacklevel=4,
        )
