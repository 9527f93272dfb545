"""Which activation budget compiled regions get: the largest of a few that was measured to fit.

The compiler's activation budget is a share: of what it would save by itself, how much it may. How many bytes that comes
to, and how high the peak is, is not known before a step has run. Every other share is another compilation, so there are
few, and each is measured once, in real training steps. The peak need not fall with the share: what is not saved is made
again, and in one large region perhaps all at once. So the search goes by bisection as long as peaks fall, looks on both
sides of the lowest where they do not, and a share is taken only if it was itself measured to fit.

No PyTorch here.
"""

from __future__ import annotations

from dataclasses import dataclass, field

GRID = (0.75, 0.5, 0.25, 0.05)
"""Shares below the compiler's own, largest first. Never 0: there the compiler also draws random numbers again."""


@dataclass
class Shares:
    """Proposes shares and learns what came of them.

    Attributes:
        top: what compiled regions have without us; tried first.
        now: the share in force.
        found: measured peaks (None: memory ran out) by share, and whether that fitted.
        settled: no other share is looked for.
    """

    top: float = 1.0
    now: float = field(default=-1.0)
    found: dict[float, tuple[int | None, bool]] = field(default_factory=dict)
    settled: bool = False

    def __post_init__(self) -> None:
        if self.now < 0:
            self.now = self.top

    @property
    def grid(self) -> tuple[float, ...]:
        """All that may be tried, largest first."""
        return (self.top, *(share for share in GRID if share < self.top))

    @property
    def fits(self) -> bool:
        """Whether the share in force was measured to fit."""
        return self.found.get(self.now, (None, False))[1]

    def learn(self, peak: int | None, fits: bool) -> bool:
        """What came of the share in force, under the best plan for what is not compiled.

        Args:
            peak: measured; None: memory ran out.
            fits: whether it is within the budget.

        Returns:
            Whether another share is to be in force from now on.
        """
        self.found[self.now] = peak, fits
        before = self.now
        ahead = self._ahead()
        self.settled = not ahead
        self.now = ahead[(len(ahead) - 1) // 2] if ahead else self._best()
        return self.now != before

    def ran_out(self) -> bool:
        """Memory ran out under the share in force, whatever was done about the rest.

        Returns:
            Whether another is in force now: the smallest that nothing is known of, which leaves most room for the next
            try; failing that, the one with the smallest measured peak. What comes of it is to be learned as ever.
        """
        before = self.now
        self.found[before] = None, False
        unknown = [share for share in self.grid if share < before and share not in self.found]
        known = [share for share, (peak, _) in self.found.items() if peak is not None and share < before]
        self.now = min(unknown, default=self._lowest() if known else before)
        self.settled = False
        return self.now != before

    def _best(self) -> float:
        fitting = [share for share, (_, fits) in self.found.items() if fits]
        return max(fitting) if fitting else self._lowest()

    def _lowest(self) -> float:
        """The share with the smallest peak; of equal ones the largest, and the smallest where memory always ran out."""

        def order(share: float) -> tuple[bool, int, float]:
            peak = self.found[share][0]
            return (True, 0, share) if peak is None else (False, peak, -share)

        return min(self.found, key=order)

    def _ahead(self) -> list[float]:
        """Where to look next, largest first."""
        center = self._best()
        above = min((share for share in self.found if share > center), default=None)
        larger = [s for s in self.grid if above is not None and center < s < above]
        if self.found[center][1]:
            return larger
        below = max((share for share in self.found if share < center), default=-1.0)
        # Below first, where less is saved; above only where peaks have been seen to rise again.
        return [s for s in self.grid if below < s < center] or (larger if below >= 0 else [])
