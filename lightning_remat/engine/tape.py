"""Recording: a dispatch mode that notes which op made which value, and the hooks that hand autograd references.

Also known as an op-level tape or trace with rematerialisation; the closest relatives are dynamic tensor
rematerialisation (Kirisame et al., 2021) and selective activation checkpointing in PyTorch. Unlike the latter it never
runs a region's Python again.

What a step looks like from here: every op below autograd and autocast comes through :meth:`Tape.__torch_dispatch__`.
An op whose action is PASS is only called; its result, if anybody needs it, is a *leaf*, referenced as it is. A recorded
op's result is *dropped*: we keep what is needed to run the op again, and the storage lives only as long as the user or
an op holds it.

Known weaknesses: host time per op (this is Python); writes that neither go through the dispatcher nor bump a version
counter are invisible, except into memory from a factory function, which is why factory results are leaves.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Protocol
from weakref import ref as weakref

import torch
from torch import Tensor
from torch.nn.parameter import Parameter
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_remat.engine.generators import NoGenerator, RecordedState, state_before
from lightning_remat.engine.plain import call_as_plain
from lightning_remat.engine.replay import Clock, restore
from lightning_remat.engine.rules import Rule, rule_for
from lightning_remat.engine.values import (
    PACKED,
    PARAMETER,
    SPLIT,
    STALE,
    Blank,
    Extra,
    Op,
    Ref,
    Value,
    check_saved,
    geometry_of,
    storage_copy,
    view_of,
)
from lightning_remat.errors import MODIFIED

# Actions: what an action table says about an overload.
PASS = 0  # call it; its result is a leaf
RECORD = 1  # call it and drop what it makes
SLOW = 2  # the same, for ops with a generator, hidden writes, ops inside, or a device argument
ASK = 3  # the same, if the policy says so
WATCH = 4  # keep what it makes, but mind what it writes on the side, or the ops inside
WRITE = 5  # changes an argument; the new content is dropped where it can be
WRITE_ASK = 6
WRITE_KEEP = 7
BLANK = 8  # makes uninitialised memory
SPLITS = 9  # makes views with version counters of their own
LAZY = 10  # makes a view with a conjugate or negative bit
HIGHER = 11  # a higher-order op: like PASS, but it is no overload

Ask = Callable[[Rule, Any], bool]
"""(rule, outputs) -> whether to drop them."""


class ActionTable(dict[Any, int]):
    """The action for each overload seen so far, and where the others come from."""

    __slots__ = ("make",)

    def __init__(self, make: Callable[[Rule], int]) -> None:
        super().__init__()
        self.make = make

_PLAIN = frozenset({Tensor, Parameter, torch.nn.Buffer})
_CONSTANTS = frozenset(
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
_STRIDED = torch.strided

_grad_enabled = torch.is_grad_enabled
_detach = torch._C.TensorBase.detach
_set_excluded = torch._C._dispatch_tls_set_dispatch_key_excluded
_ONLY_HERE = 2  # references to a value that only a local variable and getrefcount's argument refer to
_VERSIONED = torch._C.DispatchKey.ADInplaceOrView


class Observer(Protocol):
    """Somebody who looks over the tape's shoulder."""

    def recorded(self, op: Op, args: Any, kwargs: Any, out: Any) -> None:
        """An op's result was dropped. ``args`` is None for a write, whose arguments are no longer what they were."""

    def packed(self, tensor: Tensor, packed: Any) -> None:
        """Autograd saves ``tensor`` and holds ``packed`` for it."""

    def kept(self, tensor: Tensor, value: Value) -> None:
        """A dropped value is kept after all."""


def forgetter(table: dict[Any, Any]) -> Callable[[Any], None]:
    """A weak reference's callback that removes its entry; quiet if that has gone already."""
    pop = table.pop

    def forget(key: Any) -> None:
        pop(key, None)

    return forget


