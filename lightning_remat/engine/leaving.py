"""What of a step may leave the device, and the moment in which it does: when something first holds it.

That is autograd, a recorded op that reads it, or the border of a block. Before that moment a content may still be
written to, also by code that the dispatcher does not show (into memory from a factory function).
"""

from __future__ import annotations

from typing import Any
from weakref import ref as weakref

import torch
from torch import Tensor

from lightning_remat.engine.aliases import alias
from lightning_remat.engine.offload.moved import fetch_op, moved_of
from lightning_remat.engine.offload.mover import Mover
from lightning_remat.engine.rules import COLLECTIVES, rule_for
from lightning_remat.engine.sources import Sources
from lightning_remat.engine.spread import local_of
from lightning_remat.engine.store import forgetter
from lightning_remat.engine.values import SPLIT, Value, least_output, storage_copy

_STRIDED = torch.strided
_NoModes = torch._C._DisableTorchDispatch
# Not what is uninitialised or made from nothing: autograd may save it before an op fills it (the noise of rrelu), or
# code that nobody sees does.
_ORDINARY = frozenset({"pure", "write"})


class Leaving(Sources):
    """The table of storages whose content may leave.

    Attributes:
        mover: moves them; None: nothing leaves.
        borders: what crosses the border of a block leaves.
        split: storages that were split into views which count their versions apart.
    """

    def __init__(self) -> None:
        super().__init__()
        self.mover: Mover | None = None
        self.borders = False
        self._may: dict[int, bool] = {}  # by an overload's id, which lives as long as the process
        self._forget_leaving = forgetter(self.leaving)
        self.split: dict[Any, None] = {}
        self._forget_split = forgetter(self.split)

    def clear(self) -> None:
        """Forget the step: nothing that autograd does not hold stays alive."""
        super().clear()
        self.leaving.clear()
        self.split.clear()

    def may_leave(self, func: Any, out: Any, sides: bool = True) -> None:
        """What an op has made may leave, unless it is a view.

        Args:
            func: the op.
            out: what it has made.
            sides: side outputs as well; traces know nothing of them, and so plans do not.
        """
        may = self._may.get(id(func))
        if may is None:
            rule = rule_for(func)
            foreign = rule.kind == "factory" or rule.name.startswith(COLLECTIVES)
            may = self._may[id(func)] = rule.form in _ORDINARY and not foreign
        if not may:
            return
        leaving = self.leaving
        outs = out if isinstance(out, (tuple, list)) else (out,)
        small = 0 if sides else least_output(outs)
        for position, o in enumerate(outs):
            if o.__class__ is Tensor and o.layout is _STRIDED and (not position or o.numel() > small):
                leaving[weakref(o.untyped_storage(), self._forget_leaving)] = None

    def split_apart(self, tensor: Tensor) -> None:
        """A storage is being split into views that count their versions apart."""
        key = weakref(tensor.untyped_storage(), self._forget_split)
        self.split[key] = None
        value = self.dropped.get(key)
        if value is not None:
            value.flags |= SPLIT

    def must_stay(self, out: Any) -> None:
        """What an op has written is another content than the one that might leave."""
        for o in out if isinstance(out, (tuple, list)) else (out,):
            if o.__class__ is Tensor and o.layout is _STRIDED:
                self.leaving.pop(weakref(o.untyped_storage()), None)

    def leave(self, tensor: Tensor, key: Any) -> Value | None:
        """Something is about to hold a content that is in the table: have it leave; None if it stays."""
        mover = self.mover
        storage = tensor.untyped_storage()
        if mover is None or key in self.leaves or id(storage) in self.parameters or not _is_plain(tensor):
            return None
        with _NoModes():
            moved = mover.leave(alias(tensor))
        if moved is None:
            self.leaving.pop(key, None)
            return None
        if tensor.is_complex() or tensor.is_neg():
            self.bits = True  # what was changed in place may have lazy views from before the step
        value = Value()
        value.flags = SPLIT if key in self.split else 0
        value.tensor = value.version = None
        value.seen = tensor._version
        value.geometry = moved.geometry
        self.count += 1  # a place of its own in the order: so that what memory replays take can be foreseen
        value.op = fetch_op(moved, value, self.count)
        self.dropped[weakref(storage, self._forget_dropped)] = value
        if self.eviction is not None:
            source = self.sources.get(key)
            if source is not None:
                value.source = source
                source.value = weakref(value)
        self._left(tensor, value)
        return value

    def keep_border(self, tensor: Tensor) -> None:
        """Keep what crosses a border, on the device or elsewhere."""
        if not self.borders or self.mover is None:
            self.keep(tensor)
            return
        whole, tensor = tensor, local_of(tensor)
        try:
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):
            return
        value = self.dropped.get(weakref(storage))
        if value is not None and tensor._version > value.seen:
            value = self.overwritten(tensor, value)
        if moved_of(value) is not None:
            return  # the border of the block before
        if value is None or value.op is None or not _is_plain(tensor):
            self.keep(whole)
            return
        with _NoModes():
            moved = self.mover.leave(alias(tensor))
        if moved is None:
            self.keep(whole)
            return
        value.tensor = value.version = None
        value.geometry = moved.geometry
        # The place in the order of its op: some that read it may have been recorded already.
        value.op = fetch_op(moved, value, value.op.index)
        self._left(tensor, value)

    def _left(self, tensor: Tensor, value: Value) -> None:
        for observer in self.observers:
            observer.left(tensor, value)

    def _before_write(self, tensor: Tensor) -> Value | None:
        value = super()._before_write(tensor)
        if value is not None and self.mover is not None:
            part_from(value, tensor.untyped_storage())
        return value


def _is_plain(tensor: Tensor) -> bool:
    """Whether bytes and geometry are all that there is to it."""
    return not (tensor.is_inference() or tensor.is_quantized or tensor.is_nested)


def part_from(value: Value | None, storage: Any) -> None:
    """See to it that a value's content does not lie in a storage that is about to be written to."""
    if value is None:
        return
    moved = moved_of(value)
    if moved is not None:
        moved.seal()
    elif value.tensor is not None and id(value.tensor.untyped_storage()) == id(storage):
        with _NoModes():
            value.tensor = storage_copy(value.tensor)
        value.version = None
