"""What planning comes to: candidates, the one that was chosen, and the front from which it was taken."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from lightning_remat.planning.simulator import simulate
from lightning_remat.planning.trace import Trace


@dataclass(frozen=True, slots=True)
class Candidate:
    """A plan and what the simulator says about it.

    Attributes:
        drop: for each op of the trace, whether its outputs are dropped and computed again when backward needs them.
        peak_bytes: most bytes at once, above what was there when the step began.
        extra_seconds: time of all ops that run again.
    """

    drop: tuple[bool, ...]
    peak_bytes: int
    extra_seconds: float


@dataclass(frozen=True, kw_only=True)
class PlanResult:
    """A chosen plan, and what it was chosen from.

    Attributes:
        trace: the step.
        static_bytes: what is there between steps: parameters, buffers, optimizer state, gradients that stay.
        budget_bytes: what a step may take, ``static_bytes`` included.
        chosen: the plan with the least extra time within the budget.
        front: candidates of which none is better than another in both peak and time, by rising peak. The chosen one is
            among them.
        plain: everything kept.
    """

    trace: Trace
    static_bytes: int
    budget_bytes: int
    chosen: Candidate
    front: tuple[Candidate, ...]
    plain: Candidate

    @property
    def smallest(self) -> Candidate:
        """The plan with the smallest peak."""
        return min((*self.front, self.chosen), key=lambda c: (c.peak_bytes, c.extra_seconds))

    def with_budget(self, budget_bytes: int) -> PlanResult:
        """The same under another figure for what was allowed."""
        return replace(self, budget_bytes=budget_bytes)

    @property
    def peak_bytes(self) -> int:
        """Predicted peak, ``static_bytes`` included."""
        return self.static_bytes + self.chosen.peak_bytes


def judged(trace: Trace, drop: Sequence[bool]) -> Candidate:
    """A plan with what the simulator says about it."""
    found = simulate(trace, drop)
    return Candidate(tuple(drop), found.peak, found.extra_seconds)
