"""Local search: small changes to a plan, each judged by the simulator.

The search over segments does not see everything: skip connections that cross many borders, memory that one op frees for
another. What it leaves is found by trying: keep one op that is dropped, drop one that is kept, exchange two; and where
there is patience left, shake the plan and do the same again. (Iterated local search, with a seed of its own, so that
the same trace gets the same plan.)
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence

from lightning_remat.planning.graph import Graph
from lightning_remat.planning.plan import Candidate
from lightning_remat.planning.simulator import simulate
from lightning_remat.planning.trace import Trace

Judge = Callable[[Sequence[bool]], Candidate]
Rank = Callable[[Candidate], tuple[float, float, float]]

_SHAKEN = 5  # ops that are turned over at a time
_KNOWN = 0.1  # of a simulation, for a plan that has been simulated before
_TRIPLES = 20_000  # exchanges of one for two are tried if there are at most twice as many
_FEW = 80  # up to so many choices, all pairs are tried
_NEAR = 6  # beyond, exchanges of ops that are at most so far apart


class Polish:
    """Improves plans of one trace.

    Args:
        trace: the step.
        judge: the simulator.
        graph: its dependencies.
        simulated: how many plans have been simulated so far; patience is counted in these.
    """

    def __init__(self, trace: Trace, judge: Judge, graph: Graph, simulated: Callable[[], int]) -> None:
        self.trace = trace
        self.judge = judge
        self.simulated = simulated
        self.choices = [o for o, droppable in enumerate(graph.droppable) if droppable]
        # What is written in place can be dropped only together with what was there before.
        self.chains: list[list[int]] = []
        for o in range(len(trace.ops)):
            old = graph.overwrites[o]
            self.chains.append([o, *self.chains[old]] if old >= 0 else [o])
        self.left = 0.0

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
        before = self.simulated()
        found = self.judge(drop)
        self.left -= 1.0 if self.simulated() > before else _KNOWN
        return found

    def _climb(self, best: Candidate, rank: Rank) -> Candidate:
        worth = rank(best)
        improved = True
        while improved:
            improved = False
            for dropping, keeping in self._changes(best):
                if self.left <= 0:
                    return best
                drop = list(best.drop)
                for o in keeping:
                    drop[o] = False
                for o in dropping:
                    for chained in self.chains[o]:
                        drop[chained] = True
                found = self._try(drop)
                if (now := rank(found)) < worth:
                    best, worth, improved = found, now, True
        return best

    def _changes(self, best: Candidate) -> Iterator[tuple[Sequence[int], Sequence[int]]]:
        """(ops to drop, ops to keep): single ones; short stretches; exchanges, near ones first; pairs."""
        ops = self.trace.ops
        order = sorted(self.choices, key=lambda o: -ops[o].seconds)
        dropped = [o for o in order if best.drop[o]]
        kept = [o for o in reversed(order) if not best.drop[o]]  # the cheapest first
        nothing: tuple[int, ...] = ()
        yield from ((nothing, (o,)) for o in dropped)
        yield from (((o,), nothing) for o in kept)
        few = len(order) <= _FEW
        for length in (2, 3, 4) if few else (2,):
            for start in range(len(self.choices) - length + 1):
                stretch = self.choices[start : start + length]
                yield stretch, nothing
                yield nothing, stretch
        near = len(ops) if few else _NEAR
        exchanges = ((abs(a - b), a, b) for a in dropped for b in kept if abs(a - b) <= near)
        yield from (((b,), (a,)) for _, a, b in sorted(exchanges))
        if not few:
            return
        yield from ((nothing, (a, b)) for i, a in enumerate(dropped) for b in dropped[i + 1 :])
        yield from (((a, b), nothing) for i, a in enumerate(kept) for b in kept[i + 1 :])
        if len(dropped) * len(kept) ** 2 <= _TRIPLES:
            yield from (((b, c), (a,)) for a in dropped for i, b in enumerate(kept) for c in kept[i + 1 :])
