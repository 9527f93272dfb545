"""The simulator: what a step would need, in bytes over time and in seconds, under a plan that was never run.

It applies the tape's own rules to a trace: a kept value lives as long as the program, a saved slot or a recorded op
refers to it; a dropped one is computed again when backward first needs it, in the order of recording, each op at most
once, and lives on until nobody that remains refers to it. It is the judge of every candidate plan.

Known weaknesses: what a value that no plan can drop costs is taken over from the traced step, although its life may
depend a little on the plan; the allocator's fragmentation is not modelled.
"""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from lightning_remat.planning.trace import EXIT, FREE, NEED, OTHER, RELEASE, RUN, SAVE, Event, Trace


@dataclass(slots=True)
class Simulation:
    """What a step under a plan comes to.

    Attributes:
        peak: most bytes at once above what was there when the step began.
        peak_event: index of the event in which that is.
        extra_seconds: time of all replayed ops, of waits for transfers, and what transfers take from the step.
        replayed: ops that run again.
        levels: bytes after each event, if they were asked for.
        tops: highest level within each event, if they were asked for.
        waited_seconds: the part of ``extra_seconds`` in which the step stands still for transfers.
        moved_bytes: bytes of all contents that leave.
        fetched_bytes: bytes that come back.
        left: values in the order in which they leave.
        asked: those of them that are asked for, in that order.
    """

    peak: int
    peak_event: int
    extra_seconds: float
    replayed: list[int] = field(default_factory=list)
    levels: list[int] = field(default_factory=list)
    tops: list[int] = field(default_factory=list)
    waited_seconds: float = 0.0
    moved_bytes: int = 0
    fetched_bytes: int = 0
    left: list[int] = field(default_factory=list)
    asked: list[int] = field(default_factory=list)


# States of a value.
_NOT_YET, _THERE, _ABSENT, _GONE = range(4)


