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
from lightning_remat.engine.values import least_output
from lightning_remat.planning.fake.kernels import output_bytes, scratch_bytes, sums_gradients
from lightning_remat.planning.fake.known import call_known
from lightning_remat.planning.fake.roofline import seconds_for, speed_of, tensors_of
from lightning_remat.planning.trace import EXIT, FREE, NEED, NEVER, OTHER, RELEASE, RUN, SAVE, Trace, TraceOp

_next_number = torch._C._autograd._get_sequence_nr
_STATE_BYTES = {"cpu": 5056}  # of a recorded generator state; on accelerators it is a seed and an offset
_STATE_BYTES_ELSEWHERE = 16
_SIMPLE = (
    *(int, float, bool, complex, str, type(None)),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Generator),
)


class _Storage:
    """What is known of one storage: its bytes, and the value that it holds, whose the bytes then are; -1: none."""

    __slots__ = ("droppable", "nbytes", "outside", "read", "value")

    def __init__(self, nbytes: int, outside: bool = False) -> None:
        self.nbytes = nbytes
        self.outside = outside  # it was there before the step, or is a stand-in
        self.value = -1
        self.droppable = False  # the tape would have dropped what it holds
        self.read = False  # an op that the tape records has read it


class _Saved:
    """What autograd holds for a saved tensor; its end is the slot's release."""

    __slots__ = ("__weakref__", "geometry", "slot")

    def __init__(self, slot: int, geometry: tuple[Any, ...]) -> None:
        self.slot = slot
        self.geometry = geometry


