"""Watching a step op by op and writing down its trace: what came into being, when it went, what autograd saved.

The books rest on one rule: the bytes of a value that the tape could drop are the value's own, from the op that makes it
to the moment when its storage goes; everything else that is seen goes to OTHER events. Nothing is counted twice, so the
sum of both is what is alive.

What autograd saves is not held here as long as it could be dropped: the real program's hold on a value then shows by
itself, as the end of its storage. Backward gets a stand-in of the same geometry, which is not counted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import ref as weakref

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_remat.engine.rules import Rule, rule_for
from lightning_remat.planning.kernels import output_bytes, scratch_bytes, sums_gradients
from lightning_remat.planning.known import call_known
from lightning_remat.planning.roofline import seconds_for, speed_of, tensors_of
from lightning_remat.planning.trace import FREE, NEED, NEVER, OTHER, RELEASE, RUN, SAVE, Trace, TraceOp

_SIDE = 32  # as in engine/tape.py: an output with at most this part of the first one's elements is kept
_STATE_BYTES = {"cpu": 5056}  # of a recorded generator state; on accelerators it is a seed and an offset
_STATE_BYTES_ELSEWHERE = 16
_SIMPLE = (
    *(int, float, bool, complex, str, type(None)),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Generator),
)


class _Storage:
    """What is known of one storage: its bytes, the value that it holds (-1: none), and whose the bytes are."""

    __slots__ = ("droppable", "nbytes", "outside", "owned", "read", "value")

    def __init__(self, nbytes: int, outside: bool = False) -> None:
        self.nbytes = nbytes
        self.outside = outside  # it was there before the step, or is a stand-in
        self.value = -1
        self.owned = False  # its bytes are the value's, not in OTHER events
        self.droppable = False  # the tape would have dropped what it holds
        self.read = False  # an op that the tape records has read it


class _Saved:
    """What autograd holds for a saved tensor; its end is the slot's release."""

    __slots__ = ("__weakref__", "geometry", "slot", "tensor")

    def __init__(self, slot: int, geometry: tuple[Any, ...] | None, tensor: Tensor | None) -> None:
        self.slot = slot
        self.geometry = geometry
        self.tensor = tensor


