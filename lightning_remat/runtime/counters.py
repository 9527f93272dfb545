"""What happened so far, in numbers."""

from __future__ import annotations

from dataclasses import dataclass, field

MOST_NOTES = 500
"""Decisions that are remembered: a run that never fits well makes one in every step."""


@dataclass
class Counters:
    """Plain numbers that everybody who does something adds to.

    Attributes:
        steps: steps under the engine that ended well.
        out_of_memory: how often an allocation failed, in whichever way that was got over.
        evictions: kept values that were dropped because an allocation failed.
        evicted_bytes: what they held.
        retries: how often a batch was run again.
        retried_batches: batches that were run again at least once.
        peak_bytes: measured peak of the last measured step, static memory included; None: not measured yet.
        kept_bytes: what the plan in force keeps for backward, by the trace; None: there is none.
        budget_bytes: the peak that is allowed; None: there is no budget yet.
        replayed_ops: ops that ran again in the last step.
        recompute_seconds: wall-clock time of those.
        verified: values that were compared with the true ones.
        verified_different: of these, how many differed.
        notes: what was decided and why, in order.
    """

    steps: int = 0
    out_of_memory: int = 0
    evictions: int = 0
    evicted_bytes: int = 0
    retries: int = 0
    retried_batches: int = 0
    peak_bytes: int | None = None
    kept_bytes: int | None = None
    budget_bytes: int | None = None
    replayed_ops: int = 0
    recompute_seconds: float = 0.0
    verified: int = 0
    verified_different: int = 0
    notes: list[str] = field(default_factory=list)

    def note(self, text: str) -> None:
        """Write a decision down; of very many, the first are forgotten."""
        if not self.notes or self.notes[-1] != text:
            self.notes.append(text)
        del self.notes[:-MOST_NOTES]
