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

from functools import partial
from typing import Any
from weakref import ref as weakref

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_remat.engine.actions import (
    ASK,
    HIGHER,
    LAZY,
    PASS,
    RECORD,
    SPLITS,
    WATCH,
    WRITE,
    WRITE_KEEP,
    ActionTable,
)
from lightning_remat.engine.aliases import alias
from lightning_remat.engine.generators import NoGenerator, RecordedState
from lightning_remat.engine.onednn import failed_in_onednn, kernels_made
from lightning_remat.engine.out_of_memory import bytes_asked, is_out_of_memory
from lightning_remat.engine.plain import call_as_plain
from lightning_remat.engine.replay import Clock, restore
from lightning_remat.engine.rules import Rule, rule_for
from lightning_remat.engine.sources import NEVER, Saved, crosses_bus, is_recipe
from lightning_remat.engine.spread import THEIRS, Spread, is_spread, local_of, whose
from lightning_remat.engine.store import Unrecordable
from lightning_remat.engine.untold import replaced
from lightning_remat.engine.values import (
    PACKED,
    SIDE,
    STALE,
    Op,
    Value,
    check_saved,
    geometry_of,
    view_of,
)
from lightning_remat.engine.writes import Writes, recorded_state
from lightning_remat.errors import MODIFIED

_KERNEL = 1 << 62  # in place of bytes that were asked for: it is a kernel that is lacking
_SOME = 1 << 26  # bytes that making one may take
_STRIDED = torch.strided
_registered = torch.library._impls  # one set for as long as the process lives
_grad_enabled = torch.is_grad_enabled


