"""Prices in time: which moments of a step are short of memory, and the minimum cut that these prices ask for.

A value that is kept lies in memory from its making on, one that is dropped only from the moment in which it is first
needed. So keeping costs its bytes times the prices of the moments in between, and recomputing costs its op's time. The
prices belong to single moments of the traced step. Where the simulated peak of the cut's plan exceeds the budget, the
price of that moment rises; while the plan fits, all prices fall. (Lagrangian relaxation of the memory constraints, with
multiplicative updates.)

Unlike the search over segments it sees skip connections across the whole step; it is weaker where replays meet.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from lightning_remat.planning.graph import Cuts, Floats
from lightning_remat.planning.plan import Candidate
from lightning_remat.planning.segments import Layout
from lightning_remat.planning.simulator import Simulator
from lightning_remat.planning.trace import NEED, RELEASE

Judge = Callable[[Sequence[bool]], Candidate]


class Pricing:
    """Plans for the whole step at once.

    Args:
        layout: of the trace.
        judge: the simulator.
    """

    def __init__(self, layout: Layout, judge: Judge) -> None:
        self.layout = layout
        self.judge = judge
        graph, trace = layout.graph, layout.trace
        self.cuts = Cuts(graph, range(len(trace.ops)))
        self.end = len(trace.events)
        self.asked = [self.end] * len(trace.ops)  # event in which backward first asks for each op's outputs itself
        self.left = [0] * len(trace.ops)  # and the one in which it lets go of them
        for e, (kind, a, _) in enumerate(trace.events):
            value = layout.slot_value[a] if kind in (NEED, RELEASE) else -1
            if value >= 0:
                maker = trace.makers[value]
                if kind == NEED:
                    self.asked[maker] = min(self.asked[maker], e)
                self.left[maker] = e
        self.readers: list[list[int]] = [[] for _ in trace.ops]
        for o in self.cuts.free:
            for u in graph.reads[o]:
                self.readers[u].append(o)
        self.made = np.asarray([layout.run[o] for o in self.cuts.free], dtype=np.int64)

    def search(self, budget: int, rounds: int) -> Candidate | None:
        """The best plan within a budget of bytes that the prices lead to; None if they lead to none that fits.

        Args:
            budget: bytes.
            rounds: minimum cuts to make.
        """
        if not self.cuts.count:
            return None
        trace = self.layout.trace
        weight = float(self.cuts.seconds.sum() / max(1.0, self.cuts.nbytes.sum()))
        prices = np.zeros(len(trace.events) + 1)
        when: dict[int, int] = {}
        best: Candidate | None = None
        step = 1.0
        for _ in range(rounds):
            replay = self._cut(prices, when)
            drop = [o in replay for o in range(len(trace.ops))]
            simulator = Simulator(trace, drop)
            found = simulator.run()
            when = simulator.when
            candidate = self.judge(drop)
            if candidate.peak_bytes <= budget:
                if best is None or candidate.extra_seconds < best.extra_seconds:
                    best = candidate
                prices *= 1 - 0.3 * step
                step *= 0.93
            else:
                over = (candidate.peak_bytes - budget) / budget
                at = found.peak_event
                prices[at] += weight * step * min(1.0, max(0.1, 4 * over))
        return best

    def _cut(self, prices: Floats, when: dict[int, int]) -> set[int]:
        """The cheapest plan, if ops that replay do so when they did in the last one."""
        sums = np.concatenate(([0.0], np.cumsum(prices)))
        first, last = list(self.asked), list(self.left)
        for o in reversed(self.cuts.free):
            again = [when[r] for r in self.readers[o] if r in when]
            if again:
                first[o], last[o] = min(first[o], *again), max(last[o], *again)
            elif first[o] == self.end:
                # Nobody needs it now; were its readers dropped, it would be needed when they are.
                first[o] = min((first[r] for r in self.readers[o]), default=self.end)
        begins = np.maximum(np.asarray([first[o] for o in self.cuts.free]), self.made)
        ends = np.maximum(np.asarray([last[o] for o in self.cuts.free]), begins)
        keep = self.cuts.nbytes * (sums[begins] - sums[self.made])
        need = self.cuts.nbytes * (sums[ends] - sums[begins])
        return self.cuts.solve(keep, self.cuts.seconds, need)
