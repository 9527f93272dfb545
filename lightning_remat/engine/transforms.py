"""``torch.func`` inside a step.

``torch.func.grad``, ``vjp`` and ``jacrev`` refuse to run while saved-tensor hooks are in force. The part that runs under
such a transform is left plain: our hooks step aside for it and come back. There is no official switch for that, so the
function that transforms call is replaced for the length of a step; outside of our hooks it does what it always does.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_warned = False


def top_hooks() -> Any:
    """The innermost (pack, unpack) pair in force on this thread, or None."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False)


@contextmanager
def transforms_allowed(hooks: torch.autograd.graph.saved_tensors_hooks) -> Iterator[None]:
    """Let ``torch.func`` transforms run inside ``hooks``, without them."""
    original = torch.autograd.graph.disable_saved_tensors_hooks

    @contextmanager
    def disable(error_message: str) -> Iterator[None]:
        top = top_hooks()
        if top is None or top[0] != hooks.pack_hook:
            with original(error_message):
                yield
            return
        _warn_once()
        hooks.__exit__()
        try:
            with original(error_message):
                yield
        finally:
            hooks.__enter__()

    torch.autograd.graph.disable_saved_tensors_hooks = disable
    try:
        yield
    finally:
        torch.autograd.graph.disable_saved_tensors_hooks = original


def _warn_once() -> None:
    global _warned
    if not _warned:
        _warned = True
        warnings.warn(
            "torch.func transforms do not support saved-tensor hooks, so what they save is kept, not recomputed.",
            stacklevel=4,
        )
