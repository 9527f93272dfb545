"""The simulator for plans in which contents leave the device and come back.

What has left is like a dropped value whose op is "fetch it": an op that reads nothing and holds nothing. Where the
rules of :class:`~lightning_remat.planning.simulator.Simulator` speak of dropped values, they hold for it as well; what
comes on top:

- A content leaves when something first holds it: autograd, or an op that can be run again and reads it. It goes into
  the *window*: it stays on the device, first in first out, and is released when younger ones push it out, once its
  transfer is over. In the window it counts once, whether the program holds it or not.
- Asked for while it is in the window, it is what it was. Else it is fetched: new memory, and a wait for the read.
- After each request of backward, the contents that will be asked for next are fetched *ahead*, as long as what is there
  ahead of its time stays below a limit, or nothing is.
- A content that nobody needs any more leaves the window, and the place: at once, or in the course of the step, where
  the tape finds it by its storage, when the window lets go of it, and at the latest when the step is left.
- What is written over a content that is in the window waits for its transfer.
- An op that is recorded runs first, with all the memory that it takes; then what it reads leaves. Only a write has its
  arguments noted before.

Which bytes are where depends on none of the speeds. So the memory of a plan is found first, with a list of the moments
that matter to transfers; then :class:`_Clock` goes over this list, fetches ahead, and counts the waits. Bytes that are
there ahead of their time only add to the level, which is why one pass over the trace is enough.

Known weaknesses: transfers in each direction are one queue of constant speed; the time between two requests of backward
is estimated from the forward ops; a wait is taken to hold up the step, though on an accelerator a part of it may hide.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from lightning_remat.engine.rules import COLLECTIVES
from lightning_remat.planning.simulator import _ABSENT, _GONE, _THERE, Simulation, Simulator
from lightning_remat.planning.trace import FREE, NEED, OTHER, RELEASE, RUN, SAVE, Event, Trace, TraceOp
from lightning_remat.planning.transfer import Transfer

# Moments that matter to transfers.
_LEFT, _RELEASED, _ASKED, _AFTER, _TICK = range(5)

_Mark = tuple[int, int, float, int, int]
"""(kind, value or -1, seconds since the last one, highest level since the last one, event in which that was)."""


class MovingSimulator(Simulator):
    """One run over a trace under a plan in which something moves.

    Args:
        trace: the step.
        drop: for each op, whether its outputs are dropped.
        move: for each op that is not, whether its outputs leave the device.
        transfer: where to.
        pace: of the trace, if it is known; see :func:`paces`.
    """

    def __init__(
        self,
        trace: Trace,
        drop: Sequence[bool],
        move: Sequence[bool],
        transfer: Transfer,
        pace: tuple[list[float], dict[int, float]] | None = None,
    ) -> None:
        super().__init__(trace, drop)
        self.move = move
        self.transfer = transfer
        self.moved = [False] * len(trace.nbytes)  # has left, whatever has become of it since
        self.may = [False] * len(trace.nbytes)  # leaves once something holds it
        self.resident = [False] * len(trace.nbytes)
        self.pinned = set[
            int
        ]()  # asked for while they were in the window, and in the tape's table until the step's end
        self.order: dict[int, int] = {}  # when an op was recorded, or (~v) a content left
        self.sunk = 0  # bytes that were let go of when the last op had run, and were there while it did
        self.sunk_at = -1  # the event that may say how much that op took
        self.window: deque[int] = deque()  # with some that are not resident any more
        self.windowed = 0  # bytes that are
        self.stored = 0  # bytes at the place
        self.left: list[int] = []
        self.asked: list[int] = []
        self.fetched: list[int] = []  # those of them that were not in the window
        self.marks: list[_Mark] = []
        self.passed = 0.0  # seconds since the last mark
        self.run_seconds, self.need_seconds = pace or paces(trace)

    def run(self, timeline: bool = False) -> Simulation:
        """Through all events."""
        levels: list[int] = []
        if timeline:
            for now, (kind, a, b) in enumerate(self.trace.events):
                self.now = now
                self.top = self.live
                self.step(kind, a, b)
                self._mark(_TICK, self.now)
                levels.append(self.live)
        else:
            self.play(self.trace.events)
        self._mark(_TICK, -1)
        clock = _Clock(self)
        clock.run(levels)
        ops, transfer = self.trace.ops, self.transfer
        moved = sum(self.trace.nbytes[v] for v in self.left)
        seconds = sum(ops[o].seconds for o in self.replayed) + clock.waited
        seconds += transfer.cpu_seconds_per_byte * (moved + clock.fetched)
        found = (clock.peak, clock.where, seconds, self.replayed, clock.levels, clock.tops)
        return Simulation(*found, clock.waited, moved, clock.fetched, self.left, self.asked)

    def play(self, events: Sequence[Event]) -> None:
        """Many events, as :meth:`step` does them; what mostly happens is written out here, since it takes most time."""
        state, saved, read, held, slot = self.state, self.saved, self.read, self.held, self.slot
        nbytes, dropped, may, pinned = self.trace.nbytes, self.dropped, self.may, self.pinned
        for now, (kind, a, b) in enumerate(events):
            if kind == SAVE:
                slot[a] = b
                saved[b] += 1
                if may[b]:
                    self.now = now
                    self._leave(b)
            elif kind == NEED:
                value = slot[a]
                self.now = now
                if value >= 0 and state[value] == _ABSENT:
                    self.top = self.live
                    self._restore(value)
                self._mark(_AFTER, -1)
                self.passed += self.need_seconds.get(now, 0.0)
            elif kind == FREE and not dropped[a] and (saved[a] or read[a]):
                held[a] = False
            elif kind == RELEASE:
                value = slot[a]
                if value >= 0:
                    slot[a] = -1
                    saved[value] -= 1
                    if not (saved[value] or read[value]):
                        if state[value] == _THERE and not held[value] and value not in pinned:
                            state[value] = _GONE
                            self.live -= nbytes[value]
                        else:
                            self._settle(value)
            elif kind == OTHER:
                level = self.live + a
                if now == self.sunk_at:
                    level += self.sunk
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
        if kind == NEED:
            super().step(kind, a, b)
            self._mark(_AFTER, -1)
            self.passed += self.need_seconds.get(self.now, 0.0)
        elif kind == OTHER:
            super().step(kind, a + self.sunk if self.now == self.sunk_at else a, b)
        else:
            super().step(kind, a, b)
            if kind == SAVE and self.may[b]:
                self._leave(b)

    def _mark(self, kind: int, value: int) -> None:
        self.marks.append((kind, value, self.passed, self.peak, self.where))
        self.passed = 0.0
        self.peak, self.where = self.live, self.now

    # ------------------------------------------------------------------ out

    def _forward(self, o: int) -> None:
        op = self.trace.ops[o]
        old = op.writes
        if old >= 0:
            self.may[old] = False
            # What was asked for within the step is in the tape's table like any other content that has left.
            pinned = old in self.pinned
            self.dropped[old] = self.dropped[old] or pinned
            if op.droppable and self.drop[o] and self.dropped[old]:
                self._leave_all(op.inputs)
            if self.resident[old]:
                self._mark(_RELEASED, old)
                self._out_of_window(old)
            if pinned:
                self.pinned.discard(old)
                self.live += self.trace.nbytes[old]  # a copy, before it is written over
                self._reach(self.live)
        self.passed += self.run_seconds[o]
        super()._forward(o)
        if self.move[o] and may_move(op) and not (op.droppable and self.drop[o]):
            for v in op.outputs:
                self.may[v] = not self.dropped[v]

    def _note(self, o: int) -> None:
        op = self.trace.ops[o]
        if op.writes < 0:
            self._reach(self.live)
            before = self.live
            self._leave_all(op.inputs)
            self.sunk, self.sunk_at = before - self.live, self.now + 1
        self.order[o] = len(self.order)
        super()._note(o)

    def _leave_all(self, values: Sequence[int]) -> None:
        for v in values:
            if self.may[v]:
                self._leave(v)

    def _leave(self, v: int) -> None:
        self.may[v] = False
        n, transfer = self.trace.nbytes[v], self.transfer
        if not n or n < transfer.min_bytes:
            return
        if transfer.cap_bytes is not None and self.stored + n > transfer.cap_bytes:
            return
        self.stored += n
        self.dropped[v] = self.moved[v] = self.resident[v] = True
        self.state[v] = _ABSENT
        self.left.append(v)
        self.order[~v] = len(self.order)
        self.window.append(v)
        self.windowed += n
        self._mark(_LEFT, v)
        while self.windowed > transfer.window_bytes:
            oldest = self.window.popleft()
            if self.resident[oldest]:
                self._mark(_RELEASED, oldest)
                self._out_of_window(oldest)
                if not self.held[oldest]:
                    self.live -= self.trace.nbytes[oldest]
                    self._settle(oldest)

    def _out_of_window(self, v: int) -> None:
        self.resident[v] = False
        self.windowed -= self.trace.nbytes[v]

    def _exit(self) -> None:
        super()._exit()
        for v in self.left:
            self._settle(v)
        self.pinned.clear()

    def _shown(self, v: int) -> bool:
        return super()._shown(v) or (self.inside and (self.resident[v] or v in self.pinned))

    def _let_go(self, v: int) -> None:
        """The program drops its last reference to a storage."""
        if not self.held[v]:
            return
        self.held[v] = False
        if self.dropped[v] and not self.resident[v]:
            self.live -= self.trace.nbytes[v]
        self._settle(v)

    def _settle(self, v: int) -> None:
        """See whether anybody still needs a value, and let go of it if not."""
        if not self.moved[v] or self.state[v] != _ABSENT:
            super()._settle(v)
        elif not (self.saved[v] or self.read[v] or self._shown(v)):
            self.state[v] = _GONE
            self.stored -= self.trace.nbytes[v]
            if self.resident[v]:
                self._out_of_window(v)
                if not self.held[v]:
                    self.live -= self.trace.nbytes[v]

    def _forget(self, o: int) -> list[int]:
        """A record dies; returns what it read for the last time, contents that have left apart."""
        found = super()._forget(o)
        # The loop that asks knows of values with a record only.
        for u in found:
            if self.moved[u] and self.state[u] == _ABSENT:
                self._settle(u)
        return [u for u in found if self.state[u] != _GONE]

    # ------------------------------------------------------------------ back

    def _restore(self, value: int) -> None:
        ops, makers, state, moved = self.trace.ops, self.trace.makers, self.state, self.moved
        if moved[value]:
            self._fetch(value)
            return
        found = {makers[value]}
        fetched: set[int] = set()
        stack = [makers[value]]
        while stack:
            for u in ops[stack.pop()].inputs:
                if state[u] == _ABSENT:
                    if moved[u]:
                        fetched.add(~u)
                    elif makers[u] not in found:
                        found.add(makers[u])
                        stack.append(makers[u])
        for entry in sorted(found | fetched, key=self.order.__getitem__):
            if entry < 0:
                self._fetch(~entry)
            else:
                self._replay(entry)
                self.passed += ops[entry].seconds
        self.replayed += found
        self.when.update(dict.fromkeys(found, self.now))

    def _fetch(self, v: int) -> None:
        self._mark(_ASKED, v)
        self.asked.append(v)
        self.stored -= self.trace.nbytes[v]
        self.state[v] = _THERE
        if self.resident[v]:
            # As it was: the program's tensor and this one are the same again.
            self._out_of_window(v)
            self.dropped[v] = self.moved[v] = False
            if self.inside:
                self.pinned.add(v)
        else:
            self.fetched.append(v)
            self.live += self.trace.nbytes[v]
            self._reach(self.live)


class _Clock:
    """Goes over the marks of a run: what is fetched ahead, when, and how long the step waits."""

    def __init__(self, run: MovingSimulator) -> None:
        self.marks = run.marks
        self.nbytes = run.trace.nbytes
        self.transfer = run.transfer
        self.peak = self.where = 0
        self.waited = 0.0
        self.levels: list[int] = []
        self.tops: list[int] = []
        self.fetched = 0
        self.now = 0.0
        self.out_free = self.in_free = 0.0  # when the queues are empty
        self.written: dict[int, float] = {}  # when each content is out
        self.back: dict[int, float] = {}  # and back, for those whose read has begun
        self.away = set[int]()  # released, and nobody has asked yet
        self.ahead = 0  # bytes that are there and nobody has asked for yet
        self.order = run.fetched
        self.first = 0  # all before it in this order are back

    def run(self, levels: Sequence[int]) -> None:
        """Through all marks.

        Args:
            levels: bytes after each event; empty: nobody asks for the timeline.
        """
        top = 0
        for kind, value, seconds, peak, where in self.marks:
            self.now += seconds
            level = peak + self.ahead
            top = max(top, level)
            if level > self.peak:
                self.peak, self.where = level, where
            if kind == _LEFT:
                self.out_free = max(self.now, self.out_free) + self.transfer.out_seconds(self.nbytes[value])
                self.written[value] = self.out_free
            elif kind == _RELEASED:
                self._wait(self.written[value])
                self.away.add(value)
            elif kind == _ASKED:
                self._ask(value)
            elif kind == _AFTER:
                self._prefetch()
            elif levels and value >= 0:
                self.levels.append(levels[value] + self.ahead)
                self.tops.append(max(top, self.levels[-1]))
                top = self.levels[-1]

    def _wait(self, until: float) -> None:
        if until > self.now:
            self.waited += until - self.now
            self.now = until

    def _ask(self, value: int) -> None:
        if value not in self.away:
            return  # it is in the window
        if value in self.back:
            self.ahead -= self.nbytes[value]
        else:
            self._begin(value)
        self._wait(self.back[value])
        self.away.discard(value)

    def _begin(self, value: int) -> None:
        n = self.nbytes[value]
        self.in_free = self.back[value] = max(self.now, self.in_free) + self.transfer.in_seconds(n)
        self.fetched += n

    def _prefetch(self) -> None:
        if self.ahead and self.ahead >= self.transfer.ahead_bytes:
            return
        order, back, away = self.order, self.back, self.away
        while self.first < len(order) and order[self.first] in back:
            self.first += 1
        for i in range(self.first, len(order)):
            value = order[i]
            if value in back or value not in away:
                continue
            n = self.nbytes[value]
            if self.ahead and self.ahead + n > self.transfer.ahead_bytes:
                return
            self._begin(value)
            self.ahead += n


def may_move(op: TraceOp) -> bool:
    """Whether the tape lets an op's outputs leave: not what others may still write to without being seen."""
    return op.kind != "factory" and not op.name.startswith(COLLECTIVES)