class Simulator:
    """One run over a trace under one plan, event by event.

    Args:
        trace: the step.
        drop: for each op, whether its outputs are dropped.
        kept: values that stay all the same: a border keeps one output of an op, and not the others.
    """

    def __init__(self, trace: Trace, drop: Sequence[bool], kept: AbstractSet[int] = frozenset()) -> None:
        self.trace = trace
        self.drop = drop
        self.kept = kept
        values = len(trace.nbytes)
        self.live = 0
        self.peak = 0
        self.where = 0
        self.now = 0
        self.top = 0
        self.state = [_NOT_YET] * values
        # Whether the value was dropped (its content has an op to make it) and whether that op is still recorded.
        self.dropped = [False] * values
        self.held = [False] * values  # by the program: the storage lives on, dropped or not
        self.saved = [0] * values  # slots
        self.read = [0] * values  # recorded ops that live
        self.record = [False] * len(trace.ops)
        self.pending = [0] * len(trace.ops)  # outputs that keep a record alive
        self.slot = [-1] * trace.slots
        self.inside = True  # the step has not been left
        self.replayed: list[int] = []
        self.when: dict[int, int] = {}  # the event in which each of them ran again

    def run(self, timeline: bool = False) -> Simulation:
        """Through all events."""
        levels: list[int] = []
        tops: list[int] = []
        if not timeline and type(self).step is Simulator.step and type(self)._reach is Simulator._reach:
            self.play(self.trace.events)
            events: Sequence[Event] = ()
        else:
            events = self.trace.events
        for now, (kind, a, b) in enumerate(events):
            self.now = now
            self.top = self.live
            self.step(kind, a, b)
            if timeline:
                levels.append(self.live)
                tops.append(max(self.top, self.live))
        ops = self.trace.ops
        seconds = sum(ops[o].seconds for o in self.replayed)
        return Simulation(self.peak, self.where, seconds, self.replayed, levels, tops)

    def play(self, events: Sequence[Event]) -> None:
        """Many events, as :meth:`step` does them; what mostly happens is written out here, since it takes most time."""
        state, saved, read, held, slot = self.state, self.saved, self.read, self.held, self.slot
        nbytes = self.trace.nbytes
        for now, (kind, a, b) in enumerate(events):
            if kind == SAVE:
                slot[a] = b
                saved[b] += 1
            elif kind == NEED:
                value = slot[a]
                if value >= 0 and state[value] == _ABSENT:
                    self.now = now
                    self.top = self.live
                    self._restore(value)
            elif kind == RELEASE:
                value = slot[a]
                if value >= 0:
                    slot[a] = -1
                    saved[value] -= 1
                    if not (saved[value] or read[value]):
                        if state[value] == _THERE and not held[value]:
                            state[value] = _GONE
                            self.live -= nbytes[value]
                        else:
                            self._settle(value)
            elif kind == OTHER:
                level = self.live + a
                if level > self.peak:
                    self.peak = level
                    self.where = now
                self.live += b
            else:
                self.now = now
                self.top = self.live
                self.step(kind, a, b)

    def step(self, kind: int, a: int, b: int) -> None:
        """One event."""
        if kind == RUN:
            self._forward(a)
        elif kind == SAVE:
            self.slot[a] = b
            self.saved[b] += 1
        elif kind == NEED:
            value = self.slot[a]
            if value >= 0 and self.state[value] == _ABSENT:
                self._restore(value)
        elif kind == RELEASE:
            value = self.slot[a]
            if value >= 0:
                self.slot[a] = -1
                self.saved[value] -= 1
                self._settle(value)
        elif kind == FREE:
            self._let_go(a)
        elif kind == EXIT:
            self._exit()
        else:
            self._reach(self.live + a)
            self.live += b

    def _reach(self, level: int) -> None:
        if level > self.top:
            self.top = level
        if level > self.peak:
            self.peak = level
            self.where = self.now

    # ------------------------------------------------------------------ forward

    def _forward(self, o: int) -> None:
        op = self.trace.ops[o]
        nbytes, state, dropped, held = self.trace.nbytes, self.state, self.dropped, self.held
        drop = op.droppable and bool(self.drop[o])
        old = op.writes
        if old >= 0:
            new = op.outputs[0]
            drop = dropped[new] = drop and dropped[old]
            held[new], held[old] = True, False  # the storage changes hands; its bytes are booked already
            if dropped[old]:
                if drop:
                    self._note(o)
                self._settle(old)
            elif self.read[old]:
                self.live += nbytes[old]  # recorded ops read the old content: it gets a copy
            else:
                state[old] = _GONE
            state[new] = _ABSENT if drop else _THERE
            self._reach(self.live)
            return
        for v in op.outputs:
            self.live += nbytes[v]
            held[v] = True
            dropped[v] = drop and v not in self.kept
            state[v] = _ABSENT if dropped[v] else _THERE
        if drop:
            self._note(o)
        self._reach(self.live)

    def _note(self, o: int) -> None:
        """Record an op: it holds what it reads."""
        op = self.trace.ops[o]
        self.record[o] = True
        self.pending[o] = sum(self.dropped[v] for v in op.outputs)
        self.live += op.state
        for u in op.inputs:
            self.read[u] += 1

    def _let_go(self, v: int) -> None:
        """The program drops its last reference to a storage."""
        if not self.held[v]:
            return
        self.held[v] = False
        if self.dropped[v]:
            self.live -= self.trace.nbytes[v]
        self._settle(v)

    def _exit(self) -> None:
        """From now on a dropped value cannot be asked for through the program's tensor any more."""
        self.inside = False
        for v, held in enumerate(self.held):
            if held and self.dropped[v]:
                self._settle(v)

    def _shown(self, v: int) -> bool:
        """Whether the program's tensor keeps a value, or the record that makes it, alive."""
        return self.held[v] and (self.inside or not self.dropped[v])

    # ------------------------------------------------------------------ lives and deaths

    def _settle(self, v: int) -> None:
        """See whether anybody still needs a value, and let go of it if not."""
        stack = [v]
        while stack:
            v = stack.pop()
            state = self.state[v]
            # Within the step a dropped value that the program still shows can be asked for at any time to come.
            if state in (_GONE, _NOT_YET) or self.saved[v] or self.read[v] or self._shown(v):
                continue
            self.state[v] = _GONE
            if state == _THERE:
                self.live -= self.trace.nbytes[v]
            else:
                o = self.trace.makers[v]
                self.pending[o] -= 1
                if not self.pending[o]:
                    stack += self._forget(o)

    def _forget(self, o: int) -> list[int]:
        """A record dies; returns what it read for the last time."""
        if not self.record[o]:
            return []
        self.record[o] = False
        op = self.trace.ops[o]
        self.live -= op.state
        found = []
        for u in op.inputs:
            self.read[u] -= 1
            if not self.read[u]:
                found.append(u)
        return found

    # ------------------------------------------------------------------ replay

    def _restore(self, value: int) -> None:
        ops, makers, state = self.trace.ops, self.trace.makers, self.state
        found = {makers[value]}
        stack = [makers[value]]
        while stack:
            for u in ops[stack.pop()].inputs:
                if state[u] == _ABSENT and makers[u] not in found:
                    found.add(makers[u])
                    stack.append(makers[u])
        for o in sorted(found):
            self._replay(o)
        self.replayed += found
        self.when.update(dict.fromkeys(found, self.now))

    def _replay(self, o: int) -> None:
        op = self.trace.ops[o]
        nbytes, state = self.trace.nbytes, self.state
        old = op.writes
        if old >= 0:
            new = op.outputs[0]
            alone = self.dropped[old] and not self.saved[old] and self.read[old] == 1 and not self._shown(old)
            if alone:
                self._reach(self.live + op.scratch)
                state[old] = _GONE  # its memory is taken over
                self.read[old] -= 1
                inputs = [u for u in op.inputs if u != old]
            else:
                self.live += nbytes[new]
                self._reach(self.live + op.scratch)
                inputs = list(op.inputs)
            self.record[o] = False
            self.live -= op.state
            state[new] = _THERE
            for u in inputs:
                self.read[u] -= 1
                self._settle(u)
            return
        made = sum(nbytes[v] for v in op.outputs)
        self._reach(self.live + made + op.scratch)
        for v in op.outputs:
            if state[v] == _ABSENT:
                state[v] = _THERE
                self.live += nbytes[v]
        for u in self._forget(o):
            self._settle(u)
