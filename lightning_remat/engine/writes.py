"""Ops that change an argument: in-place, out=, and those that update running statistics on the side."""

from __future__ import annotations

from typing import Any
from weakref import ref as weakref

import torch
from torch import Tensor

from lightning_remat.engine.actions import WRITE_ASK, WRITE_KEEP, Ask
from lightning_remat.engine.generators import NoGenerator, RecordedState, state_before
from lightning_remat.engine.plain import call_as_plain
from lightning_remat.engine.rules import Rule
from lightning_remat.engine.store import VERSIONED, Store, Unrecordable, alias
from lightning_remat.engine.values import PACKED, SPLIT, STALE, Blank, Extra, Op, Value, geometry_of

_excluded = torch._C._dispatch_tls_is_dispatch_key_excluded


class Writes(Store):
    """What a write does to the tables.

    Attributes:
        decide: the policy's verdict on ops whose action is ASK.
        count: ops recorded so far, over all steps; gives ops their order.
        recorded: ops recorded in this step.
    """

    def __init__(self) -> None:
        super().__init__()
        self.decide: Ask = lambda rule, outs: True
        self.count = 0
        self.recorded = 0

    def _before_hidden_write(self, rule: Rule, args: Any) -> None:
        # No version counter moves, so nothing becomes stale: backward of a training step does not read them.
        if rule.training is None or args[rule.training]:
            for i in rule.hidden:
                if i < len(args) and isinstance(args[i], Tensor):
                    self._before_write(args[i])

    def _write(self, action: int, func: Any, rule: Rule, args: Any, kwargs: dict[str, Any], grad: bool) -> Any:
        """An op that changes an argument: a new value of the same storage.

        Where the old content was dropped, or was blank and is filled by this op, the new one is dropped as well.
        Otherwise the new content takes the old one's place as a leaf; what was recorded from the old one gets a copy.
        """
        if rule.moves:
            return self._move(func, args, kwargs)
        targets: list[Tensor] = []
        for w in rule.writes:
            target = kwargs.get(w) if w.__class__ is str else args[w] if w < len(args) else None  # type: ignore[operator]
            targets += [
                t for t in (target if isinstance(target, (list, tuple)) else (target,)) if isinstance(t, Tensor)
            ]
        op = None
        alone = rule.writes == (0,) and args[0].__class__ is Tensor  # not a list, as _foreach_mul_ takes one
        if grad and alone and action != WRITE_KEEP and rule.kind != "fixed":
            op = self._prepare_write(func, rule, args, kwargs, targets[0])
        overwritten = [v for v in map(self._before_write, targets) if v is not None]
        out = call_as_plain(func, args, kwargs)[0] if rule.inner else func(*args, **kwargs)
        _mark_stale(overwritten)
        if op is not None and (action != WRITE_ASK or self.decide(rule, targets[0])):
            self._drop_written(op, targets[0], overwritten)
        return out

    def _move(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """An in-place op that writes no byte (``unsqueeze_``): the storage keeps its value.

        Its version counter moves nevertheless, and plain PyTorch refuses in backward what was saved before.
        """
        target: Tensor = args[0]
        key = weakref(target.untyped_storage()) if target.layout is torch.strided else None
        value = self.dropped.get(key)
        if value is not None:
            if not value.flags & PACKED:
                return func(*args, **kwargs)
            # What is saved from now on is as good as any: it must not be this value, so that is kept.
            _mark_stale([value])
            self.keep(target)
        parameter = self.parameters.get(id(target.untyped_storage())) if key is not None else None
        found = self.leaves.get(key)
        leaf: Value | None = parameter[0] if parameter is not None else found() if found is not None else None
        if leaf is not None and leaf.tensor is target:
            leaf.tensor = alias(target)  # which keeps its geometry
        if leaf is not None and leaf.version is not None and _counts_with(target, leaf.tensor):
            leaf.version += 1  # which autograd does to the tensor after we have returned
        return func(*args, **kwargs)

    def _prepare_write(self, func: Any, rule: Rule, args: Any, kwargs: dict[str, Any], target: Tensor) -> Op | None:
        """The op as it is to be recorded, its references taken while the old content is still current; else None."""
        if target.layout is not torch.strided:
            return None
        storage = target.untyped_storage()
        key = weakref(storage)
        blank: Any = self.blanks.pop(key, None)
        if blank is None and key not in self.dropped:
            return None
        lazy = target.is_conj() or target.is_neg()  # what is written is not what the op was given
        filled = rule.fills and not lazy and target.numel() * target.element_size() == storage.nbytes()
        if blank is not None and not filled:
            return None
        op = Op()
        op.needs = []
        try:
            rng = recorded_state(rule, args, kwargs) if rule.random else None
            if filled:
                target_geometry = Blank((target.size(), target.stride(), target.dtype, target.device))
                op.args = [target_geometry, *self._arguments(args[1:], op.needs)]
            else:
                op.args = self._arguments(args, op.needs)
            op.extra = Extra(self._keywords(kwargs, op.needs), rule, rng)
        except (Unrecordable, NoGenerator, NotImplementedError, RuntimeError):
            return None
        op.func = func
        return op

    def _drop_written(self, op: Op, target: Tensor, overwritten: list[Value]) -> None:
        op.index = self.count = self.count + 1
        self.recorded += 1
        storage = target.untyped_storage()
        value = Value()
        value.op = op
        value.tensor = None
        value.version = None
        value.flags = overwritten[0].flags & SPLIT if overwritten else 0
        filled = op.args[0].__class__ is Blank
        value.geometry = geometry_of(target) if filled else overwritten[0].geometry
        op.outs = ((0, weakref(value)),)
        self.dropped[weakref(storage, self._forget_dropped)] = value
        for observer in self.observers:
            observer.recorded(op, None, None, target)


def recorded_state(rule: Rule, args: Any, kwargs: dict[str, Any]) -> RecordedState | None:
    """The generator state before a random op; None for attention without dropout, which draws nothing."""
    if rule.kind != "random" and not (rule.dropout is not None and rule.dropout < len(args) and args[rule.dropout]):
        return None
    return state_before(args, kwargs)


def _counts_with(tensor: Tensor, other: Tensor | None) -> bool:
    """Whether autograd will count a change of ``tensor``, and ``other`` shows that count: there is no way to ask."""
    with torch._C._RestorePythonTLSSnapshot():  # type: ignore[attr-defined]
        if _excluded(VERSIONED):
            return False
    if other is None or tensor.is_inference():
        return False
    before, version = tensor._version, other._version
    torch.autograd.graph.increment_version(tensor)
    shared = other._version != version
    torch._C._autograd._unsafe_set_version_counter((tensor,), (before,))
    return shared


def _mark_stale(values: list[Value]) -> None:
    for value in values:
        if value.flags & PACKED and not value.flags & SPLIT:
            value.flags |= STALE
