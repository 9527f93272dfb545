"""Replay: run recorded ops again until the value that backward asked for is there.

An op is replayed at most once per step. What a replay makes is kept exactly as long as somebody still refers to it: a
replayed value forgets its op, the op its inputs, and an input that neither autograd nor another recorded op refers to
is freed at once, by reference count.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import attrgetter
from time import perf_counter
from typing import Any, Protocol

import torch
from torch import Tensor

from lightning_remat.engine.generators import call_rewound
from lightning_remat.engine.offload.moved import Moved, bring_back
from lightning_remat.engine.plain import replay_as_plain
from lightning_remat.engine.values import OWNED, Blank, Extra, Geometry, Op, Value, check_leaf, storage_copy, view_of
from lightning_remat.errors import ReplayError

_DisableAutocast = torch._C._DisableAutocast
_BelowAutograd = torch._C._AutoDispatchBelowAutograd
_set_grad_enabled = torch._C._set_grad_enabled

# References to a value that only the op being replayed refers to: from its arguments, its list of needs, a local
# variable, and getrefcount's argument.
_ONLY_THIS_OP = 4


class Clock:
    """What replay has cost since it was last reset.

    Attributes:
        on_replay: is told of each op that ran again, and how long it took.
        replayed_ops: ops that ran again; to fetch what has left the device is none.
        seconds: what replay took, without fetching.
        fetch_seconds: what fetching took.
    """

    __slots__ = ("fetch_seconds", "on_replay", "replayed_ops", "seconds")

    def __init__(self) -> None:
        self.on_replay: Callable[[Op, float], None] | None = None
        self.reset()

    def reset(self) -> None:
        """Start again from zero."""
        self.replayed_ops = 0
        self.seconds = self.fetch_seconds = 0.0


class Room(Protocol):
    """Somebody who makes room where there is none; an :class:`~lightning_remat.engine.eviction.Eviction`."""

    def run(self, op: Op, pending: list[Op]) -> None:
        """Run an op with all that it takes, and leave alone what ``pending`` ops read."""


def restore(value: Value, clock: Clock, room: Room | None = None) -> None:
    """Make a dropped value's content present again, together with what it takes on the way.

    Args:
        value: absent so far.
        clock: is told what it cost.
        room: makes room where an op runs out of memory; None: the error goes up.

    Raises:
        ReplayError: an input was changed where the tape could not see it, or an op gave something of another shape
            or dtype than the first time.
    """
    start, fetched = perf_counter(), clock.fetch_seconds
    ops = missing_ops(value)
    # As in forward, where the tape called the op from inside its dispatch mode: below autograd, but with grad mode on,
    # which some kernels look at (oneDNN's recurrent layer makes no workspace without it).
    grad = torch.is_grad_enabled()
    _set_grad_enabled(True)
    try:
        with _BelowAutograd(), _DisableAutocast():
            fetches = sum([op.func.__class__ is Moved for op in ops])
            clock.replayed_ops += len(ops) - fetches
            if fetches or clock.on_replay is not None:
                _run_timed(ops, clock, room)
            while ops:
                if room is None:
                    run(ops.pop())
                else:
                    room.run(ops.pop(), ops)
    finally:
        _set_grad_enabled(grad)
        clock.seconds += perf_counter() - start - (clock.fetch_seconds - fetched)


def _run_timed(ops: list[Op], clock: Clock, room: Room | None) -> None:
    while ops:
        start = perf_counter()
        op = ops.pop()
        if room is None:
            run(op)
        else:
            room.run(op, ops)
        seconds = perf_counter() - start
        if op.func.__class__ is Moved:
            clock.fetch_seconds += seconds
        elif clock.on_replay is not None:
            clock.on_replay(op, seconds)


def missing_ops(value: Value) -> list[Op]:
    """The ops to run for ``value``, last first: back to values that are present."""
    first = value.op
    if first is None:
        raise ReplayError("a dropped value lost the op that makes it; please report this with the model that shows it.")
    found = [first]
    marks = {first}
    for op in found:  # grows while it is walked
        for v in op.needs:
            if v.tensor is None and v.op not in marks:
                marks.add(v.op)  # type: ignore[arg-type]  # a value without content has an op
                found.append(v.op)  # type: ignore[arg-type]  # a value without content has an op
    found.sort(key=_index, reverse=True)
    return found


_index = attrgetter("index")


def run(op: Op) -> None:
    """Run one recorded op whose inputs are present, and hand its outputs to the values that wait for them."""
    extra = op.extra
    if extra is None:
        if op.func.__class__ is Moved:
            bring_back(op)
            return
        tensor = value = a = None
        args: list[Any] = []
        add = args.append
        for a in op.args:
            kind = a.__class__
            if kind is tuple:
                value, geometry = a
                tensor = value.tensor
                if value.version is not None and (
                    tensor._version != value.version or id(tensor.untyped_storage()) != value.anchor
                ):
                    check_leaf(value)
                if geometry is None or geometry == value.geometry:
                    add(tensor)
                else:
                    add(view_of(value, geometry))
            elif kind is list:
                add(_argument(a))
            else:
                add(a)
        out = op.func._op(*args)
        del args, add, a, tensor, value
    elif extra[1] is not None and extra[1].form == "write":
        _run_write(op, extra)
        return
    else:
        out = _call(op, extra)
    if out.__class__ is Tensor:
        ((_, reference),) = op.outs
        value = reference()
        if value is not None and value.tensor is None:
            if (out.size(), out.stride(), out.storage_offset(), out.dtype) != value.geometry:
                out = _conform(op, 0, out, value)
            value.tensor = out
            value.flags |= OWNED
            value.op = None
        return
    for position, reference in op.outs:
        value = reference()
        if value is not None and value.tensor is None:
            o = out[position]
            if (o.size(), o.stride(), o.storage_offset(), o.dtype) != value.geometry:
                o = _conform(op, position, o, value)
            value.tensor = o
            value.flags |= OWNED
            value.op = None


def _call(op: Op, extra: Extra) -> Any:
    """Call an op that has keywords, draws from a generator, or updates running statistics."""
    kwargs, rule, rng = extra
    args = [_argument(a) for a in op.args]
    if kwargs:
        kwargs = {name: _argument(a) for name, a in kwargs.items()}
    if rule is not None and rule.hidden and (rule.training is None or args[rule.training]):
        # Running statistics: in training the outputs do not depend on them, and they count this step once.
        for i in rule.hidden:
            if i < len(args) and isinstance(args[i], Tensor):
                args[i] = args[i].clone()
    if rule is not None and rule.inner:
        return replay_as_plain(op.func, args, kwargs)
    if rng is None:
        return op.func(*args, **kwargs)
    return call_rewound(rng, op.func, args, kwargs)


def _run_write(op: Op, extra: Extra) -> None:
    """Replay an in-place op on memory that the replay owns: taken over from the old value, or a copy of it."""
    first = op.args[0]
    if first.__class__ is Blank:
        base = target = first.allocate()
        geometry = None
    else:
        old: Value = first[0]
        check_leaf(old)
        geometry = old.geometry
        if old.flags & OWNED and sys.getrefcount(old) <= _ONLY_THIS_OP:
            base = old.tensor  # type: ignore[assignment]  # an input is present when its op runs
            old.tensor = None
        else:
            base = storage_copy(old.tensor)  # type: ignore[arg-type]  # an input is present when its op runs
        target = base if first[1] == geometry else _seen_under(base, geometry, first[1])
    kwargs, _, rng = extra
    args = [target, *[_argument(a) if a.__class__ is tuple or a.__class__ is list else a for a in op.args[1:]]]
    if kwargs:
        kwargs = {name: _argument(a) for name, a in kwargs.items()}
    if rng is None:
        op.func._op(*args, **kwargs)
    else:
        call_rewound(rng, op.func._op, args, kwargs)
    value = op.outs[0][1]()
    if value is not None:
        value.tensor = base
        value.geometry = geometry
        value.flags |= OWNED
        value.op = None


def _seen_under(tensor: Tensor, have: Geometry | None, want: Geometry | None) -> Tensor:
    holder = Value()
    holder.tensor = tensor
    holder.geometry = have
    return view_of(holder, want)


def _argument(a: Any) -> Any:
    kind = a.__class__
    if kind is tuple:
        value, geometry = a
        if value.version is not None:
            check_leaf(value)
        return view_of(value, geometry)
    if kind is list:
        return [_argument(x) for x in a]
    return a


def _conform(op: Op, position: int, out: Tensor, value: Value) -> Tensor:
    """Bring a replayed output whose geometry differs into the recorded one, or refuse."""
    geometry: Geometry = value.geometry  # type: ignore[assignment]  # set when the op was recorded
    size, stride, offset, dtype = geometry
    if out.dtype is not dtype and out.dtype is torch.get_default_dtype():
        # The op took its dtype from a global default that was another one in forward.
        with _default_dtype(dtype):
            again = _call(op, op.extra or ({}, None, None))
        out = again[position] if isinstance(again, (tuple, list)) else again
    if out.dtype is not dtype or out.size() != size:
        raise ReplayError(
            f"{op.func} gave {tuple(out.shape)} {out.dtype} when it was run again, and {tuple(size)} {dtype} in "
            "forward. A global switch that it depends on was changed between forward and backward; set it for the "
            "whole step, or keep this op: a policy that returns 'keep' for it."
        )
    if (out.stride(), out.storage_offset()) == (stride, offset):
        return out
    # References may reach beyond this view of the storage: only a storage that it fills can be laid out anew.
    extent = offset + 1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True)) if out.numel() else 0
    whole = torch.empty(extent, dtype=dtype, device=out.device)
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
