"""Which fixed policy a step runs under that no plan is there for."""

from __future__ import annotations

from collections.abc import Callable

from lightning_remat.engine.policies import KEEP_ALL, LEAN, SELECTIVE, Policy, parse_policy
from lightning_remat.runtime.tuning.ladder import Ladder

_MEASURED = 3  # steps whose peaks are looked at before a policy is judged by them


class Fallback:
    """Chooses it: lean for a step in between, and by a :class:`~lightning_remat.runtime.tuning.ladder.Ladder` for good.

    Args:
        note: called with each decision.
        lean: whether to begin with the policy that takes least where nothing can be found out.

    Attributes:
        for_good: no plan is to be expected.
        countable: the peak of a step can be measured.
        guarded: somebody catches out-of-memory errors and runs the step again, so that a looser policy may be tried.
        ladder: the search; None before there is one.
    """

    def __init__(self, note: Callable[[str], None], lean: bool) -> None:
        self.for_good = self.countable = self.guarded = False
        self.ladder: Ladder | None = None
        self._note = note
        self._lean = lean
        self._peaks: list[int] = []

    def policy(self, has_blocks: bool, tightest: bool = False) -> Policy:
        """The policy for the coming step.

        Args:
            has_blocks: the model has blocks, as far as is known.
            tightest: the step has run out of memory already.
        """
        least = LEAN if has_blocks else SELECTIVE
        if not self.for_good or tightest:
            return least
        if not self.countable and not self.guarded:
            return least if self._lean else SELECTIVE
        if self.ladder is None or (has_blocks != ("full" in self.ladder.rungs)):
            self.ladder = Ladder() if has_blocks else Ladder.without_blocks()
        name = self.ladder.name
        return least if self.ladder.at == 0 else KEEP_ALL if name == "none" else parse_policy(name)

    @property
    def rests(self) -> bool:
        """Everything is kept, and that fits: no tape is needed."""
        ladder = self.ladder
        return self.for_good and ladder is not None and ladder.name == "none" and ladder.settled

    @property
    def to_measure(self) -> bool:
        """Whether the coming step's peak is wanted."""
        return self.for_good and self.countable and (self.ladder is None or not self.ladder.settled)

    def went_well(self, peak: int | None, room: int) -> None:
        """A step was trained under the policy.

        Args:
            peak: what it took above static memory; None: not measured.
            room: what it may take.
        """
        ladder = self.ladder
        if ladder is None:
            return
        before = ladder.name
        if self.countable:
            if peak is not None:
                self._peaks.append(peak)
            if len(self._peaks) >= _MEASURED:
                ladder.measured(max(self._peaks), room)
                self._peaks = []
        else:
            ladder.went_well(loosen=self.guarded)
        if ladder.name != before:
            self._note(f"no plan can be followed: policy {ladder.name!r} is tried after {before!r}")

    def failed(self) -> str | None:
        """Memory ran out under the policy; the tighter one that is tried next, or None if there is none."""
        if not self.for_good or self.ladder is None or not self.ladder.failed():
            return None
        self._peaks = []
        return f"under policy {self.ladder.name!r}"
