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
from lightning_remat.engine.values import Blank, Op, Ref, Value, check_saved, geometry_of, storage_copy, view_of
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
_COMPLEX = frozenset({torch.complex32, torch.complex64, torch.complex128})

_grad_enabled = torch.is_grad_enabled
_detach = torch._C.TensorBase.detach


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

    # ------------------------------------------------------------------ dispatch

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one op, and record it if the action table says so."""
        action = PASS if self.paused else self.actions.get(func)
        if action is None:
            action = self._learn(func)
        if action == PASS:
            return func(*args, **kwargs) if kwargs else func(*args)
        if action == RECORD:
            out = func(*args, **kwargs) if kwargs else func(*args)
            if _grad_enabled():
                self._record(func, args, kwargs, out, None, None)
            return out
        return self._dispatch_rest(action, func, args, kwargs or {})

    def _dispatch_rest(self, action: int, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        rule = rule_for(func)
        grad = _grad_enabled()
        if action >= WRITE and action != BLANK:
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
        # A copy to another device crosses the bus: kept.
        if not keep and kwargs.get("device") is None and (action != ASK or self.decide(rule, out)):
            self._record(func, args, kwargs, out, rng, rule)
        return out

    def _learn(self, func: Any) -> int:
        rule = rule_for(func)
        if rule.name.startswith("aten._neg_view"):
            self.bits = True  # from now on references carry lazy negation
        action = self.actions[func] = self.actions.make(rule)
        return action

    # ------------------------------------------------------------------ recording

    def _record(
        self, func: Any, args: Any, kwargs: Any, out: Any, rng: RecordedState | None, rule: Rule | None
    ) -> None:
        """Note the op and drop what it made. Anything unusual among arguments or outputs: kept, as a leaf."""
        storages: list[Any] = []
        try:
            op = Op()
            op.func = func
            op.args = self._arguments(args, storages)
            op.kwargs = self._keywords(kwargs, storages) if kwargs else None
            op.rng = rng
            op.rule = rule
            made = []
            position = 0
            for o in out if type(out) is tuple or type(out) is list else (out,):
                if o is not None and o.__class__ is Tensor:
                    storage = o.untyped_storage()
                    for s in storages:
                        if s is storage:
                            break
                    else:
                        if o.layout is not torch.strided:
                            raise _Unrecordable
                        value = Value()
                        value.op = op
                        value.tensor = None
                        value.version = None
                        value.packed = value.stale = value.owned = False
                        value.geometry = (o.size(), o.stride(), o.storage_offset(), o.dtype)
                        value.nbytes = storage.nbytes()
                        made.append((position, value, storage))
                elif isinstance(o, Tensor):
                    raise _Unrecordable
                position += 1
        except (_Unrecordable, NotImplementedError, RuntimeError):
            return
        if not made:
            return
        op.index = self.count = self.count + 1
        self.recorded += 1
        dropped = self.dropped
        pop = self._forget_dropped
        if len(made) == 1:
            position, value, storage = made[0]
            op.outs = ((position, weakref(value)),)
            dropped[weakref(storage, pop)] = value
        else:
            op.outs = tuple((position, weakref(value)) for position, value, _ in made)
            seen = set()
            for _, value, storage in made:
                if id(storage) in seen:  # several outputs in one storage: one value cannot stand for all
                    for _, v, s in made:
                        dropped.pop(weakref(s), None)
                        v.op = None
                    return
                seen.add(id(storage))
                dropped[weakref(storage, pop)] = value
        for observer in self.observers:
            observer.recorded(op, args, kwargs, out)

    def _arguments(self, args: Any, storages: list[Any]) -> list[Any]:
        """``args`` with tensors replaced by references; their storages are added to ``storages``."""
        dropped = self.dropped
        out: list[Any] = []
        add = out.append
        for a in args:
            kind = a.__class__
            if kind is Tensor or kind is Parameter:
                storage = a.untyped_storage()
                storages.append(storage)
                key = weakref(storage)
                value = dropped.get(key)
                if value is None:
                    add(self._leaf_ref(a, key))
                else:
                    dtype = a.dtype
                    if self.bits or dtype in _COMPLEX:
                        add(Ref((value, geometry_of(a))))
                    else:
                        add(Ref((value, (a.size(), a.stride(), a.storage_offset(), dtype))))
            elif kind in _CONSTANTS:
                add(a)
            elif kind is list or kind is tuple:
                add(self._arguments(a, storages))
            elif kind is torch.nn.Buffer:
                add(self._leaf_ref(a, weakref(a.untyped_storage())))
            else:
                raise _Unrecordable
        return out

    def _keywords(self, kwargs: dict[str, Any], storages: list[Any]) -> dict[str, Any]:
        return dict(zip(kwargs, self._arguments(kwargs.values(), storages), strict=True))

    def _leaf_ref(self, tensor: Tensor, key: Any) -> Ref:
        """A reference to content that the tape did not compute."""
        found = self.leaves.get(key)
        value = found() if found is not None else None
        if value is None:
            alias = _detach(tensor)
            value = Value()
            value.op = None
            value.tensor = alias
            value.geometry = geometry = geometry_of(alias)
            value.version = None if alias.is_inference() else alias._version
            value.packed = value.stale = value.owned = False
            value.nbytes = 0
            self.leaves[weakref(tensor.untyped_storage(), self._forget_leaf)] = weakref(value)
            return Ref((value, geometry))
        return Ref((value, geometry_of(tensor)))

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
        found = self.leaves.pop(key, None)
        leaf: Value | None = found() if found is not None else None
        if leaf is not None and leaf.tensor is not None:
            leaf.tensor = storage_copy(leaf.tensor)
            leaf.version = None
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
        version = None if target.is_inference() else target._version
        out = func(*args, **kwargs)
        value = self.dropped.get(key)
        if value is not None:
            _mark_stale([value])
        elif version is not None and (found := self.leaves.get(key)) is not None:
            leaf: Value | None = found()
            if leaf is not None and leaf.version is not None:
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
        try:
            op.rng = _state(rule, args, kwargs) if rule.random else None
            if filled:
                target_geometry = Blank((target.size(), target.stride(), target.dtype, target.device))
                op.args = [target_geometry, *self._arguments(args[1:], [])]
            else:
                op.args = self._arguments(args, [])
            op.kwargs = self._keywords(kwargs, []) if kwargs else None
        except (_Unrecordable, NoGenerator, NotImplementedError, RuntimeError):
            return None
        op.func = func
        op.rule = rule
        return op

    def _drop_written(self, op: Op, target: Tensor, overwritten: list[Value]) -> None:
        op.index = self.count = self.count + 1
        self.recorded += 1
        storage = target.untyped_storage()
        value = Value()
        value.op = op
        value.tensor = None
        value.version = None
        value.packed = value.stale = value.owned = False
        filled = op.args[0].__class__ is Blank
        value.geometry = geometry_of(target) if filled else overwritten[0].geometry
        value.nbytes = storage.nbytes()
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
            packed: Any = (tensor, None if tensor.is_inference() else tensor._version)
        else:
            value.packed = True
            if self.bits or tensor.dtype in _COMPLEX:
                packed = Ref((value, geometry_of(tensor)))
            else:
                packed = Ref((value, (tensor.size(), tensor.stride(), tensor.storage_offset(), tensor.dtype)))
        for observer in self.observers:
            observer.packed(tensor, packed)
        return packed

    def unpack(self, packed: Any) -> Tensor:
        """Give autograd back what it saved, computing it again first if it was dropped.

        Raises:
            RuntimeError: the tensor was changed in place after it was saved; plain PyTorch raises here too.
            ReplayError: see :func:`~lightning_remat.engine.replay.restore`.
        """
        if packed.__class__ is Ref:
            value: Value = packed[0]
            check_saved(value)
            if value.tensor is None:
                paused, self.paused = self.paused, True
                try:
                    restore(value, self.clock)
                finally:
                    self.paused = paused
            return view_of(value, packed[1])
        tensor: Tensor = packed[0]
        if packed[1] is not None and tensor._version != packed[1]:
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


def _state(rule: Rule, args: Any, kwargs: dict[str, Any]) -> RecordedState | None:
    """The generator state before a random op; None for attention without dropout, which draws nothing."""
    if rule.kind != "random" and not (rule.dropout is not None and rule.dropout < len(args) and args[rule.dropout]):
        return None
    return state_before(args, kwargs)


def _mark_stale(values: list[Value]) -> None:
    for value in values:
        value.stale = value.stale or value.packed
