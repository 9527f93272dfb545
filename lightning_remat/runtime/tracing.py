"""Watching one real step closely: a tape that drops all it can between borders, and writes down all that happens.

The step is a step like any other: its results are exact, and it needs little memory, since all that is kept are block
borders. Dropping everything is also what makes it tell most: a dropped value's storage dies when the *program* lets go
of it, and every op that is replayed is timed a second time, warm.

What is not dropped (block borders, results of factory functions) is held by recorded ops and by autograd, so that its
storage lives on; there the end of the program's own tensor tells, for which the tape holds aliases of it instead.

Known weaknesses: results of ops without gradient mode are no values (``nobodys.py``), so other plans are taken to hold
what this one's records held; a program that holds nothing but a detached alias of a border seems to have
let go of it, or to hold it longer; what ``create_graph=True`` saves inside the step is taken over as it was.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Set
from statistics import median
from threading import get_ident
from time import perf_counter
from typing import Any
from weakref import ref as weakref

import torch
from torch import Tensor
from torch._C._autograd import _profiler_enabled
from torch.nn.parameter import Parameter

from lightning_remat.engine.actions import COUNT, ActionTable, counted
from lightning_remat.engine.aliases import alias
from lightning_remat.engine.ledger import Ledger, LedgerTape
from lightning_remat.engine.planned import action_for, first_tensor
from lightning_remat.engine.replay import Clock
from lightning_remat.engine.rules import Rule, rule_for
from lightning_remat.engine.spread import local_of, whose
from lightning_remat.engine.values import Blank, Gathered, Op, Value, least_output
from lightning_remat.planning.trace import EXIT, FREE, NEED, OTHER, RELEASE, RUN, SAVE, Event, Trace, TraceOp
from lightning_remat.runtime.nobodys import Nobodys

PROGRAM = 1
"""In a raw FREE event of a value that was kept: the program let go of it. 0: its storage is gone."""

ARRIVAL = "_c10d_functional.wait_tensor.default"
"""Where the result of a functional collective, as those of tensor parallel, comes into the step."""

_grad_enabled = torch.is_grad_enabled
_next_number = torch._C._autograd._get_sequence_nr


class Slot:
    """What autograd holds in place of a saved tensor during a traced step: an object of its own, to see it die."""

    __slots__ = ("__weakref__", "number", "packed")

    def __init__(self, number: int, packed: Any) -> None:
        self.number = number
        self.packed = packed


class _Shown(weakref[Tensor]):
    """A tensor of the program's, whose end is the program's letting go of a value."""

    __slots__ = ("at", "value")

    at: int
    value: int


class _Listener:
    """Passes on what the tape tells; an attribute of the tape has the name of one of these methods already."""

    def __init__(self, tape: TracingTape) -> None:
        self.tape = tape

    def recorded(self, op: Op, args: Any, kwargs: Any, out: Any) -> None:
        """An op was recorded."""
        self.tape._last = op

    def packed(self, tensor: Tensor, packed: Any) -> None:
        """Autograd has saved a tensor; see :meth:`TracingTape.pack`."""

    def left(self, tensor: Tensor, value: Value) -> None:
        """Nothing leaves a traced step."""

    def kept(self, tensor: Tensor, value: Value) -> None:
        """A value is kept after all."""
        self.tape.kept_after_all(tensor)


class TracingTape(LedgerTape):  # type: ignore[no-untyped-call]  # torch's __init_subclass__ has no types
    """A tape that drops whatever it can and notes every event.

    Args:
        clock: what replay has cost.
        ledger: see :class:`~lightning_remat.engine.ledger.LedgerTape`.
        mark: called once for every entry of ``raw``, to find its place among allocations.
        keeps: kinds of op whose results are kept, for a model in which no borders are known.
        never: names of ops whose results are always kept; may grow.

    Attributes:
        trace: ops and values; its events come later, when allocations are known.
        raw: events so far. OTHER stands for the end of a replay here.
        functions: the overload of each op of the trace.
        kept_values: values that were kept after all.
        watched: values whose storage we hold, so that its end does not say when the program lets go.
        fills: ops whose output lies in memory that was allocated before.
        open_slots: saved tensors that autograd still holds.
        nobodys: memory that no value stands for.
    """

    def __init__(
        self,
        clock: Clock,
        ledger: Ledger,
        mark: Callable[[], None],
        keeps: frozenset[str] = frozenset(),
        never: Set[str] = frozenset(),
    ) -> None:
        super().__init__(clock, ledger)
        self.trace = Trace(source="step")
        self.raw: list[Event] = []
        self.functions: list[Any] = []
        self.kept_values: set[int] = set()
        self.watched: set[int] = set()
        self.fills: set[int] = set()
        self.open_slots: dict[Any, int] = {}
        self.nobodys = Nobodys()
        self._mark = mark
        self._thread = get_ident()
        self._elsewhere: deque[Event] = deque()
        self._keeps = keeps
        self._never = never
        self._table = ActionTable(counted)
        self._values: dict[Any, int] = {}  # storage -> value
        self._shown: dict[int, _Shown] = {}  # by the tensor's identity: comparing tensors would be an op
        self._last: Op | None = None
        self._moving = False
        self._of_op: dict[int, int] = {}  # the tape's op -> ours
        self._samples: dict[Any, tuple[list[float], list[float]]] = defaultdict(lambda: ([], []))
        self._signatures: list[Any] = []
        self._nodes: dict[int, int] = {}  # number of an autograd node -> the op that it belongs to
        self._saved_by: list[int] = []  # for each slot, such a number
        self._ties: dict[int, Any] = {}  # value -> the sharded unit whose parameters it is made from
        self._readers: dict[int, tuple[int, int]] = {}  # parameter -> the last op that reads it, its bytes
        self.observers.append(_Listener(self))
        self._wait: Callable[[], None] = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None

    def _event(self, kind: int, a: int = 0, b: int = 0) -> None:
        if get_ident() != self._thread and not _profiler_enabled():
            # A thread of gloo's was the last to hold a buffer. The profiler, which follows the step, would miss the
            # mark, and with it the whole trace.
            self._elsewhere.append((kind, a, b))
            return
        while self._elsewhere:
            self._mark()
            self.raw.append(self._elsewhere.popleft())
        self._mark()
        self.raw.append((kind, a, b))

    # ------------------------------------------------------------------ forward

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one op, drop its result if that can be done, and write it down."""
        if types and (owner := whose(types)):
            return self.step_aside(owner, func, args, kwargs)
        if self.paused:
            return super().__torch_dispatch__(func, types, args, kwargs)
        kwargs = kwargs or {}
        action = self._table.get(id(func))
        if action is None:
            action = self._table[id(func)] = counted(rule_for(func))
        if action != COUNT:
            out = self.act(action, func, args, kwargs)
        elif _grad_enabled():
            out = self._count(func, rule_for(func), args, kwargs)
        else:
            rule = rule_for(func)
            out = self.act(action_for(rule, False), func, args, kwargs)
            self._overwritten(rule, args, kwargs, out)
            self.nobodys.made(_tensors([*args, *kwargs.values()]), _tensors([out]), self._values)
        self.ledger.made(func, out)
        return out

    def _count(self, func: Any, rule: Rule, args: Any, kwargs: dict[str, Any]) -> Any:
        o = len(self.functions)
        self.functions.append(func)
        flat = list(_tensors([*args, *kwargs.values()]))
        inputs = [v for t in flat if (v := self._value_of(t)) is not None]
        entry = TraceOp(rule.name, self.ledger.modules.current, rule.kind, tuple(dict.fromkeys(inputs)), ())
        self.trace.ops.append(entry)
        for t in flat:
            parameter = self._parameter(t)
            if parameter is not None and parameter.requires_grad and parameter.layout is torch.strided:
                there = local_of(parameter)
                self._readers[id(parameter)] = o, there.numel() * there.element_size()
        self.nobodys.read(o, flat)
        unit = self._cross(flat) if self.units is not None else None
        signature = (func, tuple([(tuple(t.shape), t.dtype) for t in flat]))
        self._signatures.append(signature)
        self._event(RUN, o)
        # The node of this op, if it has one, took the last number that was given out.
        self._nodes.setdefault(_next_number(), o)
        self._last = None
        self._moving = rule.moves
        self._wait()
        start = perf_counter()
        out = self.act(action_for(rule, rule.name not in self._never), func, args, kwargs)
        self._wait()
        self._samples[signature][0].append(perf_counter() - start)
        self._moving = False
        first = first_tensor(out)
        entry.size = -1 if first is None else first.numel()
        op = self._take_last()
        entry.droppable = op is not None
        if op is not None:
            self._dropped(o, op, entry, out, args)
            if unit is not None:
                self._ties.update(dict.fromkeys(entry.outputs, unit))
            if rule.kind in self._keeps:
                for t in out if isinstance(out, (tuple, list)) else (out,):
                    if isinstance(t, Tensor):
                        self.keep(t)
        elif rule.form == "write":
            entry.outputs, entry.writes = self._overwritten(rule, args, kwargs, out, o)
        elif rule.name == ARRIVAL:
            entry.outputs = self._arrives(o, flat[0])
        else:
            entry.outputs = self._stays(o, flat, out)
        return out

    def _parameter(self, tensor: Tensor) -> Tensor | None:
        """The parameter that a tensor is, or is a view or the local part of."""
        owner = tensor if isinstance(tensor, Parameter) else tensor._base
        if not isinstance(owner, Parameter) and self.shells.any and tensor.layout is torch.strided:
            owner = self.shells.of(tensor.untyped_storage())
        return owner if isinstance(owner, Parameter) else None

    def _stays(self, o: int, inputs: list[Tensor], out: Any) -> tuple[int, ...]:
        """The outputs of an op that no plan drops: recorded ops that read them hold them longer than others do."""
        found = []
        try:
            known = {weakref(t.untyped_storage()) for t in inputs}
            small = least_output(out) if isinstance(out, (tuple, list)) else 0
            for position, t in enumerate(_tensors([out])):
                if position and t.numel() <= small:
                    continue  # a side output, as of ops that can be dropped: nothing is decided about it
                key = weakref(t.untyped_storage())
                if key not in known and key not in self._values:
                    found.append(self._new(t, o))
                    self._watch(t, found[-1])
        except (NotImplementedError, RuntimeError):
            pass  # a sparse tensor, or one without memory: its bytes remain those of others
        return tuple(found)

    def _arrives(self, o: int, tensor: Tensor) -> tuple[int, ...]:
        """A collective, which ran without gradient mode, is waited for: its result is a value from here on.

        So recorded ops that read it are known to hold it.
        """
        if self._value_of(tensor) is not None:
            return ()
        self.fills.add(o)  # its memory is there already
        self.nobodys.adopt(o, tensor)
        value = self._new(tensor, o)
        self._watch(tensor, value)
        return (value,)

    def _take_last(self) -> Op | None:
        last, self._last = self._last, None
        return last

    def _dropped(self, o: int, op: Op, entry: TraceOp, out: Any, args: Any) -> None:
        """The tape has recorded the op; its outputs are values that a plan decides about."""
        self._of_op[op.index] = o
        if op.extra is not None and op.extra[2] is not None:
            entry.state = op.extra[2][1].nbytes
        if op.args and op.args[0].__class__ is Blank:
            self.fills.add(o)
            before = self._value_of(args[0])
            if before is not None:
                self.trace.nbytes[before] = 0  # by now they are taken for the memory of others
            entry.outputs = (self._new(args[0], o),)
        elif op.extra is not None and op.extra[1] is not None and op.extra[1].form == "write":
            key = weakref(args[0].untyped_storage())
            entry.writes = self._values.get(key, -1)
            entry.outputs = (self._rename(key, args[0], o) if entry.writes >= 0 else self._new(args[0], o),)
        else:
            outs = out if isinstance(out, (tuple, list)) else (out,)
            entry.outputs = tuple([self._new(outs[position], o) for position, _ in op.outs])

    def _new(self, tensor: Tensor, o: int) -> int:
        storage = tensor.untyped_storage()
        self._values[weakref(storage, self._gone)] = number = self._number(storage.nbytes(), o)
        return number

    def _rename(self, key: Any, tensor: Tensor, o: int) -> int:
        """The storage holds another value from now on; the table goes on with the key that it has."""
        self._values[key] = number = self._number(tensor.untyped_storage().nbytes(), o)
        return number

    def _number(self, nbytes: int, o: int) -> int:
        self.trace.nbytes.append(nbytes)
        self.trace.makers.append(o)
        return len(self.trace.nbytes) - 1

    def _overwritten(
        self, rule: Rule, args: Any, kwargs: dict[str, Any], out: Any, o: int = -1
    ) -> tuple[tuple[int, ...], int]:
        """Values whose storage an op wrote that was not recorded: their new content stays."""
        if rule.form != "write" or rule.moves:
            return (), -1
        outputs: tuple[int, ...] = ()
        writes = -1
        for w in rule.writes:
            written = kwargs.get(w) if isinstance(w, str) else args[w] if w < len(args) else None
            for t in _tensors([written]):
                key = weakref(t.untyped_storage()) if t.layout is torch.strided else None
                value = self._values.get(key)
                if value is None:
                    continue
                if o >= 0 and writes < 0:
                    writes = value
                    outputs = (self._rename(key, t, o),)
                    if value in self.watched:
                        self._watch(t, outputs[0])
                else:
                    del self._values[key]
                    self._event(FREE, value)
        return outputs, writes

    def _value_of(self, tensor: Tensor) -> int | None:
        try:
            return self._values.get(weakref(tensor.untyped_storage()))
        except (NotImplementedError, RuntimeError):
            return None

    def _gone(self, key: Any) -> None:
        value = self._values.pop(key, None)
        if value is not None:
            self._event(FREE, value)

    def _cross(self, tensors: Iterable[Tensor]) -> Any:
        """Mind sharded units: what crosses from one into another can be dropped by no plan; the unit read here, if any.

        As if everything else were dropped, so that no plan keeps more for this reason than what is found here.
        """
        here = self.units.here
        reads = None
        for t in tensors:
            value = self._value_of(t)
            tie = self._ties.get(value) if value is not None else None
            if tie is not None and tie is not here:
                self.trace.ops[self.trace.makers[value]].droppable = False  # type: ignore[index]  # it has a number
                self.keep(t)
            elif tie is not None or (value is None and self._reads_parameters(t)):
                reads = here
        return reads

    def _reads_parameters(self, tensor: Tensor) -> bool:
        """Whether a tensor shows a sharded parameter of the unit that is running."""
        try:
            found = self.parameters.get(id(tensor.untyped_storage()))
        except (NotImplementedError, RuntimeError):
            return False
        return found is not None and isinstance(found[0], Gathered) and found[0].unit is self.units.here

    def kept_after_all(self, tensor: Tensor) -> None:
        """A dropped value is kept: at a border, or since it cannot be dropped."""
        number = self._value_of(tensor)
        if number is not None:
            self.kept_values.add(number)
            self._watch(tensor, number)
            if self._moving:
                self.trace.ops[self.trace.makers[number]].droppable = False

    def _watch(self, tensor: Tensor, value: int) -> None:
        """Look out for the end of a tensor, or of its base, which every view of it holds on to."""
        self.watched.add(value)
        base = tensor if tensor._base is None else tensor._base
        found = self._shown.get(id(base))
        if found is None:
            found = self._shown[id(base)] = _Shown(base, self._let_go)
            found.at = id(base)
        found.value = value

    def _let_go(self, shown: Any) -> None:
        if self._shown.pop(shown.at, None) is not None:
            self._event(FREE, shown.value, PROGRAM)

    def _leaf_ref(self, tensor: Tensor, storage: Any) -> Any:
        # What has no history is held as it is otherwise, and would not show when the program lets go of it.
        if not tensor.requires_grad and weakref(storage) in self._values:
            tensor = alias(tensor)
        return super()._leaf_ref(tensor, storage)

    # ------------------------------------------------------------------ autograd's side

    def pack(self, tensor: Tensor) -> Any:
        """Autograd saves a tensor."""
        if self.units is not None:
            self._cross([tensor])
        packed = super().pack(tensor)
        value = self._value_of(tensor)
        if value is None:
            self.nobodys.saved(tensor)
        if value is None or packed.__class__ is not tuple:
            return packed
        if packed[0] is tensor and tensor.__class__ is Tensor:  # a subclass has more than its memory
            with torch._C._DisableTorchDispatch():
                packed = (alias(tensor), packed[1])  # the tensor is to die when the program lets go of it
        slot = Slot(self.trace.slots, packed)
        self.trace.slots += 1
        self._event(SAVE, slot.number, value)
        self._saved_by.append(_next_number())
        self.open_slots[weakref(slot, self._released)] = slot.number
        return slot

    def unpack(self, packed: Any) -> Tensor:
        """Autograd asks for one."""
        if packed.__class__ is not Slot:
            return super().unpack(packed)
        self._event(NEED, packed.number)
        before = self.clock.replayed_ops
        out = super().unpack(packed.packed)
        if self.clock.replayed_ops != before:
            self._event(OTHER)
        return out

    def _released(self, key: Any) -> None:
        slot = self.open_slots.pop(key, None)
        if slot is not None:
            self._event(RELEASE, slot)

    def replayed(self, op: Op, seconds: float) -> None:
        """An op was run again."""
        self.ledger.replayed(op, seconds)
        o = self._of_op.get(op.index)
        if o is not None:
            self._samples[self._signatures[o]][1].append(seconds)

    # ------------------------------------------------------------------ the end

    def clear(self) -> None:
        """The step was left."""
        super().clear()
        self._event(EXIT)

    def close(self) -> None:
        """Hold on to nothing of the step any more."""
        self.observers.clear()
        self._shown.clear()
        self._values.clear()
        self.nobodys.close()
        self._ties.clear()
        self.open_slots.clear()
        self._last = None
        self._mark = lambda: None

    def discard(self) -> None:
        """The step is over for good. The hooks hold the tape, which would live on until the garbage collector comes."""
        self.close()
        self.__dict__.pop("hooks", None)

    def finish(self) -> None:
        """Say whose node saved what, and what every op costs.

        That is the median over all ops of its kind and shapes: of their replays, or else of their first runs.
        """
        self.trace.savers = [self._nodes.get(number, -1) for number in self._saved_by]
        self.trace.weights = [0] * len(self.trace.ops)
        for o, nbytes in self._readers.values():
            self.trace.weights[o] += nbytes
        for entry, signature in zip(self.trace.ops, self._signatures, strict=True):
            first, again = self._samples[signature]
            entry.seconds = median(again or first)

    def burden(self) -> None:
        """Add to ops that this step did not record what their records would hold that is nobody's value."""
        for o, (op, dropped) in enumerate(zip(self.trace.ops, self.drop(), strict=True)):
            if op.droppable and not dropped:
                op.state += self.nobodys.held_by(o)

    def drop(self) -> list[bool]:
        """The plan that this step ran under, but for ``kept_values``."""
        kept = self.kept_values
        return [op.droppable and not all(v in kept for v in op.outputs) for op in self.trace.ops]


def _tensors(items: Any) -> Iterator[Tensor]:
    for item in items:
        if isinstance(item, Tensor):
            yield item
        elif isinstance(item, (list, tuple)):
            yield from _tensors(item)
