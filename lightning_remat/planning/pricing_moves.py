"""Prices in time with a third way: what is kept may lie elsewhere.

As in :class:`~lightning_remat.planning.pricing.Pricing`, every moment has a price of a byte. On top there is one for a
byte that moves. A moved value pays for the moments until it has left the window, and this price; a kept one for all
moments until it is asked for. The minimum cut chooses between having a value ready, at the lower of the two, and making
it again. How dear a moved byte is nobody knows beforehand: it depends on how much else moves. So some prices are tried,
from as much as it can cost at all (nothing hides) to nothing (all of it does).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from lightning_remat.planning.batch import Ints, Rows
from lightning_remat.planning.graph import Floats
from lightning_remat.planning.moves import Moves
from lightning_remat.planning.moving import MovingSimulator
from lightning_remat.planning.plan import Candidate, candidate_of
from lightning_remat.planning.pricing import Pricing
from lightning_remat.planning.simulator import Simulator

SHARES = (1.0, 0.5, 0.2, 0.05, 0.0)
"""Prices of a moved byte, of the most that it can cost."""


class MovePricing:
    """Plans for the whole step at once, with moves.

    Args:
        pricing: of the trace.
        moves: what could move.
        recompute: whether anything may be dropped.
        found: is told every plan that is tried.

    Attributes:
        drops: what the plans of the last search drop. With all that costs the same the prices want all or nothing to
            move; how much of it does, others have to find.
    """

    def __init__(self, pricing: Pricing, moves: Moves, recompute: bool, found: Callable[[Candidate], None]) -> None:
        self.pricing = pricing
        self.moves = moves
        self.recompute = recompute
        self.found = found
        layout = pricing.layout
        self.count = len(layout.trace.ops)
        self.made: Ints = np.asarray(layout.run, dtype=np.int64)
        self.last: Rows = np.zeros(self.count, dtype=bool)  # kept or moved, and needed, in the last plan
        self.drops: dict[bytes, Rows] = {}
        self.free: Ints = np.asarray(pricing.cuts.free if recompute else [], dtype=np.int64)

    def search(self, budget: int, rounds: int) -> None:
        """Plans for a budget of bytes, at every price of a moved byte; some of them may fit.

        Args:
            budget: bytes.
            rounds: minimum cuts to make for each price.
        """
        cuts = self.pricing.cuts
        self.drops = {}
        prices = np.zeros(self.pricing.end + 1)
        total = float(cuts.nbytes.sum())
        usual = float(cuts.seconds.sum()) / total if total and self.recompute else 0.0
        for share in SHARES:
            price = share * self.moves.dearest + 2 * self.moves.transfer.cpu_seconds_per_byte
            weight = min(w for w in (usual, price, self.moves.dearest) if w > 0) if usual or price else 1e-12
            when: dict[int, int] = {}
            self.last = self.moves.can.copy()
            step = 1.0
            for _ in range(rounds):
                drop, move = self._cut(prices, price, when)
                self.drops.setdefault(drop.tobytes(), drop)
                simulator: Simulator
                if move.any():
                    simulator = MovingSimulator(
                        self.pricing.layout.trace, drop.tolist(), move.tolist(), self.moves.transfer, self.moves.paces
                    )
                else:
                    simulator = Simulator(self.pricing.layout.trace, drop.tolist())
                run = simulator.run()
                when = simulator.when
                if move.any():
                    self.found(candidate_of(drop.tolist(), move.tolist(), run, self.moves.transfer))
                if run.peak <= budget:
                    prices *= 1 - 0.3 * step
                    step *= 0.9
                else:
                    over = (run.peak - budget) / max(1, budget)
                    prices[run.peak_event] += weight * step * min(1.0, max(0.1, 4 * over))

    def _cut(self, prices: Floats, price: float, when: dict[int, int]) -> tuple[Rows, Rows]:
        """The cheapest plan, if ops that replay do so when they did in the last one."""
        moves, pricing = self.moves, self.pricing
        sums = np.concatenate(([0.0], np.cumsum(prices)))
        first, last = list(pricing.asked), list(pricing.left)
        for o in range(self.count - 1, -1, -1):
            again = [when[r] for r in moves.readers[o] if r in when]
            if again:
                first[o], last[o] = min(first[o], *again), max(last[o], *again)
            elif first[o] == pricing.end:
                first[o] = min((first[r] for r in moves.readers[o]), default=pricing.end)
        begins = np.maximum(np.asarray(first), self.made)
        ends = np.maximum(np.asarray(last), begins)
        lie = sums[begins] - sums[self.made]
        graph_bytes = (moves.nbytes + moves.small).astype(np.float64)
        keep = graph_bytes * lie
        gone = np.minimum(self._gone(), begins)
        move = moves.small * lie + moves.nbytes * (sums[gone] - sums[self.made] + price)
        move[~moves.can] = np.inf
        drop: Rows = np.zeros(self.count, dtype=bool)
        if len(self.free):
            need = graph_bytes * (sums[ends] - sums[begins])
            ready = np.minimum(keep, move)[self.free]
            for o in pricing.cuts.solve(ready, pricing.cuts.seconds, need[self.free]):
                drop[o] = True
        self.last = moves.can & ~drop & moves.needed(drop)
        return drop, self.last & (move < keep)

    def _gone(self) -> Ints:
        """For each op, the event in which its outputs would leave the window, if all moved that could have."""
        amounts = np.cumsum(np.where(self.last, self.moves.nbytes, 0))
        threshold = amounts + self.moves.transfer.window_bytes - self.moves.nbytes
        pushed = np.maximum(np.searchsorted(amounts, threshold, side="right"), np.arange(self.count))
        runs = np.append(self.made, self.pricing.end)
        found: Ints = runs[np.minimum(pushed, self.count)]
        return found