class Tape(Writes, TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's __init_subclass__ has no types
    """The recorder of one training step; reused from step to step.

    Attributes:
        actions: what to do with each overload; swapped at the borders of regions.
        clock: what replay has cost.
        registered: how many kernels had been registered from Python when the step began; with another number, some of
            PyTorch's may have been replaced since.
    """

    supports_higher_order_operators = True

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock = clock
        self.actions = ActionTable(lambda rule: PASS)
        self.registered = len(_registered)

    @property
    def hooks(self) -> torch.autograd.graph.saved_tensors_hooks:
        """What autograd calls when it saves a tensor and wants it back.

        Made anew for whoever asks: a tape that held its own methods would outlive its engine, and with it the file and
        the threads of a place that nobody has closed.
        """
        return torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack)

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled regions stay compiled under this mode."""
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # The default wraps __torch_dispatch__ in a second Python call for every op.
        return False

    # ------------------------------------------------------------------ dispatch

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one op, and record it if the action table says so."""
        if types and (owner := whose(types)):
            return self.step_aside(owner, func, args, kwargs)
        # func._op is what OpOverload.__call__ calls; going there directly saves a Python frame on every op.
        action = self.actions.get(id(func))
        if action is None:
            action = self._learn(func)
        if action == PASS or self.paused:
            if action == HIGHER:
                return func(*args, **(kwargs or {}))
            try:
                out = func._op(*args, **kwargs) if kwargs else func._op(*args)
            except RuntimeError as error:
                asked = self._asked(func, error)
                if asked < 0:
                    raise
            else:
                if self.eviction is not None and not self.paused:
                    self._note_kept(func, args, kwargs, out)
                return out
            return self._kept_again(func, args, kwargs, asked)
        if action == RECORD:
            try:
                out = func._op(*args, **kwargs) if kwargs else func._op(*args)
            except RuntimeError as error:
                asked = self._asked(func, error)
                if asked < 0:
                    raise
            else:
                if _grad_enabled():
                    self._record(func, args, kwargs, out, None, None)
                return out
            return self._recorded_again(func, args, kwargs, asked)
        if WRITE <= action <= WRITE_KEEP:
            return self._write(action, func, args, kwargs or {})
        return self._dispatch_rest(action, func, args, kwargs or {})

    def step_aside(self, owner: int, func: Any, args: Any, kwargs: Any) -> Any:
        """What becomes of an op on DTensors: its local ops come to us one by one."""
        if owner == THEIRS:
            self.shells.see(args, kwargs)
            return NotImplemented
        return func(*args, **(kwargs or {}))

    def act(self, action: int, func: Any, args: Any, kwargs: Any) -> Any:
        """What :meth:`__torch_dispatch__` does for a given action; written out there, since a call costs a frame."""
        if action == PASS:
            try:
                out = func._op(*args, **kwargs) if kwargs else func._op(*args)
            except RuntimeError as error:
                asked = self._asked(func, error)
                if asked < 0:
                    raise
            else:
                if self.eviction is not None:
                    self._note_kept(func, args, kwargs, out)
                return out
            return self._kept_again(func, args, kwargs, asked)
        if action == RECORD:
            try:
                out = func._op(*args, **kwargs) if kwargs else func._op(*args)
            except RuntimeError as error:
                asked = self._asked(func, error)
                if asked < 0:
                    raise
            else:
                if _grad_enabled():
                    self._record(func, args, kwargs, out, None, None)
                return out
            return self._recorded_again(func, args, kwargs, asked)
        if WRITE <= action <= WRITE_KEEP:
            return self._write(action, func, args, kwargs or {})
        return self._dispatch_rest(action, func, args, kwargs or {})

    def _dispatch_rest(self, action: int, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if action == HIGHER:
            return func(*args, **kwargs)
        if action == LAZY:
            self.bits = True  # from now on references carry lazy conjugation and negation
            return func(*args, **kwargs)
        if action == SPLITS:
            self.split_apart(args[0])
            return func(*args, **kwargs)
        rule = rule_for(func)
        if rule.foreign:
            return self._foreign(func, rule, args, kwargs)
        grad = _grad_enabled()
        keep = not grad or action == WATCH
        rng = None
        if not keep and rule.random:
            try:
                rng = recorded_state(rule, args, kwargs)
            except NoGenerator:
                keep = True
        if rule.hidden:
            self._before_hidden_write(rule, args)
        autocast = False
        try:
            if rule.inner:
                out, autocast = call_as_plain(func, args, kwargs)
            else:
                out = func(*args, **kwargs)
        except RuntimeError as error:
            asked = self._asked(func, error, rng)
            if asked < 0:
                raise
        else:
            asked = -1
        if asked >= 0:
            call = partial(call_as_plain if rule.inner else _call_plainly, func, args, kwargs)
            out, autocast = self._again(call, func, args, kwargs, asked, rng)
        crosses = crosses_bus(rule, args, kwargs)
        if not (keep or autocast or crosses) and (action != ASK or self.decide(rule, out)):
            self._record(func, args, kwargs, out, rng, rule)
        elif grad and self.eviction is not None and not (autocast or crosses) and is_recipe(rule, args):
            self._note(func, args, kwargs, out, None, rule)
        return out

    # ------------------------------------------------------------------ out of memory

    def _asked(self, func: Any, error: RuntimeError, rng: RecordedState | None = None) -> int:
        """The bytes that an op asked for in vain (0: not known), if room may be made and the op called again; else -1.

        To be called from the ``except`` block, which has to be left before room is made: the traceback holds tensors.
        """
        if self.paused or not is_out_of_memory(error):
            return -1
        lacks_kernel = failed_in_onednn(error)
        if self.eviction is None and not lacks_kernel:
            return -1
        if self.verdict(func) == NEVER and (rng is None or rule_for(func).form != "pure"):
            return -1
        return _KERNEL if lacks_kernel else bytes_asked(error) or 0

    def _again(self, call: Any, func: Any, args: Any, kwargs: Any, asked: int, rng: RecordedState | None = None) -> Any:
        """Call an op again, with more room, or (``asked`` is ``_KERNEL``) with kernels that another thread has made."""
        if asked != _KERNEL:
            return self.eviction.again(call, asked, rng)
        with torch._C._DisableTorchDispatch():
            if not kernels_made(func, args, kwargs) and self.eviction is not None and self.eviction.make_room(_SOME):
                kernels_made(func, args, kwargs)
        if rng is not None:
            rng[0].set_state(rng[1])
        return call()

    def _kept_again(self, func: Any, args: Any, kwargs: Any, asked: int) -> Any:
        out = self._again(partial(func._op, *args, **(kwargs or {})), func, args, kwargs, asked)
        if self.eviction is not None and not self.paused:
            self._note_kept(func, args, kwargs, out)
        return out

    def _recorded_again(self, func: Any, args: Any, kwargs: Any, asked: int) -> Any:
        out = self._again(partial(func._op, *args, **(kwargs or {})), func, args, kwargs, asked)
        if _grad_enabled():
            self._record(func, args, kwargs, out, None, None)
        return out

    def _learn(self, func: Any) -> int:
        rule = rule_for(func)
        action = self.actions[id(func)] = self.actions.make(rule)
        return action

    # ------------------------------------------------------------------ recording

    def _record(
        self, func: Any, args: Any, kwargs: Any, out: Any, rng: RecordedState | None, rule: Rule | None
    ) -> None:
        """Note the op and drop what it made. Anything unusual among arguments or outputs: kept, as a leaf."""
        if len(_registered) != self.registered and rule_for(func).name in replaced():
            return
        self._drop(func, args, kwargs, out, rng, rule)
        if self.eviction is not None:
            self._note(func, args, kwargs, out, rng, rule)

    def _drop(self, func: Any, args: Any, kwargs: Any, out: Any, rng: RecordedState | None, rule: Rule | None) -> None:
        op = Op()
        try:
            needs = op.needs = []
            op.args = self._arguments(args, needs)
            op.extra = (self._keywords(kwargs, needs), rule, rng) if kwargs or rule is not None else None
            unit = self.tie(op) if self.units is not None else None
            if out.__class__ is Tensor:
                # The commonest case, written out: what _make_several does for each output.
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
                value.seen = 0 if rule is None else out._version
                value.geometry = (out.size(), out.stride(), out.storage_offset(), out.dtype)
                op.outs = ((0, weakref(value)),)
                dropped[key] = value
            elif not self._make_several(op, out):
                return
        except (Unrecordable, NotImplementedError, RuntimeError):
            return
        op.func = func
        op.index = self.count = self.count + 1
        if unit is not None:
            self.tied[op.index] = unit
        self.recorded += 1
        if self.observers:
            for observer in self.observers:
                observer.recorded(op, args, kwargs, out)

    def _make_several(self, op: Op, outs: Any) -> bool:
        """Drop each of several outputs, unless it lies in an input's storage; False if there is nothing to drop.

        A small side output (a norm's mean, attention's log-sum-exp) is kept: dropping it costs more than it saves.
        """
        dropped = self.dropped
        made: list[tuple[int, Value, Any]] = []
        position = -1
        small = 0
        for out in outs if isinstance(outs, (tuple, list)) else (outs,):
            position += 1
            if out.__class__ is Tensor:
                if out.layout is not _STRIDED:
                    raise Unrecordable
                if position == 0:
                    small = out.numel() // SIDE
                elif out.numel() <= small:
                    continue
                storage = out.untyped_storage()
                key = weakref(storage, self._forget_dropped)
                # Every input is in one of these by now.
                if key in dropped or key in self.leaves or id(storage) in self.parameters:
                    continue
                for entry in made:
                    if entry[2] == key:  # two outputs in one storage: one value could not stand for both
                        raise Unrecordable
                value = Value()
                value.op = op
                value.tensor = value.version = None
                value.flags = 0
                value.seen = out._version
                value.geometry = (out.size(), out.stride(), out.storage_offset(), out.dtype)
                made.append((position, value, key))
            elif isinstance(out, Tensor):
                raise Unrecordable
        op.outs = tuple([(position, weakref(value)) for position, value, _ in made])
        for _, value, key in made:
            dropped[key] = value
        return bool(made)

    # ------------------------------------------------------------------ autograd's side

    def pack(self, tensor: Tensor) -> Any:
        """Take a tensor that autograd wants saved; give what it is to hold instead."""
        if tensor.__class__ is not Tensor and is_spread(tensor.__class__):
            local = local_of(tensor)
            if local.__class__ is Tensor:
                return Spread(tensor, self.pack(local))
        try:
            key = weakref(tensor.untyped_storage())
        except (NotImplementedError, RuntimeError):
            return (tensor, None)
        value = self.dropped.get(key)
        if value is not None and tensor._version > value.seen:
            value = self.overwritten(tensor, value)
        if value is not None and self.tied:
            value = self.settle(tensor, value)
        if value is None and key in self.leaving and tensor.__class__ is Tensor:
            value = self.leave(tensor, key)
        if value is None:
            version = tensor._version
            if self.eviction is not None and tensor.__class__ is Tensor and not tensor.is_inference():
                packed: Any = self._save(tensor, key, version)
            else:
                if tensor.grad_fn is not None and tensor.__class__ is Tensor:
                    # An op that saves its own result hands it over as it is: held by its own node, it would never be
                    # freed if backward does not come.
                    with torch._C._DisableTorchDispatch():
                        tensor = alias(tensor)
                packed = (tensor, version)
        else:
            value.flags |= PACKED
            if self.bits:
                packed = (value, geometry_of(tensor))
            else:
                packed = (value, (tensor.size(), tensor.stride(), tensor.storage_offset(), tensor.dtype))
        if self.observers:
            shown = (tensor, packed.version) if packed.__class__ is Saved else packed
            for observer in self.observers:
                observer.packed(tensor, shown)
        return packed

    def unpack(self, packed: Any) -> Tensor:
        """Give autograd back what it saved, computing it again or fetching it first if it is not there.

        Raises:
            RuntimeError: the tensor was changed in place after it was saved; plain PyTorch raises here too.
            ReplayError: see :func:`~lightning_remat.engine.replay.restore`.
            OffloadError: it had left the device and cannot be had back.
        """
        if packed.__class__ is Spread:
            packed.check()
            return packed.around(self.unpack(packed.packed))
        tensor = self._unpacked(packed)
        if self.mover is not None and self.mover.moved:
            paused, self.paused = self.paused, True
            try:
                # Past all modes: one of tracing may be in force, for which new memory is none.
                with torch._C._DisableTorchDispatch():
                    self.mover.pump()
            finally:
                self.paused = paused
        return tensor

    def _unpacked(self, packed: Any) -> Tensor:
        if packed.__class__ is Saved:
            there = packed.there()
            if there is not None:
                return there
            packed = (packed.value, packed.geometry)
        if packed[0].__class__ is Value:
            value: Value
            value, geometry = packed
            if value.tensor is None:
                if value.flags & STALE:
                    raise RuntimeError(MODIFIED)
                paused, self.paused = self.paused, True
                try:
                    restore(value, self.clock, self.eviction)
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


def _call_plainly(func: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, bool]:
    return func(*args, **kwargs), False
