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
from lightning_remat.planning.simulator import simulate
from lightning_remat.planning.trace import Trace

Judge = Callable[[Sequence[bool]], Candidate]
Rank = Callable[[Candidate], tuple[float, float, float]]

_SHAKEN = 5  # ops that are turned over at a time
_FEW = 80  # up to so many choices, all pairs are tried
_NEAR = 6  # beyond, exchanges of ops that are at most so far apart


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
            return self._excess(c, budget), c.extra_seconds, c.peak_bytes

        return self._search(candidate, rank, patience)

    def fitting(self, candidate: Candidate, budget: int, patience: int) -> Candidate | None:
        """Any plan that fits, looked for from one that does not; None if there seems to be none."""

        def rank(c: Candidate) -> tuple[float, float, float]:
            excess = self._excess(c, budget)
            if not excess:
                self.left = 0  # that will do
            return excess, c.extra_seconds, c.peak_bytes

        found = self._search(candidate, rank, patience)
        return found if found.peak_bytes <= budget else None

    def _excess(self, c: Candidate, budget: int) -> float:
        """How far a plan is from fitting: over all events, not only where it is worst, so that every gain counts."""
        if c.peak_bytes <= budget:
            return 0
        tops = simulate(self.trace, c.drop, timeline=True).tops
        return float(sum(top - budget for top in tops if top > budget))

    def _search(self, start: Candidate, rank: Rank, patience: int) -> Candidate:
        self.left = patience
        best = self._climb(start, rank)
        dice = random.Random(0)
        while self.left > 0 and self.choices:
            drop = list(best.drop)
            for o in self._some(dice):
                drop[o] = not drop[o]
            found = self._climb(self._try(drop), rank)
            if rank(found) < rank(best):
                best = found
        return best

    def _some(self, dice: random.Random) -> list[int]:
        """A few choices, from all over or from one stretch."""
        count = min(dice.randint(2, _SHAKEN), len(self.choices))
        if dice.random() < 0.5:
            return dice.sample(self.choices, count)
        start = dice.randrange(len(self.choices))
        return dice.sample(self.choices[start : start + 3 * count], min(count, len(self.choices) - start))

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
        """Single ops, dearest first; exchanges of one that is dropped for one that is kept, near ones first; pairs."""
        ops = self.trace.ops
        order = sorted(self.choices, key=lambda o: -ops[o].seconds)
        dropped = [o for o in order if best.drop[o]]
        kept = [o for o in order if not best.drop[o]]
        yield from ((o,) for o in dropped)
        yield from ((o,) for o in kept)
        near = _NEAR if len(order) > _FEW else len(ops)
        exchanges = ((abs(a - b), a, b) for a in dropped for b in kept if abs(a - b) <= near)
        yield from ((a, b) for _, a, b in sorted(exchanges))
        if len(order) > _FEW:
            return
        yield from ((a, b) for i, a in enumerate(dropped) for b in dropped[i + 1 :])
        yield from ((a, b) for i, a in enumerate(kept) for b in kept[i + 1 :])
