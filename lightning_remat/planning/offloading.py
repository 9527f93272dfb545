"""Plans that keep, recompute and move: the search for the fastest one within a budget, or for the smallest.

Guesses come from three sides: prices (:mod:`~lightning_remat.planning.pricing_moves`); the plans without moves that are
known, with as few moves as make them fit; and local search from the best of both, over ops and kinds of ops, with three
ways for each. All are judged by the simulator, one by one. The work is bounded in events that are simulated, and no
dice are thrown, so that the same trace gets the same plan.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from lightning_remat.planning.batch import Ints, Rows
from lightning_remat.planning.moves import Moves, fewest
from lightning_remat.planning.moving import MovingSimulator
from lightning_remat.planning.plan import Candidate, candidate_of, judged
from lightning_remat.planning.polish import Polish
from lightning_remat.planning.pricing import Pricing
from lightning_remat.planning.pricing_moves import SHARES, MovePricing
from lightning_remat.planning.trace import Trace
from lightning_remat.planning.transfer import Transfer

_WORK = 500_000  # events to simulate for one budget
_LEAST = 60  # plans to simulate for one budget, however long the trace is
_MOST = 1200  # and however short
_BASES = 6  # plans without moves that are made to fit by moves
_STARTS = 3  # plans from which local search begins
_OVER = (0.0, 1.0, 4.0, 0.3)  # what a byte too much costs, in units of what one saved costs; 0: too large is out

_AROUND = 40  # plans from which it goes on

KEEP, DROP, MOVE = range(3)

_T = TypeVar("_T")
Cost = Callable[[Candidate], tuple[float, float]]


@dataclass(frozen=True, slots=True)
class _Cost:
    """What a plan is worth: its time, and a price for each byte above the budget; none: what is too large is out."""

    budget: int
    over: float

    def __call__(self, c: Candidate) -> tuple[float, float]:
        excess = max(0, c.peak_bytes - self.budget)
        if excess and not self.over:
            return np.inf, float(excess)
        return c.extra_seconds + self.over * excess, float(c.peak_bytes)


class Offloading:
    """Plans with moves for one trace; asked for as many budgets as one likes.

    Args:
        trace: the step.
        pricing: of it.
        polish: of it, for what depends on what.
        transfer: where contents move to.
        recompute: whether anything may be dropped.

    Attributes:
        tried: every plan that was simulated, by its drops and moves; those without moves are not among them.
    """

    def __init__(
        self, trace: Trace, pricing: Pricing, polish: Polish, transfer: Transfer, recompute: bool = True
    ) -> None:
        self.trace = trace
        self.transfer = transfer
        self.recompute = recompute
        self.moves = Moves(trace, pricing.layout.graph, transfer)
        self.tried: dict[tuple[bytes, bytes], Candidate] = {}
        self.polish = polish
        self.prices = MovePricing(pricing, self.moves, recompute, self._note)
        self.events = max(1, len(trace.events))
        self.most = max(_LEAST, min(_MOST, _WORK // self.events))
        self.left = 0  # plans that may still be simulated
        self.budget = 0  # of the search that is running
        self.groups = self._groups()

    def _groups(self) -> list[Ints]:
        """Ops with a choice, by what they do, to what, and how large; first those that take longest to run again."""
        graph, moves = self.moves.graph, self.moves
        found: dict[object, list[int]] = {}
        for o in np.flatnonzero(moves.can | (moves.droppable & self.recompute)).tolist():
            distances = tuple(sorted(o - u for u in graph.reads[o]))
            found.setdefault((self.trace.ops[o].name, graph.nbytes[o], distances, bool(moves.can[o])), []).append(o)
        groups = [np.asarray(ops, dtype=np.int64) for ops in found.values()]
        return sorted(groups, key=lambda ops: -sum(graph.seconds[o] for o in ops.tolist()))

    # ------------------------------------------------------------------ judging

    def judge(self, drop: Rows, move: Rows) -> Candidate:
        """A plan with what the simulator says about it; every plan is simulated once."""
        move = move & ~(drop & self.moves.droppable)
        key = drop.tobytes(), move.tobytes()
        found = self.tried.get(key)
        if found is None:
            self.left -= 1
            flags = drop.tolist(), move.tolist()
            if move.any():
                run = MovingSimulator(self.trace, *flags, self.transfer, self.moves.paces).run()
                found = candidate_of(*flags, run, self.transfer)
            else:
                found = judged(self.trace, flags[0])
            if found.moves:
                self.tried[key] = found
        return found

    def _note(self, candidate: Candidate) -> None:
        self.left -= 1
        key = np.asarray(candidate.drop, dtype=bool).tobytes(), np.asarray(candidate.move, dtype=bool).tobytes()
        self.tried.setdefault(key, candidate)

    def best(self, budget: int) -> Candidate | None:
        """The fastest that was tried and fits."""
        fitting = [c for c in self.tried.values() if c.peak_bytes <= budget]
        return min(fitting, key=_fast, default=None)

    def least(self) -> Candidate | None:
        """The smallest that was tried."""
        return min(self.tried.values(), key=_small, default=None)

    # ------------------------------------------------------------------ searching

    def within(self, budget: int, known: Iterable[Candidate], rough: bool = False) -> Candidate | None:
        """The fastest plan found whose peak is within a budget of bytes; None if none was found.

        Args:
            budget: bytes.
            known: plans without moves, whether they fit or not.
            rough: without local search.
        """
        if not self.moves.can.any():
            return None
        known = list(known)
        self.budget = budget
        self.left = self.most if not rough else self.most // 4
        rounds = max(3, min(14, self.left // (3 * len(SHARES))))
        self.prices.search(budget, rounds)
        self._fill(budget, known)
        if not rough:
            self._descend(budget, known)
        return self.best(budget)

    def refine(
        self, budget: int, known: Iterable[Candidate], others: Iterable[Candidate], share: float
    ) -> Candidate | None:
        """After a rough search, the rest of it.

        Args:
            budget: bytes.
            known: plans without moves.
            others: plans that were found for other bounds.
            share: of the work that is allowed for one budget.
        """
        if not self.moves.can.any():
            return None
        self.budget = budget
        self.left = int(share * self.most)
        for other in others:
            self.judge(np.asarray(other.drop, dtype=bool), np.asarray(other.move, dtype=bool))
        known = list(known)
        self._fill(budget, known)
        self._descend(budget, known)
        return self.best(budget)

    def smallest(self, known: Sequence[Candidate]) -> Candidate | None:
        """The plan with the smallest peak found; None if nothing could move.

        Args:
            known: plans without moves.
        """
        if not self.moves.can.any():
            return None
        self.left = self.most
        for base in sorted(known, key=_small)[:_BASES]:
            drop = np.asarray(base.drop, dtype=bool)
            self.judge(drop, self.moves.as_row(self.moves.worthwhile(drop)))
        least = self.least()
        if least is None:
            return None
        # Prices that no plan can pay point to the moments that matter.
        self.prices.search(int(least.peak_bytes * 0.9), 4)
        self.budget = -1
        self._around([lambda c: (float(c.peak_bytes), c.extra_seconds)], known)
        return self.least()

    def _fill(self, budget: int, known: Sequence[Candidate]) -> None:
        """Make plans fit that do not, by as few moves as do."""
        reserve = self.left // 2
        fitting = min((c.extra_seconds for c in known if c.peak_bytes <= budget), default=np.inf)
        bases = _front(c for c in known if c.peak_bytes > budget and c.extra_seconds < fitting)
        # The fastest one that fits with moves for which nobody has to wait, and the one after it, before the others.
        count = fewest(len(bases), lambda n: self._hidden(bases[n - 1]).peak_bytes <= budget)
        chosen = [*bases[count - 1 : count + 1], *_some(bases)] if count else _some(bases)
        drops = [np.asarray(base.drop, dtype=bool) for base in chosen]
        for drop in [*drops, *_some(list(self.prices.drops.values()))]:
            ops = self.moves.worthwhile(drop)
            unhurried = self.moves.unhurried(ops)
            for some in (unhurried, ops) if len(unhurried) < len(ops) else (ops,):
                if self.left < reserve or not len(some):
                    break
                self._fewest(drop, some, budget)

    def _hidden(self, base: Candidate) -> Candidate:
        drop = np.asarray(base.drop, dtype=bool)
        return self.judge(drop, self.moves.as_row(self.moves.unhurried(self.moves.worthwhile(drop))))

    def _fewest(self, drop: Rows, ops: Ints, budget: int) -> None:
        fewest(len(ops), lambda n: self.judge(drop, self.moves.as_row(ops[:n])).peak_bytes <= budget)

    def _descend(self, budget: int, known: Sequence[Candidate]) -> None:
        """Local search from the best plans, with and without moves; then around others that are nearly as good."""
        fits = [c for c in (*self.tried.values(), *known) if c.peak_bytes <= budget]
        plain = max(c.peak_bytes for c in (*self.tried.values(), *known))
        unit = min((c.extra_seconds for c in fits), default=0.0) / max(1, plain - budget)
        costs = [_Cost(budget, over * (unit or 1.0)) for over in _OVER]
        for i in range(_STARTS):
            cost = costs[i % len(costs)]
            starts = sorted([*self.tried.values(), *known], key=cost)[: i + 1]
            stop = self.left * (_STARTS - 1 - i) // _STARTS
            current: Candidate | None = starts[-1] if starts else None
            while current is not None and self.left > stop:
                current = self._better(current, cost, stop)
        self._around(costs, known)

    def _around(self, costs: Sequence[Cost], known: Sequence[Candidate]) -> None:
        """Descend from one plan after the other, the most promising first."""
        seen = set[tuple[tuple[bool, ...], tuple[bool, ...]]]()
        for cost in itertools.cycle(costs):
            rest = [c for c in (*self.tried.values(), *known) if (c.drop, c.move) not in seen]
            if self.left <= 0 or not rest or len(seen) >= _AROUND:
                break
            current: Candidate | None = min(rest, key=cost)
            while current is not None and self.left > 0:
                seen.add((current.drop, current.move))
                current = self._better(current, cost)

    # ------------------------------------------------------------------ small changes

    def _better(self, start: Candidate, cost: Cost, stop: int = 0) -> Candidate | None:
        """After one round of changes, each taken up if it is for the better: the result, or None if none was."""
        now, worth = start, cost(start)
        for group, piece, action in self._changes():
            if self.left <= stop:
                break
            changed = self._changed(now, group, piece, action, now.peak_bytes > self.budget)
            if changed is None:
                continue
            candidate = self.judge(*changed)
            if cost(candidate) < worth:
                now, worth = candidate, cost(candidate)
        return None if now is start else now

    def _changes(self) -> Iterable[tuple[Ints, int, int]]:
        """Ops, which of them, and what to do with them: whole kinds first, then halves, then single ones."""
        for piece in range(6):
            for group in self.groups:
                for action in (MOVE, KEEP, DROP):
                    yield group, piece, action

    def _changed(self, plan: Candidate, group: Ints, piece: int, action: int, over: bool) -> tuple[Rows, Rows] | None:
        """The plan with other flags for some ops; None if that changes nothing, or could not be for the better.

        Args:
            plan: what is changed.
            group: ops of a kind.
            piece: which of those that can be changed: all, a half, or one.
            action: what becomes of them.
            over: whether the plan takes too much memory.
        """
        if action == DROP and not self.recompute:
            return None
        drop = np.asarray(plan.drop, dtype=bool)
        move = np.asarray(plan.move if plan.moves else np.zeros(len(drop)), dtype=bool)
        dropped, moved = drop[group], move[group]
        # What is kept costs no time, and what moves only if somebody waits or the processor does it.
        costly = plan.waited_seconds > 0 or self.transfer.cpu_seconds_per_byte > 0
        if action == MOVE:
            # Also where there is room: what moves for nothing makes more of it, for what is dropped.
            ops = group[self.moves.can[group] & ~moved]
        elif action == KEEP:
            ops = group[dropped | (moved & costly)]
        else:
            ops = group[self.moves.droppable[group] & ~dropped & ((moved & costly) | over)]
        half = len(ops) // 2
        pieces = (ops, ops[:half], ops[half:], ops[:1], ops[half : half + 1], ops[-1:])
        if not len(pieces[piece]) or (piece and len(pieces[piece]) == len(ops)):
            return None
        ops = pieces[piece]
        drop[ops], move[ops] = action == DROP, action == MOVE
        for o in ops.tolist():
            # What is written in place can be dropped only together with what was there before.
            for other in self.polish.under.get(o, ()) if action == DROP else ():
                drop[other], move[other] = True, False
            for other in self.polish.over.get(o, ()) if action != DROP else ():
                drop[other] = False
        return drop, move


def _some(things: Sequence[_T]) -> list[_T]:
    """At most so many, evenly from the first to the last."""
    chosen = np.unique(np.linspace(0, len(things) - 1, min(len(things), _BASES)).round().astype(int))
    return [things[i] for i in chosen.tolist()]


def _fast(candidate: Candidate) -> tuple[float, int]:
    return candidate.extra_seconds, candidate.peak_bytes


def _small(candidate: Candidate) -> tuple[int, float]:
    return candidate.peak_bytes, candidate.extra_seconds


def _front(candidates: Iterable[Candidate]) -> list[Candidate]:
    """Those that no other one beats in both respects, by rising time."""
    found: list[Candidate] = []
    for candidate in sorted(candidates, key=_fast):
        if not found or candidate.peak_bytes < found[-1].peak_bytes:
            found.append(candidate)
    return found
