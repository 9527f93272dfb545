"""Local search: small changes to a plan, each judged by the simulator.

The search over segments does not see everything: skip connections that cross many borders, memory that one op frees for
another. What it leaves is found by trying: keep one op that is dropped, drop one that is kept, exchange two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from time import perf_counter

from lightning_remat.planning.plan import Candidate
from lightning_remat.planning.trace import Trace

Judge = Callable[[Sequence[bool]], Candidate]


class Polish:
    """Improves plans of one trace.

    Args:
        trace: the step.
        judge: the simulator.
        choices: ops that a plan decides about and that matter to it.
    """

    def __init__(self, trace: Trace, judge: Judge, choices: Sequence[int]) -> None:
        self.trace = trace
        self.judge = judge
        self.choices = list(choices)

    def within(self, candidate: Candidate, budget: int, seconds: float) -> Candidate:
        """A plan that fits and takes at most as long.

        Args:
            candidate: a plan that fits.
            budget: bytes.
            seconds: time to spend.
        """
        until = perf_counter() + seconds

        def better(found: Candidate, best: Candidate) -> bool:
            return found.peak_bytes <= budget and (
                found.extra_seconds < best.extra_seconds
                or (found.extra_seconds == best.extra_seconds and found.peak_bytes < best.peak_bytes)
            )

        return self._climb(candidate, better, until)

    def smaller(self, candidate: Candidate, seconds: float) -> Candidate:
        """A plan with at most its peak, whatever time it takes."""
        until = perf_counter() + seconds

        def better(found: Candidate, best: Candidate) -> bool:
            return (found.peak_bytes, found.extra_seconds) < (best.peak_bytes, best.extra_seconds)

        return self._climb(candidate, better, until)

    def _climb(self, best: Candidate, better: Callable[[Candidate, Candidate], bool], until: float) -> Candidate:
        while True:
            improved = False
            for change in self._changes(best):
                if perf_counter() > until:
                    return best
                drop = list(best.drop)
                for o in change:
                    drop[o] = not drop[o]
                found = self.judge(drop)
                if better(found, best):
                    best = found
                    improved = True
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
