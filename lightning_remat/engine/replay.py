"""Replay: run recorded ops again until the value that backward asked for is there.

An op is replayed at most once per step. What a replay makes is kept exactly as long as somebody still refers to it: a
replayed value forgets its op, the op its inputs, and an input that neither autograd nor another recorded op refers to
is freed at once, by reference count.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from lightning_remat.engine.generators import rewound
from lightning_remat.engine.plain import replay_as_plain
from lightning_remat.engine.values import Blank, Geometry, Op, Ref, Value, check_leaf, storage_copy, view_of
from lightning_remat.errors import ReplayError

_DisableAutocast = torch._C._DisableAutocast
_set_grad_enabled = torch._C._set_grad_enabled

# References to a value that only the op being replayed refers to: its Ref, a local variable, getrefcount's argument.
_ONLY_THIS_OP = 3


class Clock:
    """What replay has cost since it was last reset."""

    __slots__ = ("on_replay", "replayed_ops", "seconds")

    def __init__(self) -> None:
        self.on_replay: Callable[[Op, float], None] | None = None
        self.reset()

    def reset(self) -> None:
        """Start again from zero."""
        self.replayed_ops = 0
        self.seconds = 0.0


def restore(value: Value, clock: Clock) -> None:
    """Make a dropped value's content present again, together with what it takes on the way.

    Raises:
        ReplayError: an input was changed where the tape could not see it, or an op gave something of another shape
            or dtype than the first time.
    """
    start = perf_counter()
    ops = missing_ops(value)
    grad = torch.is_grad_enabled()
    _set_grad_enabled(False)
    try:
        with _DisableAutocast():
            clock.replayed_ops += len(ops)
            if clock.on_replay is not None:
                _run_timed(ops, clock.on_replay)
            while ops:
                run(ops.pop())
    finally:
        _set_grad_enabled(grad)
        clock.seconds += perf_counter() - start


def _run_timed(ops: list[Op], report: Callable[[Op, float], None]) -> None:
    while ops:
        start = perf_counter()
        op = ops.pop()
        run(op)
        report(op, perf_counter() - start)


def missing_ops(value: Value) -> list[Op]:
    """The ops to run for ``value``, last first: back to values that are present."""
    first = value.op
    if first is None:
        raise ReplayError("a dropped value lost the op that makes it; please report this with the model that shows it.")
    found = {first}
    stack = [first]
    while stack:
        op = stack.pop()
        for a in op.args:
            kind = a.__class__
            if kind is Ref:
                v = a[0]
                if v.tensor is None and v.op not in found:
                    found.add(v.op)
                    stack.append(v.op)
            elif kind is list:
                for v in values_in(a):
                    if v.tensor is None and v.op not in found:
                        found.add(v.op)  # type: ignore[arg-type]
                        stack.append(v.op)  # type: ignore[arg-type]
        if op.kwargs:
            for v in values_in(list(op.kwargs.values())):
                if v.tensor is None and v.op not in found:
                    found.add(v.op)  # type: ignore[arg-type]
                    stack.append(v.op)  # type: ignore[arg-type]
    return sorted(found, key=_latest_first)


def _latest_first(op: Op) -> int:
    return -op.index


def values_in(args: list[Any]) -> Iterator[Value]:
    """Every value that recorded arguments refer to, nested lists included."""
    for a in args:
        if a.__class__ is Ref:
            yield a[0]
        elif a.__class__ is list:
            yield from values_in(a)


def run(op: Op) -> None:
    """Run one recorded op whose inputs are present, and hand its outputs to the values that wait for them."""
    rule = op.rule
    if rule is None:
        args = [_argument(a) for a in op.args]
        out = op.func(*args, **_keywords(op.kwargs)) if op.kwargs else op.func(*args)
        del args
    elif rule.form == "write":
        _run_write(op)
        return
    else:
        args = [_argument(a) for a in op.args]
        if rule.hidden and (rule.training is None or args[rule.training]):
            # Running statistics: in training the outputs do not depend on them, and they count this step once.
            for i in rule.hidden:
                if i < len(args) and isinstance(args[i], Tensor):
                    args[i] = args[i].clone()
        kwargs = _keywords(op.kwargs)
        if op.rng is not None:
            with rewound(op.rng):
                out = op.func(*args, **kwargs)
        elif rule.inner:
            out = replay_as_plain(op.func, args, kwargs)
        else:
            out = op.func(*args, **kwargs)
        del args, kwargs
    outs = out if out.__class__ is tuple or out.__class__ is list else (out,)
    for position, reference in op.outs:
        value = reference()
        if value is not None and value.tensor is None:
            o = outs[position]
            geometry = (o.size(), o.stride(), o.storage_offset(), o.dtype)
            if geometry != value.geometry:
                o = _conform(op, position, o, value)
            value.tensor = o
            value.owned = True
            value.op = None


def _run_write(op: Op) -> None:
    """Replay an in-place op on memory that the replay owns: taken over from the old value, or a copy of it."""
    first = op.args[0]
    if first.__class__ is Blank:
        base = target = first.allocate()
        geometry = (base.size(), base.stride(), base.storage_offset(), base.dtype)
    else:
        old: Value = first[0]
        geometry = old.geometry  # type: ignore[assignment]
        check_leaf(old)
        base = old.tensor  # type: ignore[assignment]
        if old.owned and sys.getrefcount(old) <= _ONLY_THIS_OP:
            old.tensor = None
        else:
            base = storage_copy(base)
        target = view_of_tensor(base, geometry, first[1])
    args = [target, *[_argument(a) for a in op.args[1:]]]
    kwargs = _keywords(op.kwargs)
    if op.rng is not None:
        with rewound(op.rng):
            op.func(*args, **kwargs)
    else:
        op.func(*args, **kwargs)
    value = op.outs[0][1]()
    if value is not None:
        value.tensor = base
        value.geometry = geometry
        value.owned = True
        value.op = None


def _argument(a: Any) -> Any:
    kind = a.__class__
    if kind is Ref:
        value = a[0]
        if value.version is not None:
            check_leaf(value)
        return view_of(value, a[1])
    if kind is list:
        return [_argument(x) for x in a]
    return a


def _keywords(kwargs: dict[str, Any] | None) -> dict[str, Any]:
    return {name: _argument(a) for name, a in kwargs.items()} if kwargs else {}


def _conform(op: Op, position: int, out: Tensor, value: Value) -> Tensor:
    """Bring a replayed output whose geometry differs into the recorded one, or refuse."""
    geometry: Geometry = value.geometry  # type: ignore[assignment]
    size, stride, offset, dtype = geometry
    if out.dtype is not dtype and out.dtype is torch.get_default_dtype():
        # The op took its dtype from a global default that was another one in forward.
        with _default_dtype(dtype):
            args = [_argument(a) for a in op.args]
            with rewound(op.rng) if op.rng is not None else _nothing():
                again = op.func(*args, **_keywords(op.kwargs))
        out = again[position] if isinstance(again, (tuple, list)) else again
    if out.dtype is not dtype or out.size() != size:
        raise ReplayError(
            f"{op.func} gave {tuple(out.shape)} {out.dtype} when it was run again, and {tuple(size)} {dtype} in "
            "forward. A global switch that it depends on was changed between forward and backward; set it for the "
            "whole step, or keep this op: a policy that returns 'keep' for it."
        )
    if (out.stride(), out.storage_offset()) == (stride, offset):
        return out
    whole = torch.empty(value.nbytes // out.element_size(), dtype=dtype, device=out.device)
    shaped = whole.as_strided(size, stride, offset)
    shaped.copy_(out)
    return shaped


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def _nothing() -> Iterator[None]:
    yield


def view_of_tensor(tensor: Tensor, have: Geometry, want: Geometry) -> Tensor:
    """``tensor``, whose geometry is ``have``, seen under ``want``; the same storage."""
    holder = Value()
    holder.tensor = tensor
    holder.geometry = have
    return view_of(holder, want)