class _Unrecordable(Exception):
    """An argument or output that the tape does not describe (a subclass, a sparse tensor, an unknown object)."""


class Tape(TorchDispatchMode):
    """The recorder of one training step; reused from step to step.

    Attributes:
        actions: what to do with each overload; swapped at the borders of regions.
        decide: the policy's verdict on ops whose action is ASK.
        observers: told of everything that is recorded, saved or kept (a ledger, verification); none in steady state.
    """

    supports_higher_order_operators = True

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock = clock
        self.paused = False
        self.count = 0
        self.recorded = 0
        self.bits = False
        self.actions = ActionTable(lambda rule: PASS)
        self.decide: Ask = lambda rule, outs: True
        # By storage, through a weak reference to its Python object, which lives exactly as long as the storage: an
        # entry goes when its storage does, so an address that is used again can not be mistaken.
        self.dropped: dict[Any, Value] = {}
        self.leaves: dict[Any, Any] = {}  # -> weak reference to the leaf's Value
        self.blanks: dict[Any, Blank] = {}
        # Parameters by id of their storage, which the entry itself keeps alive: cheaper than weak references.
        self.parameters: dict[int, Ref] = {}
        self._forget_dropped = forgetter(self.dropped)
        self._forget_leaf = forgetter(self.leaves)
        self._forget_blank = forgetter(self.blanks)
        self.observers: list[Observer] = []
        self.hooks = torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack)

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled regions stay compiled under this mode."""
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # The default wraps __torch_dispatch__ in a second Python call for every op.
        return False

    def clear(self) -> None:
        """Forget the step: nothing that autograd does not hold stays alive."""
        self.dropped.clear()
        self.leaves.clear()
        self.blanks.clear()
        self.parameters.clear()

    # ------------------------------------------------------------------ dispatch

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one op, and record it if the action table says so."""
        # func._op is what OpOverload.__call__ calls; going there directly saves a Python frame on every op.
        action = self.actions.get(func)
        if action is None:
            action = self._learn(func)
        if action == PASS or self.paused:
            if action == HIGHER:
                return func(*args, **kwargs)
            return func._op(*args, **kwargs) if kwargs else func._op(*args)
        if action == RECORD:
            out = func._op(*args, **kwargs) if kwargs else func._op(*args)
            if _grad_enabled():
                self._record(func, args, kwargs, out, None, None)
            return out
        return self._dispatch_rest(action, func, args, kwargs or {})

    def _dispatch_rest(self, action: int, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if action == HIGHER:
            return func(*args, **kwargs)
        if action == LAZY:
            self.bits = True  # from now on references carry lazy conjugation and negation
            return func(*args, **kwargs)
        if action == SPLITS:
            value = self.dropped.get(weakref(args[0].untyped_storage()))
            if value is not None:
                value.flags |= SPLIT
            return func(*args, **kwargs)
        rule = rule_for(func)
        grad = _grad_enabled()
        if WRITE <= action <= WRITE_KEEP:
            return self._write(action, func, rule, args, kwargs, grad)
        if action == BLANK:
            out = func(*args, **kwargs)
            if grad and out.__class__ is Tensor and out.layout is torch.strided:
                blank = Blank((out.size(), out.stride(), out.dtype, out.device))
                self.blanks[weakref(out.untyped_storage(), self._forget_blank)] = blank
            return out
        keep = not grad or action == WATCH
        rng = None
        if not keep and rule.random:
            try:
                rng = _state(rule, args, kwargs)
            except NoGenerator:
                keep = True
        if rule.hidden:
            self._before_hidden_write(rule, args)
        if rule.inner:
            out, autocast = call_as_plain(func, args, kwargs)
            keep = keep or autocast
        else:
            out = func(*args, **kwargs)
        if rule.transfers and kwargs.get("device") is not None:
            keep = True  # it may cross the bus
        if not keep and (action != ASK or self.decide(rule, out)):
            self._record(func, args, kwargs, out, rng, rule)
        return out

    def _learn(self, func: Any) -> int:
        rule = rule_for(func)
        action = self.actions[func] = self.actions.make(rule)
        return action

    # ------------------------------------------------------------------ recording

    def _record(
        self, func: Any, args: Any, kwargs: Any, out: Any, rng: RecordedState | None, rule: Rule | None
    ) -> None:
        """Note the op and drop what it made. Anything unusual among arguments or outputs: kept, as a leaf."""
        op = Op()
        try:
            needs = op.needs = []
            op.args = self._arguments(args, needs)
            op.extra = Extra(self._keywords(kwargs, needs), rule, rng) if kwargs or rule is not None else None
            if out.__class__ is Tensor:
                # The commonest case, written out: what _make does for each of several outputs.
                if out.layout is not _STRIDED:
                    return
                storage = out.untyped_storage()
                key = weakref(storage, self._forget_dropped)
                dropped = self.dropped
                if key in dropped or key in self.leaves or id(storage) in self.parameters:
                    return
                value = Value()
                value.op = op
                value.tensor = value.version = None
                value.flags = 0
                value.geometry = (out.size(), out.stride(), out.storage_offset(), out.dtype)
                op.outs = ((0, weakref(value)),)
                dropped[key] = value
            elif not self._make_several(op, out):
                return
        except (_Unrecordable, NotImplementedError, RuntimeError):
            return
        op.func = func
        op.index = self.count = self.count + 1
        self.recorded += 1
        if self.observers:
            for observer in self.observers:
                observer.recorded(op, args, kwargs, out)

    def _make(self, op: Op, out: Tensor) -> tuple[Any, Value] | None:
        """The value of one output and its key in ``dropped``; None if it lies in an input's storage."""
        if out.layout is not _STRIDED:
            raise _Unrecordable
        storage = out.untyped_storage()
        key = weakref(storage, self._forget_dropped)
        # Every input is in one of these by now.
        if key in self.dropped or key in self.leaves or id(storage) in self.parameters:
            return None
        value = Value()
        value.op = op
        value.tensor = None
        value.version = None
        value.flags = 0
        value.geometry = (out.size(), out.stride(), out.storage_offset(), out.dtype)
        return key, value

    def _make_several(self, op: Op, outs: Any) -> bool:
        """Drop each of several outputs; False if there is nothing to drop."""
        made: dict[Any, tuple[int, Value]] = {}
        for position, out in enumerate(outs if isinstance(outs, (tuple, list)) else (outs,)):
            if out.__class__ is Tensor:
                entry = self._make(op, out)
                if entry is not None:
                    if entry[0] in made:  # two outputs in one storage: one value could not stand for both
                        raise _Unrecordable
                    made[entry[0]] = (position, entry[1])
            elif isinstance(out, Tensor):
                raise _Unrecordable
        op.outs = tuple([(position, weakref(value)) for position, value in made.values()])
        for key, (_, value) in made.items():
            self.dropped[key] = value
        return bool(made)

    def _arguments(self, args: Any, needs: list[Value]) -> list[Any]:
        """``args`` with tensors replaced by references; the dropped values among them are added to ``needs``."""
        dropped = self.dropped
        out: list[Any] = []
        for a in args:
            kind = a.__class__
            if kind is Tensor:
                storage = a.untyped_storage()
                value = dropped.get(weakref(storage))
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
            elif kind in _CONSTANTS:
                pass
            elif kind is list:
                a = self._arguments(a, needs)
            elif kind is torch.nn.Buffer:
                a = self._leaf_ref(a, a.untyped_storage())
            else:
                raise _Unrecordable
            out.append(a)
        return out

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
        value.flags = PARAMETER
        value.anchor = key
        reference = self.parameters[key] = (value, None)
        return reference

    def _leaf_ref(self, tensor: Tensor, storage: Any) -> Ref:
        """A reference to content that the tape did not compute."""
        parameter = self.parameters.get(id(storage))
        if parameter is not None:
            return (parameter[0], geometry_of(tensor))
        has_history = tensor.requires_grad
        if has_history and tensor._base.__class__ is Parameter:
            parameter = self._parameter_ref(tensor._base, storage)  # type: ignore[arg-type]
            return (parameter[0], geometry_of(tensor))
        found = self.leaves.get(weakref(storage))
        value = found() if found is not None else None
        if value is not None:
            if self.bits:
                return (value, geometry_of(tensor))
            return (value, (tensor.size(), tensor.stride(), tensor.storage_offset(), tensor.dtype))
        if tensor.is_conj() or tensor.is_neg():
            self.bits = True
        value = Value()
        value.op = None
        # What has no history may be held as it is; anything else would pull its graph along.
        value.tensor = _alias(tensor) if has_history else tensor
        value.geometry = None
        value.version = None if tensor.is_inference() else tensor._version
        value.flags = 0
        self.leaves[weakref(storage, self._forget_leaf)] = weakref(value)
        return (value, None)

    # ------------------------------------------------------------------ writes

    def _before_hidden_write(self, rule: Rule, args: Any) -> None:
        # No version counter moves, so nothing becomes stale: backward of a training step does not read them.
        if rule.training is None or args[rule.training]:
            for i in rule.hidden:
                if i < len(args) and isinstance(args[i], Tensor):
                    self._before_write(args[i])

    def _before_write(self, tensor: Tensor) -> Value | None:
        """Make sure that what was recorded still finds the content that is about to be overwritten.

        Returns the value that is about to lose its storage; afterwards the storage holds new content, a leaf until
        somebody says otherwise.
        """
        if tensor.layout is not torch.strided or tensor.__class__ not in _PLAIN:
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
            if sys.getrefcount(parameter) <= _ONLY_HERE and sys.getrefcount(leaf) <= _ONLY_HERE + 1:
                return None  # no recorded op reads it any more
        if leaf is not None and leaf.tensor is not None:
            leaf.tensor = storage_copy(leaf.tensor.detach())
            leaf.geometry = None
            leaf.version = None
            leaf.flags &= ~PARAMETER
        return leaf

    def _write(
        self, action: int, func: Any, rule: Rule, args: Any, kwargs: dict[str, Any], grad: bool
    ) -> Any:
        """An op that changes an argument: a new value of the same storage.

        Where the old content was dropped, or was blank and is filled by this op, the new one is dropped as well.
        Otherwise the new content takes the old one's place as a leaf; what was recorded from the old one gets a copy.
        """
        if rule.moves:
            return self._move(func, args, kwargs)
        targets: list[Tensor] = []
        for w in rule.writes:
            target = kwargs.get(w) if w.__class__ is str else args[w] if w < len(args) else None  # type: ignore[operator]
            targets += [t for t in (target if isinstance(target, (list, tuple)) else (target,)) if isinstance(t, Tensor)]
        op = None
        if grad and action != WRITE_KEEP and rule.kind != "fixed" and rule.writes == (0,) and len(targets) == 1:
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
            _mark_stale([value])
            return func(*args, **kwargs)
        found = self.leaves.get(key)
        leaf: Value | None = found() if found is not None else None
        if leaf is not None and leaf.tensor is target:
            leaf.tensor = _alias(target)  # which keeps its geometry
        if leaf is None or leaf.version is None:
            return func(*args, **kwargs)
        version = target._version
        out = func(*args, **kwargs)
        leaf.version += target._version - version
        return out

    def _prepare_write(
        self, func: Any, rule: Rule, args: Any, kwargs: dict[str, Any], target: Tensor
    ) -> Op | None:
        """The op as it is to be recorded, its references taken while the old content is still current; else None."""
        if target.__class__ is not Tensor or target.layout is not torch.strided:
            return None
        storage = target.untyped_storage()
        key = weakref(storage)
        blank: Any = self.blanks.pop(key, None)
        if blank is None and key not in self.dropped:
            return None
        filled = rule.fills and target.numel() * target.element_size() == storage.nbytes()
        if blank is not None and not filled:
            return None
        op = Op()
        op.needs = []
        try:
            rng = _state(rule, args, kwargs) if rule.random else None
            if filled:
                target_geometry = Blank((target.size(), target.stride(), target.dtype, target.device))
                op.args = [target_geometry, *self._arguments(args[1:], op.needs)]
            else:
                op.args = self._arguments(args, op.needs)
            op.extra = Extra(self._keywords(kwargs, op.needs), rule, rng)
        except (_Unrecordable, NoGenerator, NotImplementedError, RuntimeError):
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

    # ------------------------------------------------------------------ autograd's side

    def pack(self, tensor: Tensor) -> Any:
        """Take a tensor that autograd wants saved; give what it is to hold instead."""
        try:
            key = weakref(tensor.untyped_storage())
        except (NotImplementedError, RuntimeError):
            return (tensor, None)
        value = self.dropped.get(key)
        if value is None:
            packed: Any = (tensor, tensor._version)
        else:
            value.flags |= PACKED
            if self.bits:
                packed = (value, geometry_of(tensor))
            else:
                packed = (value, (tensor.size(), tensor.stride(), tensor.storage_offset(), tensor.dtype))
        if self.observers:
            for observer in self.observers:
                observer.packed(tensor, packed)
        return packed

    def unpack(self, packed: Any) -> Tensor:
        """Give autograd back what it saved, computing it again first if it was dropped.

        Raises:
            RuntimeError: the tensor was changed in place after it was saved; plain PyTorch raises here too.
            ReplayError: see :func:`~lightning_remat.engine.replay.restore`.
        """
        if packed[0].__class__ is Value:
            value: Value
            value, geometry = packed
            if value.tensor is None:
                if value.flags & STALE:
                    raise RuntimeError(MODIFIED)
                paused, self.paused = self.paused, True
                try:
                    restore(value, self.clock)
                finally:
                    self.paused = paused
            else:
                check_saved(value)
            return view_of(value, geometry)
        tensor: Tensor
        tensor, version = packed
        if version is not None and tensor._version != version:
            raise RuntimeError(MODIFIED)
        return tensor

    def keep(self, tensor: Tensor) -> None:
        """Keep a tensor's content after all, while it is still there: it becomes a leaf (a boundary)."""
        try:
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):
            return
        value = self.dropped.pop(weakref(storage), None)
        if value is not None:
            alias = _detach(tensor)
            value.tensor = alias
            value.geometry = geometry_of(alias)
            value.version = alias._version
            value.op = None
            self.leaves[weakref(storage, self._forget_leaf)] = weakref(value)
            for observer in self.observers:
                observer.kept(tensor, value)


def _alias(tensor: Tensor) -> Tensor:
    """The same storage without history, sharing the version counter.

    Inside ``__torch_dispatch__`` the key that makes aliases share it is excluded, and a plain ``detach`` would start a
    counter of its own: a write after the step would go unseen.
    """
    _set_excluded(_VERSIONED, False)
    try:
        return _detach(tensor)
    finally:
        _set_excluded(_VERSIONED, True)


def _state(rule: Rule, args: Any, kwargs: dict[str, Any]) -> RecordedState | None:
    """The generator state before a random op; None for attention without dropout, which draws nothing."""
    if rule.kind != "random" and not (rule.dropout is not None and rule.dropout < len(args) and args[rule.dropout]):
        return None
    return state_before(args, kwargs)


def _mark_stale(values: list[Value]) -> None:
    for value in values:
        if value.flags & PACKED and not value.flags & SPLIT:
            value.flags |= STALE
