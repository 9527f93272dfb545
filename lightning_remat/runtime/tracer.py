"""From a watched step and its allocations to a trace.

The tape knows which values live when; the allocator knows how much memory there is. The difference is memory that is
nobody's value: gradients, workspaces, what the user holds. It is the same whatever the plan, so it is taken from the
traced step: the simulator runs along under the plan that the step had, and what it lacks is written between its events.
A simulation of that plan therefore agrees with the measured step at every event.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from weakref import ref as weakref

import torch
from torch import Tensor

from lightning_remat.engine.ledger import Ledger
from lightning_remat.engine.replay import Clock
from lightning_remat.planning.simulator import Simulator
from lightning_remat.planning.trace import FREE, NEED, NEVER, OTHER, RUN, Event, Trace
from lightning_remat.runtime.measuring import StepWatch
from lightning_remat.runtime.memory import PeakResult, Recorder
from lightning_remat.runtime.tracing import PROGRAM, TracingTape


class Tracer(StepWatch):
    """One traced step, from the moment before it begins to the end of its backward.

    Args:
        clock: the tape's.
        ledger: the books of the step.
        device: where memory is counted.
        keeps: see :class:`~lightning_remat.runtime.tracing.TracingTape`.
        never: names of ops whose results are always kept.
        gradients: what is there when the step begins.

    Attributes:
        renewed: when backward had run, none of those gradients was there any more: they were set to None between
            forward and backward, as Lightning does.
    """

    def __init__(
        self,
        clock: Clock,
        ledger: Ledger,
        device: torch.device,
        keeps: frozenset[str] = frozenset(),
        never: Set[str] = frozenset(),
        gradients: Iterable[Tensor] = (),
    ) -> None:
        super().__init__(device)
        self.renewed = False
        self._gradients = [weakref(gradient) for gradient in gradients]
        self.tape = TracingTape(clock, ledger, self.recorder.mark, keeps, never)
        self.tape.trace.device = device.type

    def stop(self) -> None:
        """End the count; safe to repeat."""
        super().stop()
        self.tape.close()

    def _backward_ended(self, whole: bool) -> None:
        super()._backward_ended(whole)
        if self.passes == 1 and self._gradients:
            self.renewed = all(gradient() is None for gradient in self._gradients)
            self._gradients = []

    def _is_over(self) -> bool:
        return not self.tape.open_slots

    def measured(self) -> PeakResult:
        """What was allocated in the step."""
        return self.recorder.result()

    def trace(self) -> Trace:
        """The trace, once the count has ended."""
        tape = self.tape
        tape.finish()
        trace = tape.trace
        raw = tape.raw[: self.recorder.marks]
        levels, tops, seconds = _between_marks(self.recorder, len(raw))
        _fill_in(trace, raw, levels, tops, tape)
        tape.burden()
        turn = next((i for i, event in enumerate(raw) if event[0] == NEED), len(raw))
        trace.forward_seconds = seconds[turn] - seconds[0]
        trace.backward_seconds = seconds[-1] - seconds[turn] - _replays(raw, seconds)
        return trace


def _replays(raw: Sequence[Event], seconds: Sequence[float]) -> float:
    """How long replays took: from the NEED that set one off to the OTHER that stands for its end."""
    total = begin = 0.0
    for i, (kind, _, _) in enumerate(raw):
        if kind == NEED:
            begin = seconds[i]
        elif kind == OTHER:
            total += seconds[i] - begin
    return total


def _between_marks(recorder: Recorder, count: int) -> tuple[list[int], list[int], list[float]]:
    """Live bytes at each mark and at the end; the most right after an allocation until the next mark; times."""
    levels = [0] * (count + 1)
    tops = [NEVER] * count
    seconds = [0.0] * (count + 1)
    current = -1
    live = 0
    for at, live, change, mark in recorder.stream():
        if mark >= 0:
            current = mark
            if current < count:
                levels[current] = live
                seconds[current] = at
        elif change > 0 and 0 <= current < count:
            tops[current] = max(tops[current], live)
        seconds[count] = at
    levels[count] = live
    return levels, tops, seconds


def _fill_in(trace: Trace, raw: Sequence[Event], levels: Sequence[int], tops: Sequence[int], tape: TracingTape) -> None:
    """Write the trace's events: the raw ones, with the memory of others in between."""
    simulator = Simulator(trace, tape.drop(), tape.kept_values)
    events: list[Event] = []
    simulator.live = levels[0] if levels else 0
    if simulator.live:
        events.append((OTHER, simulator.live, simulator.live))
    replaying = False
    for i, (kind, a, b) in enumerate(raw):
        replayed = len(simulator.replayed)
        if kind == RUN and a in tape.fills:
            # From here on the memory is a value's, and no longer that of whoever allocated it.
            taken = sum(trace.nbytes[v] for v in trace.ops[a].outputs)
            _append_other(events, NEVER, -taken)
            simulator.live -= taken
        if kind == FREE:
            if b == PROGRAM or a not in tape.watched:
                simulator.step(FREE, a, 0)
                events.append((FREE, a, 0))
        elif kind != OTHER:
            simulator.step(kind, a, b)
            events.append((kind, a, b))
        # What a replay allocates is not others', up to its end, which is a raw OTHER.
        replaying = len(simulator.replayed) != replayed or (replaying and kind == FREE)
        if replaying:
            continue
        top = tops[i] - simulator.live if tops[i] > simulator.live else NEVER
        if kind == RUN:
            # A random op that runs again puts the generator's present state aside.
            trace.ops[a].scratch = max(top, 0) + trace.ops[a].state
        net = levels[i + 1] - simulator.live
        if top != NEVER or net:
            _append_other(events, top, net)
            simulator.live += net
    trace.events = events


def _append_other(events: list[Event], top: int, net: int) -> None:
    if events and events[-1][0] == OTHER:
        _, before, moved = events.pop()
        top, net = max(before, top + moved if top != NEVER else NEVER), moved + net
    events.append((OTHER, top, net))
