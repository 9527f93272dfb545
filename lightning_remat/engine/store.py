"""What the tape knows about storages: which hold a dropped value, which a leaf, and which are parameters.

Everything is found by storage, never by Python object, since autograd and views hand us ever new objects over the same
bytes. The key is a weak reference to the storage's Python object, which lives exactly as long as the storage: an entry
goes when its storage does, so an address that is used again can not be mistaken.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol
from weakref import ref as weakref

import torch
from torch import Tensor
from torch.nn.parameter import Parameter

from lightning_remat.engine.aliases import alias
from lightning_remat.engine.spread import Shells, counter_of, is_spread, local_of
from lightning_remat.engine.values import (
    HELD,
    PACKED,
    SPLIT,
    STALE,
    Gathered,
    Op,
    Ref,
    Value,
    geometry_of,
    storage_copy,
)

_PLAIN = frozenset({Tensor, Parameter, torch.nn.Buffer})
CONSTANTS = frozenset(
    {
        int,
        float,
        bool,
        complex,
        str,
        type(None),
        torch.dtype,
        torch.device,
        torch.layout,
        torch.memory_format,
        torch.Generator,
    }
)
_ONLY_HERE = 2  # references to a value that only a local variable and getrefcount's argument refer to


class Observer(Protocol):
    """Somebody who looks over the tape's shoulder."""

    def recorded(self, op: Op, args: Any, kwargs: Any, out: Any) -> None:
        """An op's result was dropped. ``args`` is None for a write, whose arguments are no longer what they were."""

    def packed(self, tensor: Tensor, packed: Any) -> None:
        """Autograd saves ``tensor`` and holds ``packed`` for it."""

    def kept(self, tensor: Tensor, value: Value) -> None:
        """A dropped value is kept after all."""

    def left(self, tensor: Tensor, value: Value) -> None:
        """A content that would be kept leaves the device."""


def forgetter(table: dict[Any, Any]) -> Callable[[Any], None]:
    """A weak reference's callback that removes its entry; quiet if that has gone already."""
    pop = table.pop

    def forget(key: Any) -> None:
        pop(key, None)

    return forget


class Unrecordable(Exception):
    """An argument or output that the tape does not describe (a subclass, a sparse tensor, an unknown object)."""


