"""Memory over a step as points to draw: the simulator's levels, on an axis of estimated time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_remat.planning.moving import MovingSimulator
from lightning_remat.planning.simulator import Simulator
from lightning_remat.planning.trace import NEED, RUN, Trace
from lightning_remat.planning.transfer import Transfer
from lightning_remat.reporting.places import savers


@dataclass(frozen=True)
class Curve:
    """Memory over a step.

    Attributes:
        x: seconds since the step began, or the number of an event where durations are not known.
        y: bytes above what was there when the step began.
        peak: position of the highest point.
        turn: where backward asks for the first value; None if it does not.
        in_seconds: what ``x`` is.
    """

    x: list[float]
    y: list[int]
    peak: int
    turn: float | None
    in_seconds: bool


class _Watched(Simulator):
    """Notes how long the ops take that run again, event by event."""

    extra: list[float]

    def step(self, kind: int, a: int, b: int) -> None:
        before = len(self.replayed)
        super().step(kind, a, b)
        self.extra.append(sum(self.trace.ops[o].seconds for o in self.replayed[before:]))


class _WatchedMoving(_Watched, MovingSimulator):
    """The same, where something moves."""


def simulated_curve(
    trace: Trace, drop: Sequence[bool], move: Sequence[bool] = (), transfer: Transfer | None = None
) -> Curve:
    """A step under a plan, as the simulator sees it.

    Time is estimated: an op takes its share of the traced forward pass, and its node the same share of the traced
    backward pass; what is computed again comes on top, where it is needed. Waits for transfers are left out. Each event
    has two points, its highest level and the one that it leaves behind.
    """
    simulator = _Watched(trace, drop)
    if any(move) and transfer is not None:
        simulator = _WatchedMoving(trace, drop, move, transfer)
    simulator.extra = []
    found = simulator.run(timeline=True)
    durations = _durations(trace)
    in_seconds = sum(durations) > 0
    x: list[float] = [0.0]
    y = [0]
    now = 0.0
    turn = None
    for i, (top, level) in enumerate(zip(found.tops, found.levels, strict=True)):
        if turn is None and trace.events[i][0] == NEED:
            turn = now
        now = now + durations[i] + simulator.extra[i] if in_seconds else float(i + 1)
        x += [now, now]
        y += [top, level]
    return Curve(x, y, max(range(len(y)), key=y.__getitem__), turn, in_seconds)


def measured_curve(timeline: Sequence[tuple[float, int]], like: Curve) -> Curve:
    """A measured step on the axis of a simulated one.

    Counting memory slows a step down, so the measured time is stretched to the same length.
    """
    last = timeline[-1][0] if timeline else 0.0
    scale = like.x[-1] / last if last > 0 else 1.0
    x, y = [at * scale for at, _ in timeline] or [0.0], [live for _, live in timeline] or [0]
    return Curve(x, y, max(range(len(y)), key=y.__getitem__), None, like.in_seconds)


def thinned(curve: Curve, bins: int = 700) -> tuple[list[float], list[int]]:
    """At most four points for each of ``bins`` equal parts of the axis: first, lowest, highest, last.

    At the width of a page nothing is lost to the eye, and the highest point stays exactly where it is.
    """
    x, y = curve.x, curve.y
    if len(x) <= 4 * bins or x[-1] <= x[0]:
        return x, y
    width = (x[-1] - x[0]) / bins
    chosen: list[int] = []
    start = 0
    while start < len(x):
        number = int((x[start] - x[0]) / width)
        end = start + 1
        while end < len(x) and int((x[end] - x[0]) / width) == number:
            end += 1
        part = range(start, end)
        chosen += sorted({start, min(part, key=y.__getitem__), max(part, key=y.__getitem__), end - 1})
        start = end
    return [x[i] for i in chosen], [y[i] for i in chosen]


def _durations(trace: Trace) -> list[float]:
    """An estimate of what each event takes, without anything that runs again."""
    saver = savers(trace)
    weights = [0.0] * len(trace.events)
    forward = backward = 0.0
    met: set[int] = set()
    for i, (kind, operand, _) in enumerate(trace.events):
        if kind == RUN:
            weights[i] = trace.ops[operand].seconds
            forward += weights[i]
        elif kind == NEED:
            op = saver.get(operand, (-1, -1))[0]
            if op >= 0 and op not in met:  # a node asks for its values one after the other
                met.add(op)
                weights[i] = trace.ops[op].seconds
                backward += weights[i]
    scale = {
        RUN: trace.forward_seconds / forward if forward else 0.0,
        NEED: trace.backward_seconds / backward if backward else 0.0,
    }
    return [weight * scale.get(kind, 0.0) for weight, (kind, _, _) in zip(weights, trace.events, strict=True)]
