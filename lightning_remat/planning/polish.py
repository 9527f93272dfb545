"""Local search: small changes to a plan, each judged by the simulator.

The search over segments does not see everything: skip connections that cross many borders, memory that one op frees for
another. What it leaves is found by trying: keep one op that is dropped, drop one that is kept, exchange two; and where
there is patience left, shake the plan and do the same again. (Iterated local search, with a seed of its own, so that
the same trace gets the same plan.)
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence

from lightning_remat.planning.plan import Candidate
from lightning_remat.planning.trace import Trace

Judge = Callable[[Sequence[bool]], Candidate]
Rank = Callable[[Candidate], tuple[float, float, float]]

_SHAKEN = 4  # ops that are turned over at a time


class Polish:
    """Improves plans of one trace.

    Args:
        trace: the step.
        judge: the simulator.
        choices: ops that a plan decides about.
    """

    def __init__(self, trace: Trace, judge: Judge, choices: Sequence[int]) -> None:
        self.trace = trace
        self.judge = judge
        self.choices = list(choices)
        self.left = 0

    def within(self, candidate: Candidate, budget: int, patience: int) -> Candidate:
        """A plan that fits if the given one does, and takes at most as long.

        Args:
            candidate: a plan.
            budget: bytes.
            patience: plans to simulate.
        """

        def rank(c: Candidate) -> tuple[float, float, float]:
            return max(0, c.peak_bytes - budget), c.extra_seconds, c.peak_bytes

        return self._search(candidate, rank, patience)

    def smaller(self, candidate: Candidate, patience: int) -> Candidate:
        """A plan with at most its peak, whatever time it takes."""

        def rank(c: Candidate) -> tuple[float, float, float]:
            return c.peak_bytes, c.extra_seconds, 0

        return self._search(candidate, rank, patience)

    def _search(self, start: Candidate, rank: Rank, patience: int) -> Candidate:
        self.left = patience
        best = self._climb(start, rank)
        dice = random.Random(0)
        while self.left > 0 and self.choices:
            drop = list(best.drop)
            for o in dice.sample(self.choices, min(_SHAKEN, len(self.choices))):
                drop[o] = not drop[o]
            found = self._climb(self._try(drop), rank)
            if rank(found) < rank(best):
                best = found
        return best

    def _try(self, drop: Sequence[bool]) -> Candidate:
        self.left -= 1
        return self.judge(drop)

    def _climb(self, best: Candidate, rank: Rank) -> Candidate:
        worth = rank(best)
        while True:
            improved = False
            for change in self._changes(best):
                if self.left <= 0:
                    return best
                drop = list(best.drop)
                for o in change:
                    drop[o] = not drop[o]
                found = self._try(drop)
                if (now := rank(found)) < worth:
                    best, worth, improved = found, now, True
                    break
            if not improved:
                return best

    def _changes(self, best: Candidate) -> Iterator[tuple[int, ...]]:
        """Single ops, dearest first; then pairs of one that is dropped and one that is kept; then other pairs."""
        ops = self.trace.ops
        order = sorted(self.choices, key=lambda o: -ops[o].seconds)
        dropped = [o for o in order if best.drop[o]]
        kept = [o for o in order if not best.drop[o]]
        yield from ((o,) for o in dropped)
        yield from ((o,) for o in kept)
        yield from ((a, b) for a in dropped for b in kept)
        yield from ((a, b) for i, a in enumerate(dropped) for b in dropped[i + 1 :])
        yield from ((a, b) for i, a in enumerate(kept) for b in kept[i + 1 :])