class Store:
    """The tables, and references into them.

    Attributes:
        dropped: values that are not kept, while their storage is still alive.
        leaves: weak references to values that are there and that a recorded op reads.
        parameters: the same for parameters, by id of their storage, which the entry itself keeps alive: cheaper.
        shells: the DTensors that the present op was called on.
        bits: lazy conjugation or negation was seen, so references have to carry it.
        observers: told of everything that is recorded, saved or kept (a ledger, verification); none in steady state.
        units: of sharded parameters (:class:`~lightning_remat.engine.sharded.Units`); None: there are none.
        tied: the unit of each recorded op whose replay reads such parameters, by the op's index.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bits = False
        self.shells = Shells()
        self.dropped: dict[Any, Value] = {}
        self.leaving: dict[Any, None] = {}
        self.leaves: dict[Any, Any] = {}
        self.parameters: dict[int, Ref] = {}
        self._forget_dropped = forgetter(self.dropped)
        self._forget_leaf = forgetter(self.leaves)
        self.observers: list[Observer] = []
        self.units: Any = None
        self.tied: dict[int, Any] = {}

    def clear(self) -> None:
        """Forget the step: nothing that autograd does not hold stays alive."""
        self.dropped.clear()
        self.leaves.clear()
        self.parameters.clear()
        self.shells = Shells()
        self.tied.clear()

    def _arguments(self, args: Any, needs: list[Value]) -> list[Any]:
        """``args`` with tensors replaced by references; the dropped values among them are added to ``needs``."""
        dropped = self.dropped
        out: list[Any] = []
        for a in args:
            kind = a.__class__
            if kind is Tensor:
                storage = a.untyped_storage()
                value = dropped.get(weakref(storage))
                if value is not None and a._version > value.seen:
                    value = self.overwritten(a, value)
                if value is None and self.leaving and (key := weakref(storage)) in self.leaving:
                    value = self.leave(a, key)
                if value is not None and self.tied:
                    value = self.settle(a, value)
                if value is None:
                    a = self._leaf_ref(a, storage)
                else:
                    needs.append(value)
                    if self.bits:
                        a = (value, geometry_of(a))
                    else:
                        a = (value, (a.size(), a.stride(), a.storage_offset(), a.dtype))
            elif kind is Parameter:
                a = self._parameter_ref(a, a.untyped_storage())
            elif kind in CONSTANTS:
                pass
            elif kind is list:
                a = self._arguments(a, needs)
            elif kind is torch.nn.Buffer:
                a = self._leaf_ref(a, a.untyped_storage())
            else:
                raise Unrecordable
            out.append(a)
        return out

    def leave(self, tensor: Tensor, key: Any) -> Value | None:
        """Something is about to hold a content that may leave the device: the value that it becomes; None if it stays.

        What may is in ``leaving``; see :class:`~lightning_remat.engine.leaving.Leaving`.
        """
        return None

    def overwritten(self, tensor: Tensor, value: Value) -> Value | None:
        """A dropped value whose storage was written to by code that nobody sees, as its version counter says: None.

        Such as a kernel in an ``autograd.Function`` that calls ``mark_dirty``. What was recorded before finds the old
        content; what the storage holds now is a leaf, and autograd's references to the old one are refused.
        """
        if value.flags & SPLIT:
            return value  # its views count apart
        self._before_write(tensor)
        self.leaving.pop(weakref(tensor.untyped_storage()), None)
        if value.flags & PACKED:
            value.flags |= STALE
        return None

    def settle(self, tensor: Tensor, value: Value) -> Value | None:
        """A dropped value that is read or saved; None if it was made from parameters of another unit, and is now kept.

        A replay must not need parameters that are not gathered where it happens.
        """
        unit = self.tied.get(value.op.index) if value.op is not None else None
        if unit is None or unit is self.units.here:
            return value
        self.keep(tensor)
        return None

    def tie(self, op: Op) -> Any:
        """The unit whose parameters the replay of an op that is about to be recorded will read; None: it reads none.

        Raises:
            Unrecordable: they will not be there: those of another unit, or of one that backward does not gather.
        """
        here = self.units.here
        unit = None
        for v in op.needs:
            if v.tensor is None and v.op is not None:
                unit = self.tied.get(v.op.index) or unit
        for parameter in _sharded_in(op.args if op.extra is None else [*op.args, *op.extra[0].values()]):
            unit = parameter.unit
            if unit is not here or not unit.comes_back():
                raise Unrecordable
        return unit

    def _keywords(self, kwargs: dict[str, Any] | None, needs: list[Value]) -> dict[str, Any]:
        return dict(zip(kwargs, self._arguments(kwargs.values(), needs), strict=True)) if kwargs else {}

    def _parameter_ref(self, parameter: Tensor, storage: Any) -> Ref:
        """A reference to a parameter as it is."""
        key = id(storage)
        reference = self.parameters.get(key)
        if reference is not None:
            if reference[0].tensor is parameter:
                return reference
            return (reference[0], geometry_of(parameter))  # two Parameter objects over one storage
        value = Value()
        value.op = None
        value.tensor = parameter
        value.geometry = None
        value.version = parameter._version
        value.flags = HELD
        value.anchor = key
        reference = self.parameters[key] = (value, None)
        return reference

    def _leaf_ref(self, tensor: Tensor, storage: Any) -> Ref:
        """A reference to content that the tape did not compute."""
        has_history = tensor.requires_grad
        parameter = self.parameters.get(id(storage))
        if parameter is None and has_history:
            base = tensor._base
            if base.__class__ is Parameter:
                parameter = self._parameter_ref(base, storage)
        if parameter is not None:
            value: Value | None = parameter[0]
        else:
            found = self.leaves.get(weakref(storage))
            value = found() if found is not None else None
            if value is not None and value.version is not None and tensor._version > value.version:
                value = None  # written to by code that nobody sees; a replay that reads the old content is refused
        if value is not None:
            if self.bits:
                return (value, geometry_of(tensor))
            return (value, (tensor.size(), tensor.stride(), tensor.storage_offset(), tensor.dtype))
        if tensor.is_conj() or tensor.is_neg():
            self.bits = True
        value = Value()
        value.op = None
        # What has no history may be held as it is; anything else would pull its graph along.
        value.tensor = alias(tensor) if has_history else tensor
        value.geometry = None
        value.version = None if tensor.is_inference() else tensor._version
        value.flags = 0 if has_history else HELD
        value.anchor = self._anchor(storage)
        self.leaves[weakref(storage, self._forget_leaf)] = weakref(value)
        return (value, None)

    def _anchor(self, storage: Any) -> Any:
        """What shows that a leaf is another: its storage, or a counter that its own tensor does not have."""
        shell = self.shells.of(storage)
        return id(storage) if shell is None else counter_of(shell)

    def reference_to(self, tensor: Tensor) -> Value:
        """The value that stands for what a tensor holds that the tape did not compute."""
        storage = tensor.untyped_storage()
        reference = self._parameter_ref(tensor, storage) if tensor.__class__ is Parameter else None
        return (reference or self._leaf_ref(tensor, storage))[0]

    def add_leaf(self, tensor: Tensor, value: Value) -> None:
        """Have a value found by whoever reads or overwrites the storage of ``tensor``."""
        self.leaves[weakref(tensor.untyped_storage(), self._forget_leaf)] = weakref(value)

    def _before_write(self, tensor: Tensor) -> Value | None:
        """Make sure that what was recorded still finds the content that is about to be overwritten.

        Returns the value that is about to lose its storage; afterwards the storage holds new content, a leaf until
        somebody says otherwise.
        """
        if tensor.layout is not torch.strided or type(tensor) not in _PLAIN:
            return None
        key = weakref(tensor.untyped_storage())
        value = self.dropped.pop(key, None)
        if value is not None:
            return value
        parameter = self.parameters.pop(id(tensor.untyped_storage()), None)
        if parameter is None:
            found = self.leaves.pop(key, None)
            leaf: Value | None = found() if found is not None else None
        else:
            leaf = parameter[0]
            if isinstance(leaf, Gathered):
                # No copy: what is written is gone with the next gathering, and a replay that reads it raises.
                self.parameters[id(tensor.untyped_storage())] = parameter
                return None
            if sys.getrefcount(parameter) <= _ONLY_HERE and sys.getrefcount(leaf) <= _ONLY_HERE + 1:
                return None  # no recorded op reads it any more
        if leaf is not None and leaf.tensor is not None:
            leaf.tensor = storage_copy(leaf.tensor.detach())
            leaf.geometry = None
            leaf.version = None
            leaf.flags &= ~HELD
        return leaf

    def keep(self, tensor: Tensor) -> None:
        """Keep a tensor's content after all, while it is still there: it becomes a leaf (a boundary)."""
        shell, tensor = tensor, local_of(tensor)
        try:
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):
            return
        value = self.dropped.get(weakref(storage))
        if value is not None and tensor._version > value.seen:
            value = self.overwritten(tensor, value)
        if value is not None:
            del self.dropped[weakref(storage)]
            value.tensor = there = alias(tensor)
            value.geometry = geometry_of(there)
            value.version = there._version
            value.anchor = counter_of(shell) if is_spread(shell.__class__) else id(storage)
            value.op = None
            self.leaves[weakref(storage, self._forget_leaf)] = weakref(value)
            for observer in self.observers:
                observer.kept(tensor, value)


def _sharded_in(arguments: Iterable[Any]) -> Iterator[Gathered]:
    """The sharded parameters that recorded arguments refer to."""
    for a in arguments:
        if a.__class__ is tuple:
            if isinstance(a[0], Gathered):
                yield a[0]
        elif a.__class__ is list:
            yield from _sharded_in(a)
