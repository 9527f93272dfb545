"""Ops that change an argument: in-place, out=, and those that update running statistics on the side."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from weakref import ref as weakref

import torch
from torch import Tensor

from lightning_remat.engine.actions import WRITE_ASK, WRITE_KEEP, Ask
from lightning_remat.engine.aliases import VERSIONED, alias
from lightning_remat.engine.generators import NoGenerator, RecordedState, state_before
from lightning_remat.engine.leaving import Leaving, part_from
from lightning_remat.engine.plain import call_as_plain, call_foreign
from lightning_remat.engine.rules import Rule, rule_for
from lightning_remat.engine.sources import is_drawn
from lightning_remat.engine.store import Unrecordable
from lightning_remat.engine.untold import learn, witness
from lightning_remat.engine.values import HELD, PACKED, SPLIT, STALE, Blank, Op, Value, from_storage, geometry_of

_STRIDED = torch.strided
_grad_enabled = torch.is_grad_enabled
_is_excluded = torch._C._dispatch_tls_is_dispatch_key_excluded


def always(rule: Rule, outs: Any) -> bool:
    """Drop what an op has made, whatever it is."""
    return True


class Writes(Leaving):
    """What a write does to the tables.

    Attributes:
        decide: the policy's verdict on ops whose action is ASK.
        recorded: ops recorded in this step.
    """

    def __init__(self) -> None:
        super().__init__()
        self.decide: Ask = always
        self.recorded = 0

    def _before_write(self, tensor: Tensor) -> Value | None:
        if self.eviction is not None and tensor.layout is _STRIDED:
            self._lose_source(weakref(tensor.untyped_storage()))
        return super()._before_write(tensor)

    def _before_hidden_write(self, rule: Rule, args: Any) -> None:
        # No version counter moves, so nothing becomes stale: backward of a training step does not read them.
        if rule.training is None or args[rule.training]:
            for i in rule.hidden:
                if i < len(args) and isinstance(args[i], Tensor):
                    self._before_write(args[i])

    def _write(self, action: int, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """An op that changes an argument: a new value of the same storage.

        Where the old content was dropped, so is the new one, and so are random numbers that fill a storage (a mask).
        Otherwise the new content takes the old one's place as a leaf; what was recorded from the old one gets a copy.
        """
        rule = rule_for(func)
        if rule.in_place and action != WRITE_KEEP and _grad_enabled():
            target = args[0]
            if target.__class__ is Tensor and target.layout is _STRIDED:
                storage = target.untyped_storage()
                key = weakref(storage)
                old = self.dropped.get(key)
                if old is not None and target._version > old.seen:
                    old = self.overwritten(target, old)
                if old is not None and self.tied:
                    old = self.settle(target, old)
                if old is not None or (rule.draws and self._is_unread(key, storage)):
                    op = self._prepare_write(func, rule, args, kwargs, target, storage, old)
                    if op is not None:
                        return self._write_dropped(op, action, args, kwargs, target, key, old)
        if rule.moves:
            return self._move(func, args, kwargs)
        targets: list[Tensor] = []
        for w in rule.writes:
            written = kwargs.get(w) if isinstance(w, str) else args[w] if w < len(args) else None
            targets += _tensors_in(written)
        overwritten = [v for v in map(self._before_write, targets) if v is not None]
        if rule.foreign:
            out = self._held_to_schema(func, rule, args, kwargs)
        else:
            out = call_as_plain(func, args, kwargs)[0] if rule.inner else func(*args, **kwargs)
        for value in overwritten:
            _mark_stale(value)
        return out

    def _foreign(self, func: Any, rule: Rule, args: Any, kwargs: dict[str, Any]) -> Any:
        """An op of another library: kept, and what it writes to is another content."""
        if rule.form == "write":  # which was not known when it was given its action
            return self._write(WRITE_KEEP, func, args, kwargs)
        return self._held_to_schema(func, rule, args, kwargs)

    def _held_to_schema(self, func: Any, rule: Rule, args: Any, kwargs: dict[str, Any]) -> Any:
        """Call an op of another library; the first time, see whether it wrote to more than it tells."""
        seen = None if self.paused else witness(func, args, kwargs)
        if seen is not None:
            for _, tensor, _ in seen.copies:
                part_from(self.dropped.get(weakref(tensor.untyped_storage())), tensor.untyped_storage())
        out = call_foreign(func, args, kwargs, rule.bare)
        if seen is None:
            return out
        written = [found for found in seen.written() if found[0] not in rule.writes]
        if written:
            learn(func, [where for where, _, _ in written])
            for _, tensor, before in written:
                self._was_written(tensor, before)
        return out

    def _was_written(self, tensor: Tensor, before: Tensor) -> None:
        """What :meth:`_before_write` does, after the fact: ``before`` has a copy of the storage as it was."""
        key = weakref(tensor.untyped_storage())
        found = self.leaves.pop(key, None)
        leaf = found() if found is not None else None
        if leaf is not None and leaf.tensor is not None:
            leaf.tensor = from_storage(before.untyped_storage(), geometry_of(leaf.tensor), leaf.tensor.device)
            leaf.geometry = leaf.version = None
            leaf.flags &= ~HELD
        value = self._before_write(tensor)
        if value is not None:
            _mark_stale(value)
        self.leaving.pop(key, None)

    def _is_unread(self, key: Any, storage: Any) -> bool:
        """Whether no recorded op reads what the storage holds now, and it is not a parameter's."""
        return key not in self.leaves and id(storage) not in self.parameters

    def _prepare_write(
        self,
        func: Any,
        rule: Rule,
        args: Any,
        kwargs: dict[str, Any],
        target: Tensor,
        storage: Any,
        old: Value | None,
    ) -> Op | None:
        """The op as it is to be recorded, its references taken while the old content is still current; else None."""
        lazy = target.is_conj() or target.is_neg()  # what is stored is not what the op was given
        fills = rule.fills and not lazy and target.numel() * target.element_size() == storage.nbytes()
        if old is None and not fills:
            return None  # the rest of the storage may have been written by code that we do not see
        op = Op()
        needs: list[Value] = []
        try:
            rng = recorded_state(rule, args, kwargs) if rule.random else None
            if fills:
                if target.is_complex():
                    self.bits = True  # there may be lazy views from before the step
                blank = Blank((target.size(), target.stride(), target.dtype, target.device))
                op.args = [blank, *self._arguments(args[1:], needs)]
            else:
                op.args = self._arguments(args, needs)
            op.extra = (self._keywords(kwargs, needs) if kwargs else kwargs, rule, rng)
            op.needs = needs
            if self.units is not None:
                self.tie(op)
            if self.eviction is not None:
                self._note_write(op, args, kwargs, needs)
        except (Unrecordable, NoGenerator, NotImplementedError, RuntimeError):
            return None
        op.func = func
        return op

    def _write_dropped(
        self, op: Op, action: int, args: Any, kwargs: dict[str, Any], target: Tensor, key: Any, old: Value | None
    ) -> Any:
        """Run a prepared write, and drop the new content."""
        func = op.func
        unit = self.tie(op) if self.units is not None else None
        if self.eviction is not None:
            self._lose_source(key)
        if old is not None and self.mover is not None:
            part_from(old, target.untyped_storage())
        try:
            out = func._op(*args, **kwargs) if kwargs else func._op(*args)
        except BaseException:
            self.dropped.pop(key, None)  # it may have written a part before it raised
            raise
        if old is not None:
            _mark_stale(old)
        # A prepared write has its rule.
        if action == WRITE_ASK and not self.decide(op.extra[1], target):  # type: ignore[index, arg-type]
            self.dropped.pop(key, None)
            return out
        op.index = self.count = self.count + 1
        if unit is not None:
            self.tied[op.index] = unit
        self.recorded += 1
        value = Value()
        value.op = op
        value.tensor = value.version = None
        value.flags = 0 if old is None else old.flags & SPLIT
        value.seen = target._version + 1  # autograd counts it once we have returned
        # Only what fills a storage has no old value.
        value.geometry = geometry_of(target) if op.args[0].__class__ is Blank else old.geometry  # type: ignore[union-attr]
        op.outs = ((0, weakref(value)),)
        if old is None:
            self.dropped[weakref(target.untyped_storage(), self._forget_dropped)] = value
        else:
            self.dropped[key] = value  # the dictionary goes on with the key that it has, callback included
        if self.observers:
            for observer in self.observers:
                observer.recorded(op, None, None, target)
        return out

    def _move(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """An in-place op that writes no byte (``unsqueeze_``): the storage keeps its value.

        Its version counter moves nevertheless, and plain PyTorch refuses in backward what was saved before.
        """
        target: Tensor = args[0]
        key = weakref(target.untyped_storage()) if target.layout is torch.strided else None
        if self.eviction is not None:
            self._lose_source(key)
        value = self.dropped.get(key)
        if value is not None and target._version > value.seen:
            value = self.overwritten(target, value)
        if value is not None:
            value.seen += 1
            part_from(value, target.untyped_storage())  # whose version is about to be another one
            if not value.flags & PACKED:
                return func(*args, **kwargs)
            # What is saved from now on is as good as any: it must not be this value, so that is kept.
            self.keep(target)
        parameter = self.parameters.get(id(target.untyped_storage())) if key is not None else None
        found = self.leaves.get(key)
        leaf: Value | None = parameter[0] if parameter is not None else found() if found is not None else None
        if leaf is not None and leaf.tensor is target:
            leaf.tensor = alias(target)  # which keeps its geometry
        counts = leaf is not None and leaf.version is not None and _counts_with(target, leaf.tensor)
        out = func(*args, **kwargs)
        if counts:
            leaf.version += 1  # type: ignore[union-attr, operator]  # autograd will, after we have returned
        if value is not None:
            _mark_stale(value)
        return out


def recorded_state(rule: Rule, args: Any, kwargs: dict[str, Any]) -> RecordedState | None:
    """The generator state before a random op; None for attention without dropout, which draws nothing."""
    if not is_drawn(rule, args):
        return None
    return state_before(args, kwargs)


def _counts_with(tensor: Tensor, other: Tensor | None) -> bool:
    """Whether autograd will count a change of ``tensor``, and ``other`` shows that count: there is no way to ask."""
    with torch._C._RestorePythonTLSSnapshot():  # type: ignore[attr-defined]  # private to torch
        if _is_excluded(VERSIONED):
            return False
    if other is None or tensor.is_inference():
        return False
    before, version = tensor._version, other._version
    torch.autograd.graph.increment_version(tensor)
    shared = other._version != version
    torch._C._autograd._unsafe_set_version_counter((tensor,), (before,))
    return shared


def _tensors_in(written: Any) -> Iterator[Tensor]:
    """The tensors of an argument: one, a list, or lists of lists, as ``all_gather`` takes them."""
    if isinstance(written, Tensor):
        yield written
    elif isinstance(written, (list, tuple)):
        for some in written:
            yield from _tensors_in(some)


def _mark_stale(value: Value) -> None:
    """Autograd's references to a value that has been overwritten are refused from now on, as in plain PyTorch."""
    if value.flags & PACKED and not value.flags & SPLIT:
        value.flags |= STALE
