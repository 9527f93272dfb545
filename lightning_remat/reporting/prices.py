"""What a plan pays for memory: seconds per byte, of the plan as a whole and of what it keeps on the device.

A planner that weighs memory against time with one price keeps what would cost more than that to compute again, and
computes the rest again (a minimum cut, in economics a shadow price). Seen from the outside that price is the slope of
the front of peak against extra time at the chosen plan.

Known weaknesses: bytes count here as they are saved, not as they lie at the peak, so that near a plan whose peak is
somewhere in the middle of backward the two prices differ; and a group of values is priced as if it alone were changed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from itertools import pairwise
from typing import NamedTuple

from lightning_remat.planning.plan import Candidate
from lightning_remat.planning.simulator import Simulation
from lightning_remat.planning.trace import SAVE, Trace


class Slope(NamedTuple):
    """The front at one of its plans, in seconds per byte of peak.

    Attributes:
        paid: what the last bytes that the plan freed cost; 0 if it recomputes nothing.
        next: what the next ones would cost; None if no plan frees more.
    """

    paid: float
    next: float | None


def slope_at(chosen: Candidate, others: Iterable[Candidate]) -> Slope:
    """The slope of the lower convex hull around ``chosen``, to both sides; it need not lie on the hull itself."""
    hull = _hull([chosen, *others])
    paid, following = 0.0, None
    for (small, dear), (large, cheap) in pairwise(hull):
        slope = (dear - cheap) / (large - small)
        if small < chosen.peak_bytes:
            following = slope  # segments come by rising peak: the last one that begins below is the nearest
        if large > chosen.peak_bytes and not paid:
            paid = slope
    return Slope(paid, following)


def _hull(candidates: Iterable[Candidate]) -> list[tuple[int, float]]:
    """(peak, extra seconds) of the lower convex hull's falling part, by rising peak."""
    hull: list[tuple[int, float]] = []
    for peak, seconds in sorted({(c.peak_bytes, c.extra_seconds) for c in candidates}):
        if hull and (peak == hull[-1][0] or seconds >= hull[-1][1]):
            continue
        while len(hull) > 1:
            (p0, s0), (p1, s1) = hull[-2:]
            if (s0 - s1) * (peak - p1) > (s1 - seconds) * (p1 - p0):
                break
            hull.pop()
        hull.append((peak, seconds))
    return hull


class Kept:
    """Which values of a trace stay in memory for backward under a plan, which leave it, and which are computed again.

    A value stays if it is neither dropped nor moved, and autograd saved it or an op that runs again reads it.

    Args:
        trace: the step.
        drop: the plan.
        simulation: of that plan.

    Attributes:
        values: those that stay.
        moved: those that leave and come back.
        replayed: ops that run again.
    """

    def __init__(self, trace: Trace, drop: Sequence[bool], simulation: Simulation) -> None:
        self.trace = trace
        self.replayed = set(simulation.replayed)
        self.moved = set(simulation.left)
        dropped = _dropped(trace, drop, self.moved)
        wanted = {value for kind, _, value in trace.events if kind == SAVE}
        wanted |= {value for o in self.replayed for value in trace.ops[o].inputs}
        self.values = {value for value in wanted if not dropped[value]} - self.moved

    def price(self, values: Iterable[int]) -> float | None:
        """Seconds per byte to compute kept values again instead, all of them and nothing else.

        Whatever else would have to run for that is counted in, and so is what would have to be kept for it. None if
        nothing could be freed in this way.
        """
        trace, ops, nbytes = self.trace, self.trace.ops, self.trace.nbytes
        changed = {v for v in values if v in self.values and nbytes[v] and ops[trace.makers[v]].droppable}
        again = {trace.makers[v] for v in changed}
        held: set[int] = set()
        stack = list(again)
        while stack:
            for u in ops[stack.pop()].inputs:
                maker = trace.makers[u]
                if maker in again or maker in self.replayed or u in self.values or u in self.moved:
                    continue
                if ops[maker].droppable:
                    again.add(maker)
                    stack.append(maker)
                else:
                    held.add(u)
        freed = sum(nbytes[v] for v in changed) - sum(nbytes[v] for v in held)
        return sum(ops[o].seconds for o in again) / freed if freed > 0 else None


def _dropped(trace: Trace, drop: Sequence[bool], moved: Set[int]) -> list[bool]:
    """For each value, whether the tape drops it. What is written into a value that is there is there, too."""
    dropped = [False] * len(trace.nbytes)
    for op, wanted in zip(trace.ops, drop, strict=True):
        here = op.droppable and bool(wanted) and (op.writes < 0 or dropped[op.writes] or op.writes in moved)
        for value in op.outputs:
            dropped[value] = here
    return dropped