class Meter(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's __init_subclass__ has no types
    """A dispatch mode that writes a trace; enter it, and its ``hooks``, around forward and backward.

    Args:
        device: type of the device that the step is meant for.
        module: the name of the module that is running.

    Attributes:
        trace: what has been written so far.
        in_backward: set it when the loss is there: what runs from then on is no op of the forward pass.
        hooks: for tensors that autograd saves.
        where: name of the module whose op ran last.
    """

    supports_higher_order_operators = True

    def __init__(self, device: str, module: Callable[[], str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's has no types
        self.trace = Trace(device=device, source="fake")
        self.in_backward = False
        self.where = ""
        self.hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)
        self._module = module
        self._speed = speed_of(device)
        self._state_bytes = _STATE_BYTES.get(device, _STATE_BYTES_ELSEWHERE)
        self._storages: dict[Any, _Storage] = {}
        self._slots: dict[Any, int] = {}
        self._top, self._net = NEVER, 0
        self._closed = self._paused = False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # The default wraps __torch_dispatch__ in a second Python call for every op.
        return False

    def outside(self, tensor: Tensor) -> None:
        """A tensor that is there before the step: never counted."""
        self._entry(tensor)

    def close(self) -> Trace:
        """The step is over. What is still alive (gradients) stays in the trace as never released."""
        self._flush()
        self._closed = True
        self._storages.clear()
        self._slots.clear()
        return self.trace

    # ------------------------------------------------------------------ dispatch

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one op, and write down what it did."""
        kwargs = kwargs or {}
        if self._closed or self._paused or func.namespace == "prim":  # asking for a device: no op of the program's
            return func(*args, **kwargs)
        inputs = tensors_of((args, kwargs))
        for tensor in inputs:
            self._entry(tensor)
        rule = rule_for(func)
        self.where = self._module()
        out = call_known(rule, func, args, kwargs, inputs)
        if rule.form == "view" or rule.moves:
            return out
        seconds = seconds_for(func, args, kwargs, out, self._speed)
        backward = self.in_backward or torch._C._current_autograd_node() is not None
        if backward:
            self.trace.backward_seconds += seconds
        else:
            self.trace.forward_seconds += seconds
        made = [] if rule.form == "write" else self._made(rule.name, args, out)
        scratch = scratch_bytes(self.trace.device, rule.name, args, out)
        recording = not backward and torch.is_grad_enabled() and rule.form not in ("blank", "higher")
        if rule.form == "write":
            self._written(rule, args, kwargs, inputs, seconds, recording)
        elif recording and made:
            self._ran(rule, args, kwargs, out, inputs, made, seconds)
        # What is no value's memory by now is nobody's. A sum of two gradients is made in place outside of a mode.
        quiet = backward and sums_gradients(rule.name, args)
        for storage in {id(storage): storage for _, storage in made}.values():
            if not storage.owned:
                self._other(storage.nbytes, quiet)
        if scratch:
            self._other(scratch)
            self._other(-scratch)
        return out

    def _made(self, name: str, args: Any, out: Any) -> list[tuple[int, _Storage]]:
        """The storages that an op has brought into being, by position of the output; twice if two outputs share one."""
        made: list[tuple[int, _Storage]] = []
        new: list[_Storage] = []
        for position, tensor in enumerate(out if isinstance(out, (tuple, list)) else (out,)):
            if isinstance(tensor, Tensor) and tensor.layout is torch.strided:
                storage = tensor.untyped_storage()
                entry = self._storages.get(weakref(storage))
                if entry is None:
                    nbytes = output_bytes(name, args, position)
                    entry = _Storage(storage.nbytes() if nbytes is None else nbytes)
                    self._storages[weakref(storage, self._gone)] = entry
                    new.append(entry)
                elif entry not in new:
                    continue
                made.append((position, entry))
        return made

    def _entry(self, tensor: Tensor) -> _Storage:
        """The books on a tensor's storage; one that nobody has seen was there before the step."""
        if tensor.layout is not torch.strided:
            return _Storage(0, outside=True)
        storage = tensor.untyped_storage()
        found = self._storages.get(weakref(storage))
        if found is None:
            found = self._storages[weakref(storage, self._gone)] = _Storage(0, outside=True)
        return found

    # ------------------------------------------------------------------ ops of the forward pass

    def _ran(
        self,
        rule: Rule,
        args: Any,
        kwargs: dict[str, Any],
        out: Any,
        inputs: list[Tensor],
        made: list[tuple[int, _Storage]],
        seconds: float,
    ) -> None:
        """An op that makes something new; what Tape._record and Tape._make_several decide is decided here."""
        outs = out if isinstance(out, (tuple, list)) else (out,)
        droppable = rule.kind not in ("fixed", "factory") and _describable((args, kwargs))
        droppable = droppable and all(o.layout is torch.strided for o in tensors_of(out))
        droppable = droppable and not (
            rule.transfers and kwargs.get("device") not in (None, args[0].device)
        )  # it crosses the bus
        if len({id(storage) for _, storage in made}) < len(made):
            droppable = False  # one value cannot stand for two outputs
            made = list({id(entry[1]): entry for entry in made}.values())
        first = outs[0].numel() if isinstance(outs[0], Tensor) else 0
        if droppable:
            made = [(p, s) for p, s in made if p == 0 or s.nbytes // outs[p].element_size() > first // _SIDE]
        self._run(rule, args, inputs, made, droppable, seconds, size=first)

    def _written(
        self, rule: Rule, args: Any, kwargs: dict[str, Any], inputs: list[Tensor], seconds: float, recording: bool
    ) -> None:
        """An op that changes arguments; what Writes._write decides is decided here."""
        if recording and rule.in_place and args[0].layout is torch.strided:
            target = args[0]
            storage = self._entry(target)
            fills = rule.fills and target.numel() * target.element_size() == storage.nbytes
            fresh = rule.draws and fills and not (storage.outside or storage.read)
            if (storage.droppable or fresh) and _describable((args, kwargs)):
                if not storage.owned:
                    self._other(-storage.nbytes)  # nobody's memory becomes a value's
                reads = [t for t in inputs if not (fills and t is target)]
                writes = storage.value if storage.owned else -1
                made = [(0, storage)]
                self._run(rule, args, reads, made, True, seconds, size=target.numel(), writes=writes)
                return
        for written in rule.writes:
            value = kwargs.get(written) if isinstance(written, str) else args[written] if written < len(args) else None
            for target in tensors_of(value):
                storage = self._entry(target)
                if storage.owned:
                    # A value that could be dropped takes on content that cannot: the same bytes, a new value.
                    old = storage.value
                    self._run(rule, args, inputs, [(0, storage)], False, seconds, size=target.numel(), writes=old)

    def _run(
        self,
        rule: Rule,
        args: Any,
        inputs: list[Tensor],
        made: list[tuple[int, _Storage]],
        droppable: bool,
        seconds: float,
        size: int,
        writes: int = -1,
    ) -> None:
        trace = self.trace
        read = []
        for tensor in inputs:
            entry = self._entry(tensor)
            entry.read = entry.read or droppable
            if entry.value >= 0 and entry.value not in read:
                read.append(entry.value)
        outputs = []
        for _, storage in made:
            storage.owned = storage.owned or droppable
            storage.droppable = droppable
            storage.value = len(trace.nbytes)
            outputs.append(storage.value)
            trace.nbytes.append(storage.nbytes if storage.owned else 0)
            trace.makers.append(len(trace.ops))
        random = rule.kind == "random" or (rule.dropout is not None and _given(args, rule.dropout))
        op = TraceOp(
            name=rule.name,
            module=self.where,
            kind=rule.kind,
            inputs=tuple(read),
            outputs=tuple(outputs),
            writes=writes,
            droppable=droppable,
            seconds=seconds,
            state=self._state_bytes if random else 0,
            size=size,
        )
        self._emit(RUN, len(trace.ops))
        trace.ops.append(op)

    # ------------------------------------------------------------------ events

    def _emit(self, kind: int, first: int, second: int = 0) -> None:
        self._flush()
        self.trace.events.append((kind, first, second))

    def _flush(self) -> None:
        if self._net or self._top > 0:
            self.trace.events.append((OTHER, self._top, self._net))
        self._top, self._net = NEVER, 0

    def _other(self, nbytes: int, quiet: bool = False) -> None:
        """Memory that is no value's comes (or goes); ``quiet``: whoever comes next sees it, the top does not."""
        self._net += nbytes
        if nbytes > 0 and not quiet:
            self._top = max(self._top, self._net)

    def _gone(self, key: Any) -> None:
        """A storage is no more."""
        storage = self._storages.pop(key, None)
        if storage is None or self._closed:
            return
        if not storage.owned and not storage.outside:
            self._other(-storage.nbytes)
        if storage.value >= 0:
            self._emit(FREE, storage.value)

    # ------------------------------------------------------------------ autograd's side

    def _pack(self, tensor: Tensor) -> Any:
        storage = self._entry(tensor)
        if self._closed or storage.value < 0:
            return tensor.detach()
        slot = self.trace.slots
        self.trace.slots += 1
        if storage.owned:
            saved = _Saved(slot, (tensor.size(), tensor.stride(), tensor.dtype, tensor.device), None)
        else:
            saved = _Saved(slot, None, tensor.detach())
        self._slots[weakref(saved, self._released)] = slot
        self._emit(SAVE, slot, storage.value)
        return saved

    def _unpack(self, saved: Any) -> Tensor:
        if not isinstance(saved, _Saved):
            tensor: Tensor = saved
            return tensor
        if not self._closed:
            self._emit(NEED, saved.slot)
        if saved.geometry is None:
            assert saved.tensor is not None
            return saved.tensor
        size, stride, dtype, device = saved.geometry
        self._paused = True
        try:
            stand_in = torch.empty_strided(size, stride, dtype=dtype, device=device)
        finally:
            self._paused = False
        self.outside(stand_in)
        return stand_in

    def _released(self, key: Any) -> None:
        slot = self._slots.pop(key, None)
        if slot is not None and not self._closed:
            self._emit(RELEASE, slot)


def _describable(value: Any) -> bool:
    """Whether the tape could note these arguments; see Store._arguments."""
    if isinstance(value, Tensor):
        return value.layout is torch.strided
    if isinstance(value, (tuple, list)):
        return all(_describable(entry) for entry in value)
    if isinstance(value, dict):
        return all(_describable(entry) for entry in value.values())
    return isinstance(value, _SIMPLE)


def _given(args: Any, position: int) -> bool:
    return position < len(args) and bool(args[position])
