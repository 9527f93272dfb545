"""What PyTorch does otherwise while a dispatch mode is active, put back to what it does without one.

Two things differ, and both change bits or lose an error:

- Many formulas of autograd ask whether a mode is active and if so avoid in-place and data-dependent ops: the gradient
  of ``prod`` or ``masked_fill`` is then a sum in another order. So backward runs with the tape off the mode stack.
- Inside ``__torch_dispatch__`` the dispatch keys above Python are excluded. Among them are the one that resolves lazy
  conjugation and the one of autocast. A kernel that calls ``x.mH`` and multiplies the result, as complex
  ``linalg.pinv`` does, then reads numbers that were never conjugated; one that leaves a product to autocast, as
  ``bilinear`` does, gets another dtype. A third one counts changes: ``_foreach_mul_`` leaves that to the ops it calls,
  and nobody would notice that a saved tensor was changed. Such ops are called with those keys back in force. So is
  every op of another library, since nobody knows what its kernel calls; where that has no kernel for autograd, PyTorch
  differentiates what it calls, for which autograd's keys are put back as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from threading import Lock
from typing import Any

import torch
from torch._guards import TracingContext
from torch.utils import _python_dispatch as dispatch

_excluded = torch._C._dispatch_tls_is_dispatch_key_excluded
_exclude = torch._C._dispatch_tls_set_dispatch_key_excluded

_has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key

_LAZY_BITS = (torch._C.DispatchKey.Conjugate, torch._C.DispatchKey.Negative, torch._C.DispatchKey.ZeroTensor)
_VERSIONS = torch._C.DispatchKey.ADInplaceOrView  # bumps version counters
_AUTOGRAD = tuple(
    getattr(torch._C.DispatchKey, name) for name in ("AutogradFunctionality", "AutogradOther", "AutogradNestedTensor")
)
_AUTOCAST = tuple(key for name, key in torch._C.DispatchKey.__members__.items() if name.startswith("Autocast"))

# Ops that leave a product inside them to autocast, and for each the composite op that calls it. Where that one has an
# autocast kernel, we take it to be the caller: linalg.pinv called for itself under autocast on the CPU cannot be told
# from torch.pinverse, and is computed in float32, as the latter is.
_LEAVES_TO_AUTOCAST = {"aten::_trilinear": "aten::bilinear", "aten::linalg_pinv": "aten::pinverse"}

Guard = Callable[[Sequence[Any], bool], Any]
"""(tensors that a backward pass starts from, create_graph) -> a context manager to run it in, or None."""

_lock = Lock()
_outside: list[Any] = []  # modes that stay outside of backward, once for each time they have been entered
_watchers: list[Callable[[bool], None]] = []
_guards: list[Guard] = []
_original: Callable[..., Any] | None = None


@contextmanager
def backward_outside(mode: Any) -> Iterator[None]:
    """While this lasts, a backward pass started on a thread where ``mode`` is active runs without it."""
    _patch(_outside, mode)
    try:
        yield
    finally:
        _unpatch(_outside, mode)


def watch_backward(ended: Callable[[bool], None]) -> Callable[[], None]:
    """Have ``ended`` called whenever a backward pass has ended, until the function that this returns is called.

    It is told whether the pass ran to its end, on the thread that had started it, whichever that is.
    """
    _patch(_watchers, ended)
    return lambda: _unpatch(_watchers, ended)


def guard_backward(guard: Guard) -> Callable[[], None]:
    """Have every backward pass run in what ``guard`` gives for it, until the function that this returns is called."""
    _patch(_guards, guard)
    return lambda: _unpatch(_guards, guard)


def _patch(entries: list[Any], entry: Any) -> None:
    """Take over the function that ``torch.autograd.backward`` and ``grad`` both call.

    There is no official switch. PyTorch itself replaces it for tracing; where no list has anything to say, it does
    what it always does.
    """
    global _original
    with _lock:
        if not (_outside or _watchers or _guards):
            _original = torch.autograd._engine_run_backward  # type: ignore[attr-defined]  # private to torch
            torch.autograd._engine_run_backward = _run_backward  # type: ignore[attr-defined]  # private to torch
        entries.append(entry)


def _unpatch(entries: list[Any], entry: Any) -> None:
    """Put it back with the last one to leave: steps on several threads need not end in the order they began."""
    with _lock:
        if entry in entries:
            entries.remove(entry)
            if not (_outside or _watchers or _guards):
                # Private to torch; set while entries are there.
                torch.autograd._engine_run_backward = _original  # type: ignore[attr-defined, assignment]


def _run_backward(*args: Any, **kwargs: Any) -> Any:
    if TracingContext.try_get() is not None:
        # The compiler, tracing the backward of what it compiles: no pass of the step's.
        assert _original is not None
        return _original(*args, **kwargs)
    whole = False
    try:
        found = _without_modes(*args, **kwargs)
        whole = True
        return found
    finally:
        for ended in list(_watchers):
            ended(whole)


def _without_modes(*args: Any, **kwargs: Any) -> Any:
    stack = dispatch._get_current_dispatch_mode_stack()
    first = next((position for position, mode in enumerate(stack) if mode in _outside), None)
    if first is None:
        return _guarded(*args, **kwargs)
    taken = stack[first:]
    others = [mode for mode in taken if mode not in _outside]
    _swap(len(taken), others)
    # The hooks as well: a collective that backward starts would take them along in its thread state, to be released
    # by the thread of the process group, which needs the GIL for that; whoever destroys the group waits for that
    # thread with the GIL in hand.
    hooks = list(_pop_hooks([mode for mode in taken if mode in _outside]))
    try:
        return _guarded(*args, **kwargs)
    finally:
        for pair in reversed(hooks):
            pair.__enter__()
        _swap(len(others), taken)


def _guarded(*args: Any, **kwargs: Any) -> Any:
    original = _original
    assert original is not None
    if not _guards:
        return original(*args, **kwargs)
    with ExitStack() as stack:
        for guard in list(_guards):
            # As torch.autograd passes them: tensors, their gradients, keep_graph, create_graph, ...
            context = guard(args[0], bool(args[3] if len(args) > 3 else kwargs.get("create_graph", True)))
            if context is not None:
                stack.enter_context(context)
        return original(*args, **kwargs)


def _pop_hooks(tapes: Sequence[Any]) -> Iterator[Any]:
    """Take the tapes' saved-tensor hooks away, as far as no hooks of somebody else lie on top of them."""
    for tape in reversed(tapes):
        top: Any = torch._C._autograd._top_saved_tensors_default_hooks(False)
        if top is None or top[0] != tape.hooks.pack_hook:
            return
        tape.hooks.__exit__()
        yield tape.hooks


