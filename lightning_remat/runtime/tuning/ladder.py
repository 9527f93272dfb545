"""Where no step can be traced: fixed policies in order of what they take, and a search among them.

Between the loosest policy known to fit and the tightest known not to, the next one tried is in the middle. What fits is
what was measured, where memory can be counted; otherwise, what ran out of memory does not fit.
"""

from __future__ import annotations

from dataclasses import dataclass

RUNGS = ("full", "sqrt", "every:2", "selective", "none")
"""By rising peak, as a rule; ``"full"`` stands for what a step is traced under."""

WITHOUT_BLOCKS = ("selective", "none")

GOOD = 5
"""Steps that have to go well under a policy until a looser one is tried."""


@dataclass
class Ladder:
    """Which policy the next step runs under.

    Attributes:
        rungs: names, tightest first.
        at: the one in force.
        failed_at: the tightest that did not fit; ``len(rungs)``: none is known.
        fitted: the loosest that is known to fit; -1: none.
        good: steps that went well under the one in force.
        settled: no other is looked for, unless one fails.
        measured_peak: the last measured peak.
    """

    rungs: tuple[str, ...] = RUNGS
    at: int = 0
    failed_at: int = len(RUNGS)
    fitted: int = -1
    good: int = 0
    settled: bool = False
    measured_peak: int | None = None

    @classmethod
    def without_blocks(cls) -> Ladder:
        """For a model in which there are none."""
        return cls(WITHOUT_BLOCKS, failed_at=len(WITHOUT_BLOCKS))

    @property
    def name(self) -> str:
        """The policy in force."""
        return self.rungs[self.at]

    def went_well(self, loosen: bool) -> bool:
        """A step has been trained.

        Args:
            loosen: whether a looser policy may be tried without knowing that it fits: somebody catches the error.

        Returns:
            Whether the policy is another one now.
        """
        self.good += 1
        if self.good < GOOD:
            return False
        self.fitted = max(self.fitted, self.at)
        return loosen and not self.settled and self._go_between()

    def measured(self, peak: int, room: int) -> bool:
        """The peak of a step under the policy in force, and what there is room for; whether the policy changes."""
        self.measured_peak = peak
        if peak <= room:
            self.fitted = max(self.fitted, self.at)
        else:
            self.failed_at = min(self.failed_at, self.at)
            self.fitted = min(self.fitted, self.at - 1)
        return self._go_between()

    def failed(self) -> bool:
        """Memory ran out: go back, and stay there; False if there is nothing to go back to."""
        self.settled = True
        self.failed_at = min(self.failed_at, self.at)
        if self.at == 0:
            return False
        self.fitted = min(self.fitted, self.at - 1)
        self._go(max(0, self.fitted))
        return True

    def _go_between(self) -> bool:
        """To the middle of what is not known yet, or else to the loosest that fits."""
        low, high = self.fitted, self.failed_at
        if high - low <= 1:
            self.settled = True
            return self._go(max(0, low))
        return self._go((low + high) // 2)

    def _go(self, rung: int) -> bool:
        if rung == self.at:
            return False
        self.at, self.good = rung, 0
        return True