def paces(trace: Trace) -> tuple[list[float], dict[int, float]]:
    """How much time passes with each op of forward, and after each request of backward (by its event).

    What was measured of the two halves of the step is shared out by the ops' own times; where nothing was, forward
    takes what its ops take, and backward twice that.
    """
    total = sum(op.seconds for op in trace.ops)
    scale = trace.forward_seconds / total if trace.forward_seconds > 0 and total > 0 else 1.0
    forward = [op.seconds * scale for op in trace.ops]
    saver = [-1] * trace.slots
    needs: list[tuple[int, int]] = []
    count = [0] * len(trace.ops)
    last = 0
    for e, (kind, a, _) in enumerate(trace.events):
        if kind == RUN:
            last = a
        elif kind == SAVE:
            saver[a] = trace.saver(a, last)
        elif kind == NEED and 0 <= saver[a] < len(count):
            needs.append((e, saver[a]))
            count[saver[a]] += 1
    share = {e: trace.ops[o].seconds / count[o] for e, o in needs}
    whole = sum(share.values())
    scale = trace.backward_seconds / whole if trace.backward_seconds > 0 and whole > 0 else 2.0
    return forward, {e: seconds * scale for e, seconds in share.items()}


def fetch_order(trace: Trace, drop: Sequence[bool], move: Sequence[bool], transfer: Transfer) -> list[int]:
    """Contents in the order in which they are asked for, by number: 0 is the first that leaves in a step.

    Those that are in the window when they are asked for are among them.
    """
    run = MovingSimulator(trace, drop, move, transfer)
    run.play(trace.events)
    number = {v: i for i, v in enumerate(run.left)}
    return [number[v] for v in run.asked]


def leaving(trace: Trace, move: Sequence[bool], transfer: Transfer, drop: Sequence[bool] | None = None) -> list[int]:
    """Values in the order in which they leave in a step.

    Args:
        trace: the step.
        move: for each op, whether its outputs leave.
        transfer: where to.
        drop: for each op, whether its outputs are dropped, which comes first; None: none is.
    """
    run = MovingSimulator(trace, drop if drop is not None else [False] * len(trace.ops), move, transfer)
    run.play(trace.events)
    return run.left
