"""What happened so far, in numbers."""

from __future__ import annotations

from dataclasses import dataclass, field

from lightning_remat.engine.offload.place import Traffic

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
        bytes_out: bytes that have left the device, in all steps.
        bytes_in: bytes that have come back.
        transfer_seconds: for how long transfers ran, whether anybody waited or not.
        waited_seconds: for how long steps stood still for them.
        offload_failures: contents that could not be written or read, or did not come back as they were.
        offload_refused: contents that stayed since there was no room for them.
        last_bytes_out: the same of the last step alone, as far as it has run.
        last_bytes_in: likewise.
        last_transfer_seconds: likewise.
        last_waited_seconds: likewise.
        compilations: graphs that were compiled by ``torch.compile`` in steps.
        activation_budget: share of what their compiler would save that compiled regions may; None: it is left to it.
        notes: what was decided and why, in order.

    Example:
        >>> from lightning_remat import Remat
        >>> Remat().counters.retries
        0
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
    bytes_out: int = 0
    bytes_in: int = 0
    transfer_seconds: float = 0.0
    waited_seconds: float = 0.0
    offload_failures: int = 0
    offload_refused: int = 0
    last_bytes_out: int = 0
    last_bytes_in: int = 0
    last_transfer_seconds: float = 0.0
    last_waited_seconds: float = 0.0
    compilations: int = 0
    activation_budget: float | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def hidden(self) -> float | None:
        """Share of the transfers' time in which steps went on, in all steps, or None if nothing was moved."""
        return _hidden(self.transfer_seconds, self.waited_seconds)

    @property
    def last_hidden(self) -> float | None:
        """The same of the last step."""
        return _hidden(self.last_transfer_seconds, self.last_waited_seconds)

    def step_begins(self) -> None:
        """What is moved from now on belongs to another step."""
        self.last_bytes_out = self.last_bytes_in = 0
        self.last_transfer_seconds = self.last_waited_seconds = 0.0

    def moved(self, some: Traffic) -> None:
        """So much was moved since the last call: the difference, not what a place has counted in all."""
        seconds = some.seconds_out + some.seconds_in
        self.last_bytes_out += some.bytes_out
        self.last_bytes_in += some.bytes_in
        self.last_transfer_seconds += seconds
        self.last_waited_seconds += some.waited_seconds
        self.bytes_out += some.bytes_out
        self.bytes_in += some.bytes_in
        self.transfer_seconds += seconds
        self.waited_seconds += some.waited_seconds
        self.offload_failures += some.failures
        self.offload_refused += some.refused

    def note(self, text: str) -> None:
        """Write a decision down; of very many, the first are forgotten."""
        if not self.notes or self.notes[-1] != text:
            self.notes.append(text)
        del self.notes[:-MOST_NOTES]


def _hidden(transfers: float, waited: float) -> float | None:
    return max(0.0, 1.0 - waited / transfers) if transfers > 0 else None