def _swap(count: int, modes: list[Any]) -> None:
    """Take the innermost ``count`` modes off the stack and put ``modes`` there."""
    for _ in range(count):
        dispatch._pop_mode()
    for mode in modes:
        dispatch._push_mode(mode)


def call_as_plain(func: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, bool]:
    """Call an op from inside ``__torch_dispatch__`` such that the ops it calls find the keys they find without a mode.

    Returns:
        What the op returned, and whether autocast was in force inside, which a replay does not bring back.
    """
    # The keys as they were when the op was called.
    with torch._C._RestorePythonTLSSnapshot():  # type: ignore[attr-defined]  # private to torch
        keys = [key for key in (*_LAZY_BITS, _VERSIONS) if not _excluded(key)]
        caller = _LEAVES_TO_AUTOCAST.get(func._schema.name)
        autocast = [] if caller is None else [key for key in _AUTOCAST if not _excluded(key)]
    # An op with an autocast kernel of its own switches autocast off for what it calls.
    autocast = [key for key in autocast if caller is not None and not _has_kernel(caller, key.name)]
    return _with_keys([*keys, *autocast], func, args, kwargs), bool(autocast)


def call_foreign(func: Any, args: Any, kwargs: dict[str, Any], bare: bool) -> Any:
    """Call an op of another library, whose kernel may call anything, with the keys that it finds without a mode.

    Where it is ``bare``, without a kernel for autograd, autograd follows the ops that its kernel calls.
    """
    with torch._C._RestorePythonTLSSnapshot():  # type: ignore[attr-defined]  # private to torch
        # A kernel for autograd has excluded autograd's own keys by the time it calls the op; the snapshot is older.
        autograd = _AUTOGRAD if bare else ()
        keys = [key for key in (*_LAZY_BITS, _VERSIONS, *_AUTOCAST, *autograd) if not _excluded(key)]
    return _with_keys(keys, func, args, kwargs)


def replay_as_plain(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Call such an op again for a replay, wherever that happens: past all modes."""
    with torch._C._DisableTorchDispatch():
        return _with_keys(_LAZY_BITS, func, args, kwargs)


def _with_keys(keys: Sequence[Any], func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    changed = [key for key in keys if _excluded(key)]
    for key in changed:
        _exclude(key, False)
    try:
        return func(*args, **kwargs)
    finally:
        for key in changed:
            _exclude(key, True)
