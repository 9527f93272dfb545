"""What planning comes to: candidates, the one that was chosen, and the front from which it was taken."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from lightning_remat.planning.simulation import simulate
from lightning_remat.planning.simulator import Simulation
from lightning_remat.planning.trace import Trace
from lightning_remat.planning.transfer import Transfer


@dataclass(frozen=True, slots=True)
class Candidate:
    """A plan and what the simulator says about it.

    Attributes:
        drop: for each op of the trace, whether its outputs are dropped and computed again when backward needs them.
        peak_bytes: most bytes at once, above what was there when the step began.
        extra_seconds: time of all ops that run again, of waits for transfers, and what transfers take from the step.
        move: for each op, whether its outputs leave the device and come back when backward needs them; empty: none do.
            What is dropped does not move.
        waited_seconds: the part of ``extra_seconds`` in which the step stands still for transfers.
        moved_bytes: bytes of all contents that leave in a step.
        transfer: where they move to, with the bounds that the figures hold for; None: nothing moves.

    Example:
        >>> from lightning_remat.planning.plan import Candidate
        >>> Candidate(drop=(True, False), peak_bytes=1024, extra_seconds=0.001).moves
        False
    """

    drop: tuple[bool, ...]
    peak_bytes: int
    extra_seconds: float
    move: tuple[bool, ...] = ()
    waited_seconds: float = 0.0
    moved_bytes: int = 0
    transfer: Transfer | None = None

    @property
    def moves(self) -> bool:
        """Whether anything leaves the device."""
        return any(self.move)


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
        transfer: the place that contents move to; None: nothing moves. If the chosen plan moves anything, its own.

    Example:
        >>> from lightning_remat.planning.plan import Candidate, PlanResult
        >>> from lightning_remat.planning.trace import Trace
        >>> plain = Candidate(drop=(), peak_bytes=1000, extra_seconds=0.0)
        >>> result = PlanResult(
        ...     trace=Trace(), static_bytes=500, budget_bytes=2000, chosen=plain, front=(plain,), plain=plain
        ... )
        >>> result.peak_bytes, result.smallest is plain
        (1500, True)
    """

    trace: Trace
    static_bytes: int
    budget_bytes: int
    chosen: Candidate
    front: tuple[Candidate, ...]
    plain: Candidate
    transfer: Transfer | None = None

    def __post_init__(self) -> None:
        if self.chosen.transfer is not None:
            object.__setattr__(self, "transfer", self.chosen.transfer)

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


def judged(
    trace: Trace, drop: Sequence[bool], move: Sequence[bool] = (), transfer: Transfer | None = None
) -> Candidate:
    """A plan with what the simulator says about it; see :func:`~lightning_remat.planning.simulation.simulate`."""
    found = simulate(trace, drop, False, move, transfer)
    if not any(move):
        return Candidate(tuple(drop), found.peak, found.extra_seconds)
    assert transfer is not None  # or the simulator would have refused
    return candidate_of(drop, move, found, transfer)


def candidate_of(drop: Sequence[bool], move: Sequence[bool], found: Simulation, transfer: Transfer) -> Candidate:
    """A plan with moves that was simulated."""
    waited, moved = found.waited_seconds, found.moved_bytes
    return Candidate(tuple(drop), found.peak, found.extra_seconds, tuple(move), waited, moved, transfer)
