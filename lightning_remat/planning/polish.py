"""Local search: small changes to many plans at once, all judged by the simulator.

The search over segments does not see everything: skip connections that cross many borders, memory that one op frees for
another. What it leaves is found by trying. The best plans so far are changed in every way that concerns one op, or all
ops of a kind; of what comes out, the best are changed again. Good is what takes little time, where a plan that is too
large pays for what it has too much: the way from one good plan to a better one often leads over plans that do not fit.
(Best-first search; no dice are thrown, so that the same trace gets the same plan.)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from lightning_remat.planning.batch import Batch, Floats, Rows
from lightning_remat.planning.graph import Graph
from lightning_remat.planning.trace import Trace

Plan = tuple[bool, ...]

_PRICES = (0.5, 1.0, 2.0, 4.0)  # what a byte too much costs, in units of what it has cost so far to save one
_FEW = 220  # up to so many choices, each is tried in each plan
_WIDTH = 64  # plans that are changed at a time
_BROAD = 3000  # changes that are tried at a time, about
_EVENTS = 48_000_000  # and no more than this, times events
_STALE = 20  # times in a row without anything better, after which the search ends
_STORED = 20_000_000  # entries of plans that are remembered
_WEIGHT = 800  # plans whose simulation takes as long as that of none: most of it does not depend on their number


class Polish:
    """Improves plans of one trace.

    Args:
        trace: the step.
        graph: its dependencies.
    """

    def __init__(self, trace: Trace, graph: Graph) -> None:
        self.trace = trace
        self.batch = Batch(trace)
        self.plain = int(self.batch.run(np.zeros((len(trace.ops), 1), dtype=bool), 0).peak[0])
        self.choices = np.asarray([o for o, droppable in enumerate(graph.droppable) if droppable], dtype=np.int64)
        # What is written in place can be dropped only together with what was there before.
        self.under: dict[int, list[int]] = {}
        self.over: dict[int, list[int]] = {}
        for o in self.choices.tolist():
            old = graph.overwrites[o]
            if old >= 0:
                self.under[o] = [old, *self.under.get(old, [])]
                for below in self.under[o]:
                    self.over.setdefault(below, []).append(o)
        self.kinds = self._kinds(graph) if len(self.choices) > _FEW else []
        # Numbers of which each plan has a sum of its own, to know it by.
        self.marks = np.random.default_rng(0).integers(-(2**62), 2**62, len(trace.ops))

    def _kinds(self, graph: Graph) -> list[np.ndarray]:
        """Choices by what they do, to what, and how large: in a model of equal layers there are few kinds."""
        found: dict[object, list[int]] = {}
        for o in self.choices.tolist():
            distances = tuple(sorted(o - u for u in graph.reads[o]))
            found.setdefault((self.trace.ops[o].name, graph.nbytes[o], distances), []).append(o)
        return [np.asarray(ops) for ops in found.values()]

    def within(self, seeds: Sequence[Plan], budget: int, work: float) -> Plan | None:
        """The fastest plan that fits, found from some that may or may not; None if none was found.

        Args:
            seeds: plans to begin with.
            budget: bytes.
            work: simulations of one plan that it may take, about.
        """
        return self._search(seeds, budget, work, first=False)

    def fitting(self, seeds: Sequence[Plan], budget: int, work: float) -> Plan | None:
        """Any plan that fits, found from some that do not; None if none was found."""
        return self._search(seeds, budget, work, first=True)

    def _search(self, seeds: Sequence[Plan], budget: int, work: float, first: bool) -> Plan | None:
        if not len(self.choices):
            return None
        pool = _Pool(self, budget)
        pool.add(self._consistent(np.asarray(seeds, dtype=bool)))
        best = pool.best()
        stale = 0
        while not (first and best < np.inf) and stale < _STALE:
            chosen = pool.next(first)
            if not len(chosen):
                break
            pool.add(self._changed(pool.plans[chosen]))
            now = pool.best()
            stale = 0 if now < best * (1 - 1e-9) or (now == np.inf and pool.nearer()) else stale + 1
            best = now
            if pool.spent > work:
                break
        return pool.fastest()

    def _consistent(self, plans: Rows) -> Rows:
        for o in self.under:
            plans[:, o] &= plans[:, self.under[o][0]]
        return plans

    # ------------------------------------------------------------------ changes

    def _changed(self, plans: Rows) -> Rows:
        """All changes of each plan."""
        if not self.kinds:
            return np.concatenate([self._turned(plan, self.choices) for plan in plans])
        found = []
        for plan in plans:
            single = []
            for kind in self.kinds:
                dropped = plan[kind]
                for ops in (kind[dropped], kind[~dropped]):
                    if len(ops):
                        # Of many that are alike, some.
                        single.append(ops[np.unique(np.asarray([0, len(ops) // 2, len(ops) - 1]))])
            found.append(self._turned(plan, np.concatenate(single)))
            found.append(self._together(plan))
        return np.concatenate(found)

    def _turned(self, plan: Rows, ops: np.ndarray) -> Rows:
        """The plan with each of the ops turned over."""
        found = np.repeat(plan[None, :], len(ops), axis=0)
        found[np.arange(len(ops)), ops] ^= True
        if self.under:
            for i, o in enumerate(ops.tolist()):
                self._mend(found[i], o)
        return found

    def _mend(self, plan: Rows, o: int) -> None:
        if plan[o]:
            for other in self.under.get(o, ()):
                plan[other] = True
        else:
            for other in self.over.get(o, ()):
                plan[other] = False

    def _together(self, plan: Rows) -> Rows:
        """The plan with all ops of a kind dropped or kept, or the first or the last half of those that are not yet."""
        found = []
        for kind in self.kinds:
            for drop in (True, False):
                ops = kind[plan[kind] != drop]
                if len(ops) < 2:
                    continue
                half = len(ops) // 2
                for part in (ops, ops[:half], ops[half:]):
                    changed = plan.copy()
                    changed[part] = drop
                    if self.under:
                        for o in part.tolist():
                            self._mend(changed, o)
                    found.append(changed)
        return np.asarray(found, dtype=bool).reshape(-1, len(plan))


class _Pool:
    """Plans that were judged, and which of them have been changed already."""

    def __init__(self, polish: Polish, budget: int) -> None:
        self.polish = polish
        self.budget = budget
        count = len(polish.trace.ops)
        self.most = max(2000, _STORED // max(1, count))
        self.seen: set[int] = set()
        self.plans: Rows = np.zeros((0, count), dtype=bool)
        self.seconds: Floats = np.zeros(0)
        self.peak: np.ndarray[Any, Any] = np.zeros(0, dtype=np.int64)
        self.excess: Floats = np.zeros(0)
        self.changed: Rows = np.zeros(0, dtype=bool)
        self.spent = 0.0
        self.least = np.inf
        moves = len(polish.choices) if not polish.kinds else 10 * len(polish.kinds)
        broad = min(_BROAD, _EVENTS // max(1, len(polish.trace.events)))
        self.width = max(1, min(_WIDTH, broad // moves))
        self.saved = max(1, polish.plain - budget)

    def add(self, plans: Rows) -> None:
        """Judge those that are new."""
        marks = (plans * self.polish.marks).sum(axis=1).tolist()
        new = []
        for i, mark in enumerate(marks):
            if mark not in self.seen:
                self.seen.add(mark)
                new.append(i)
        if not new:
            return
        plans = plans[new]
        found = self.polish.batch.run(np.ascontiguousarray(plans.T), self.budget)
        self.spent += 12 * (1 + len(new) / _WEIGHT)
        self.plans = np.concatenate((self.plans, plans))
        self.seconds = np.concatenate((self.seconds, found.seconds))
        self.peak = np.concatenate((self.peak, found.peak))
        self.excess = np.concatenate((self.excess, found.excess))
        self.changed = np.concatenate((self.changed, np.zeros(len(new), dtype=bool)))

    def best(self) -> float:
        """Time of the fastest plan that fits."""
        return float(self.seconds.min(where=self.peak <= self.budget, initial=np.inf))

    def fastest(self) -> Plan | None:
        """The plan itself; of several, the smallest."""
        fit = np.flatnonzero(self.peak <= self.budget)
        if not len(fit):
            return None
        fit = fit[np.lexsort((self.peak[fit], self.seconds[fit]))]
        return tuple(self.plans[fit[0]].tolist())

    def nearer(self) -> bool:
        """Whether, while none fits, some plan comes nearer to it than any before."""
        least = float(self.excess.min())
        nearer, self.least = least < self.least, min(least, self.least)
        return nearer

    def next(self, first: bool) -> np.ndarray:
        """The most promising plans that have not been changed yet, a few for each price of a byte."""
        over = np.maximum(0, self.peak - self.budget)
        best = self.best()
        if first or best == np.inf:
            orders = [self.excess, over.astype(np.float64)]
        else:
            orders = [self.seconds + price * best / self.saved * over for price in _PRICES[: self.width]]
        chosen: list[int] = []
        for cost in orders:
            chosen += self._cheapest(np.where(self.changed, np.inf, cost), max(1, self.width // len(orders)))
        if len(self.seconds) > self.most:
            self._forget(orders[-1], chosen)
            chosen = list(range(len(chosen)))
        return np.asarray(chosen, dtype=np.int64)

    def _cheapest(self, cost: Floats, count: int) -> list[int]:
        some = min(20 * count, len(cost) - 1)
        near = np.argpartition(cost, some)[: some + 1]
        found: list[int] = []
        met = set()
        for i in near[np.lexsort((near, cost[near]))].tolist():
            if cost[i] == np.inf or len(found) == count:
                break
            # Plans that come to the same are mostly the same, but for where in a row of equal layers.
            same = round(float(self.seconds[i]), 10), int(self.peak[i])
            if same not in met:
                met.add(same)
                found.append(i)
                self.changed[i] = True
        return found

    def _forget(self, cost: Floats, chosen: list[int]) -> None:
        """Keep the better half; those that were chosen come first."""
        cost = np.where(self.changed, np.inf, cost)
        cost[self.peak <= self.budget] = np.minimum(cost, self.seconds)[self.peak <= self.budget]
        cost[chosen] = -1.0
        order = np.lexsort((np.arange(len(cost)), cost))[: self.most // 2]
        rest = order[~np.isin(order, chosen)]
        kept = np.concatenate((np.asarray(chosen, dtype=np.int64), rest))
        self.plans, self.seconds, self.peak = self.plans[kept], self.seconds[kept], self.peak[kept]
        self.excess, self.changed = self.excess[kept], self.changed[kept]