class Meter(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's __init_subclass__ has no types
    """A dispatch mode that writes a trace; enter it, and its ``hooks``, around forward and backward.

    Args:
        device: type of the device that the step is meant for.
        module: the name of the module that is running.

    Attributes:
        trace: what has been written so far.
        in_backward: what runs from now on is no op of the forward pass.
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
        self._nodes: dict[int, int] = {}  # number of an autograd node -> the op that it belongs to
        self._saved_by: list[int] = []  # for each slot, such a number
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

    def leave_step(self) -> None:
        """The loss is there; backward and the optimizer come next."""
        self.in_backward = True
        self._emit(EXIT, 0)

    def close(self) -> Trace:
        """The step is over. What is still alive (gradients) stays in the trace as never released."""
        self._flush()
        self.trace.savers = [self._nodes.get(number, -1) for number in self._saved_by]
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
        if rule.form == "view":
            return out
        seconds = seconds_for(func, args, kwargs, out, self._speed)
        backward = self.in_backward or torch._C._current_autograd_node() is not None
        if backward:
            self.trace.backward_seconds += seconds
        else:
            self.trace.forward_seconds += seconds
        made = [] if rule.form == "write" else self._made(rule.name, args, out)
        # What a tape that goes by position counts (engine/actions.py, counted), so that plans fit.
        if not backward and torch.is_grad_enabled() and rule.form in ("pure", "write"):
            self._ran(rule, args, kwargs, out, inputs, made, seconds)
        elif rule.form == "write" and not rule.moves:
            self._overwritten(rule, args, kwargs)
        # What is no value's memory by now is nobody's. A sum of two gradients is made in place outside of a mode.
        quiet = backward and sums_gradients(rule.name, args)
        for storage in {id(storage): storage for _, storage in made}.values():
            if storage.value < 0:
                self._other(storage.nbytes, quiet)
        scratch = scratch_bytes(self.trace.device, rule.name, args, out)
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
        """Write down an op, and the values whose bytes are theirs from now on."""
        trace = self.trace
        number = len(trace.ops)
        writes, target = -1, None
        if rule.form == "write":
            target, droppable = self._target(rule, args, kwargs)
            values = [] if target is None else [target]
            writes = -1 if target is None else target.value
        else:
            values = self._droppable(rule, args, kwargs, out, made)
            droppable = bool(values)
            if not droppable:
                values = list(dict.fromkeys(_without_sides(out, made)))
        if droppable and target is not None and _fills(rule, args[0], target):
            inputs = [t for t in inputs if t is not args[0]]
        read = []
        for tensor in inputs:
            entry = self._entry(tensor)
            entry.read = entry.read or droppable
            if entry.value >= 0 and entry.value not in read:
                read.append(entry.value)
        for storage in values:
            if storage is target and storage.value < 0:
                self._other(-storage.nbytes)  # nobody's memory becomes a value's
            storage.value = len(trace.nbytes)
            storage.droppable = droppable
            trace.nbytes.append(storage.nbytes)
            trace.makers.append(number)
        random = rule.kind == "random" or (rule.dropout is not None and _given(args, rule.dropout))
        first = tensors_of(out)[:1]
        # The node of this op, if it has one, took the last number that was given out.
        self._nodes.setdefault(_next_number(), number)
        self._emit(RUN, number)
        trace.ops.append(
            TraceOp(
                name=rule.name,
                module=self.where,
                kind=rule.kind,
                inputs=tuple(read),
                outputs=tuple(storage.value for storage in values),
                writes=writes,
                droppable=droppable,
                seconds=seconds,
                state=self._state_bytes if random and droppable else 0,
                size=first[0].numel() if first else -1,
            )
        )

    def _droppable(
        self, rule: Rule, args: Any, kwargs: dict[str, Any], out: Any, made: list[tuple[int, _Storage]]
    ) -> list[_Storage]:
        """Which of its results the tape can drop: what Tape._record and Tape._make_several decide is decided here."""
        if rule.kind in ("fixed", "factory") or not _describable((args, kwargs)):
            return []
        if rule.transfers and kwargs.get("device") not in (None, args[0].device):
            return []  # it crosses the bus
        if any(o.layout is not torch.strided for o in tensors_of(out)):
            return []
        if len({id(storage) for _, storage in made}) < len(made):
            return []  # one value cannot stand for two outputs
        return _without_sides(out, made)

    def _target(self, rule: Rule, args: Any, kwargs: dict[str, Any]) -> tuple[_Storage | None, bool]:
        """The value's storage that an op writes, and whether the tape can drop its new content; see Writes._write."""
        if rule.moves:
            return None, False
        if rule.in_place and args[0].layout is torch.strided and _describable((args, kwargs)):
            storage = self._entry(args[0])
            fresh = rule.draws and _fills(rule, args[0], storage) and not (storage.outside or storage.read)
            if fresh and not storage.droppable and storage.value >= 0:
                # By now it is taken for the memory of others, as in a traced step.
                self.trace.nbytes[storage.value], storage.value = 0, -1
                self._other(storage.nbytes)
            if storage.droppable or fresh:
                return storage, True
        return self._overwritten(rule, args, kwargs, one_goes_on=True), False

    def _overwritten(self, rule: Rule, args: Any, kwargs: dict[str, Any], one_goes_on: bool = False) -> _Storage | None:
        """Values take on content that no plan can drop: the first may live on as another value, the others end."""
        first = None
        for written in rule.writes:
            found = kwargs.get(written) if isinstance(written, str) else args[written] if written < len(args) else None
            for target in tensors_of(found):
                storage = self._entry(target)
                if storage.value < 0:
                    continue
                if one_goes_on and first is None:
                    first = storage
                else:
                    self._emit(FREE, storage.value)
                    storage.value, storage.droppable = -1, False
                    self._other(storage.nbytes)
        return first

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
        if storage.value >= 0:
            self._emit(FREE, storage.value)
        elif not storage.outside:
            self._other(-storage.nbytes)

    # ------------------------------------------------------------------ autograd's side

    def _pack(self, tensor: Tensor) -> Any:
        storage = self._entry(tensor)
        if self._closed or storage.value < 0:
            return tensor.detach()
        saved = _Saved(self.trace.slots, (tensor.size(), tensor.stride(), tensor.dtype, tensor.device))
        self.trace.slots += 1
        self._slots[weakref(saved, self._released)] = saved.slot
        self._emit(SAVE, saved.slot, storage.value)
        self._saved_by.append(_next_number())
        return saved

    def _unpack(self, saved: Any) -> Tensor:
        if not isinstance(saved, _Saved):
            tensor: Tensor = saved
            return tensor
        if not self._closed:
            self._emit(NEED, saved.slot)
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


def _fills(rule: Rule, target: Tensor, storage: _Storage) -> bool:
    """Whether a write leaves nothing of what the storage held."""
    return rule.fills and target.numel() * target.element_size() == storage.nbytes


def _given(args: Any, position: int) -> bool:
    return position < len(args) and bool(args[position])


def _without_sides(out: Any, made: list[tuple[int, _Storage]]) -> list[_Storage]:
    """Results of an op that a plan decides about; side outputs stay where they are."""
    outs = out if isinstance(out, (tuple, list)) else (out,)
    small = least_output(outs) if made else 0
    return [s for position, s in made if position == 0 or s.nbytes // outs[position].element_size() > small]
