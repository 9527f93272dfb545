"""The planner: a budget in, the plan with the least extra time out.

Candidates come from :class:`~lightning_remat.planning.search.Search`; each is judged by the simulator, which knows the
whole step, and then polished: see :class:`~lightning_remat.planning.polish.Polish`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from math import inf

from lightning_remat.errors import BudgetError
from lightning_remat.planning.offloading import Offloading
from lightning_remat.planning.plan import Candidate, PlanResult, judged
from lightning_remat.planning.polish import Polish
from lightning_remat.planning.pricing import Pricing
from lightning_remat.planning.search import Search
from lightning_remat.planning.segments import layout_of
from lightning_remat.planning.simulation import simulate
from lightning_remat.planning.trace import OTHER, Trace
from lightning_remat.planning.transfer import Transfer
from lightning_remat.sizes import format_bytes

_WORK = 700_000  # events to simulate in polishing: little beside what a plan is used for
_SEEDS = 64  # plans from which polishing begins
_LARGE = 500  # simulations; if there are fewer, the trace is large
_AROUND_LARGE = (0.97, 1.03)
_REFINED = (0.6, 0.3, 0.3)  # of the work for one budget, to the most promising choice of what is in flight, and so on
_LARGER = 8  # plans for larger budgets, to which moves are added
_AROUND = (0.9, 0.94, 0.97, 1.0, 1.03, 1.06, 1.1)  # budgets for these, to the budget that was asked for


class Planner:
    """Everything that can be said about one trace; asked for as many budgets as one likes.

    Args:
        trace: the step.
        transfer: what is known of the place that contents may move to; None: nothing moves.
        recompute: whether anything may be dropped; if not, plans only keep and move.

    Attributes:
        tried: all plans without moves that were simulated.
    """

    def __init__(self, trace: Trace, transfer: Transfer | None = None, *, recompute: bool = True) -> None:
        self.trace = trace
        self.transfer = transfer
        self.recompute = recompute
        self.plain = judged(trace, [False] * len(trace.ops))
        # In plans to simulate and in minimum cuts: little beside what a plan is used for, and a lot on small traces.
        events = max(1, len(trace.events))
        self._work = _WORK / events
        self._rounds = max(6, min(30, 60_000 // events))
        self._bisected = self._sought = self._moves_sought = False
        layout = self.search.layout if recompute else layout_of(trace)
        self._pricing = Pricing(layout, self.judge)
        self._polish = Polish(trace, layout.graph)
        self.tried: dict[tuple[bool, ...], Candidate] = {self.plain.drop: self.plain}
        # One for each choice of what may be in flight; all share what is known without moves.
        choices = transfer.choices() if transfer is not None else []
        self._offloading = [Offloading(trace, self._pricing, self._polish, choice, recompute) for choice in choices]

    @cached_property
    def search(self) -> Search:
        """Over segments; only where something may be dropped."""
        return Search(self.trace)

    def result(
        self, budget_bytes: int, static_bytes: int = 0, static_parts: Mapping[str, int] | None = None
    ) -> PlanResult:
        """The best plan within a budget, and the front as far as it is known; :meth:`front` finds more of it.

        Args:
            budget_bytes: what a step may take, ``static_bytes`` included.
            static_bytes: what is there between steps.
            static_parts: what that consists of, for the error.

        Raises:
            BudgetError: no plan fits.
        """
        if self.recompute:
            self._rough_smallest()
        # Once the smallest peak has been looked for, nothing below it is looked for again.
        sought = self._moves_sought if self._offloading else self._sought
        hopeless = sought and budget_bytes - static_bytes < self.smallest().peak_bytes
        chosen = None if hopeless else self.within(budget_bytes - static_bytes)
        if chosen is None:
            raise self.too_small(budget_bytes, static_bytes, static_parts)
        return PlanResult(
            trace=self.trace,
            static_bytes=static_bytes,
            budget_bytes=budget_bytes,
            chosen=chosen,
            front=pareto(self._all()),
            plain=self.plain,
            transfer=self.transfer,
        )

    def too_small(self, budget: int, static: int, parts: Mapping[str, int] | None) -> BudgetError:
        """What is to be said of a budget that no plan fits; see :meth:`result`."""
        smallest = self.smallest()
        need = static + smallest.peak_bytes
        makeup = [f"{name} {format_bytes(size)}" for name, size in (parts or {"static memory": static}).items() if size]
        peak_event = simulate(self.trace, smallest.drop, False, smallest.move, smallest.transfer).peak_event
        others = sum(net for kind, _, net in self.trace.events[:peak_event] if kind == OTHER)
        kind, top, _ = self.trace.events[peak_event] if self.trace.events else (OTHER, 0, 0)
        others = max(0, others + (max(0, top) if kind == OTHER else 0))
        makeup.append(f"gradients and other memory of the step {format_bytes(others)}")
        makeup.append(f"activations and their recomputation {format_bytes(smallest.peak_bytes - others)}")
        ways = "" if self.transfer is not None else ", or let values leave with offload="
        return BudgetError(
            f"budget={format_bytes(budget)} is not feasible: the smallest peak of any plan found is "
            f"{format_bytes(need)}, {need:,} bytes ({', '.join(makeup)}; {self._largest_op()}). Raise the budget to "
            f"that, use a smaller batch or shorter sequences{ways}.",
            budget,
            need,
        )

    def _largest_op(self) -> str:
        sizes = [op.scratch + sum(self.trace.nbytes[v] for v in op.outputs) for op in self.trace.ops]
        if not sizes:
            return "no op of it can be planned, as where all is compiled"
        size, op = max(zip(sizes, self.trace.ops, strict=True), key=lambda pair: pair[0])
        where = f" in {op.module}" if op.module else ""
        # Hooks that gather parameters begin with a mark for profilers, and what they take follows on it.
        part = "part, hooks or collectives" if op.name.startswith("profiler.") else f"op, {op.name}"
        return f"the largest single {part}{where}, takes {format_bytes(size)}"

    def judge(self, drop: Sequence[bool]) -> Candidate:
        """A plan with what the simulator says about it; every plan is simulated once."""
        key = tuple(drop)
        found = self.tried.get(key)
        if found is None:
            found = self.tried[key] = judged(self.trace, key)
        return found

    def within(self, budget: int, rough: bool = False) -> Candidate | None:
        """The best plan whose peak is at most ``budget`` bytes above static memory; None if none was found.

        Args:
            budget: bytes.
            rough: take what the search finds, unpolished.
        """
        if self.plain.peak_bytes <= budget:
            return self.plain
        # Once the smallest peak of all has been looked for, nothing below it is looked for again.
        hopeless = self._moves_sought and budget < self.smallest().peak_bytes
        out_of_reach = self._moves_sought and budget < self._least_tried().peak_bytes
        best = self._without_moves(budget, rough) if self.recompute and not out_of_reach else None
        if self._offloading and not hopeless:
            self._with_moves(budget, rough)
            if best is None and all(each.best(budget) is None for each in self._offloading):
                self.smallest()
        return self._best(budget)

    def _with_moves(self, budget: int, rough: bool) -> None:
        """Try plans with moves: with several bounds for what is in flight, a little for each, and more for the best."""
        known = self._around(budget)
        if len(self._offloading) == 1:
            self._offloading[0].within(budget, known, rough)
            return
        promise: list[tuple[float, float, int]] = []
        for number, each in enumerate(self._offloading):
            best = each.within(budget, known, rough=True)
            least = each.least()
            promise.append((best.extra_seconds if best else inf, least.peak_bytes if least else inf, number))
        for share, (_, _, number) in zip(_REFINED if not rough else (), sorted(promise), strict=False):
            best_of_all = self._best(budget)
            if best_of_all is not None and not best_of_all.extra_seconds:
                break
            chosen = self._offloading[number]
            others = [each.best(budget) or each.least() for each in self._offloading if each is not chosen]
            chosen.refine(budget, known, [c for c in others if c is not None], share)

    def _around(self, budget: int) -> list[Candidate]:
        """Plans without moves for this and larger budgets: what moves may be added to."""
        found = dict(self.tried)
        for i in range(1, _LARGER) if self.recompute else ():
            drop = self.search.best(budget + (self.plain.peak_bytes - budget) * i / _LARGER)
            if drop is not None and tuple(drop) not in found:
                # Not among what was tried: what is found without moves depends on no transfer.
                found[tuple(drop)] = judged(self.trace, drop)
        return list(found.values())

    def _without_moves(self, budget: int, rough: bool) -> Candidate | None:
        best = self._best_tried(budget)
        target = float(budget)
        for _ in range(2 if rough else 4):
            drop = self.search.best(target)
            if drop is None:
                break
            found = self.judge(drop)
            if found.peak_bytes <= budget and (best is None or found.extra_seconds < best.extra_seconds):
                best = found
            slack = budget - found.peak_bytes
            if abs(slack) <= budget * 0.004:
                break
            # The search does not see everything that the simulator does: aim lower, or higher.
            target += slack if slack < 0 else slack / 2
        if rough:
            return best
        priced = self._pricing.search(budget, self._rounds)
        if priced is not None and (best is None or priced.extra_seconds < best.extra_seconds):
            best = priced
        seeds = self._seeds(budget)
        polished = self._polish.within(seeds, budget, self._work)
        if polished is None and best is None:
            polished = self._polish.fitting([self._smallest_without_moves().drop, *seeds], budget, self._work)
        if polished is not None:
            self.judge(polished)
        return self._best_tried(budget)

    def _seeds(self, budget: int) -> list[tuple[bool, ...]]:
        """Plans from which to polish: those that are nearly as good as the best one, or a little too large."""
        for share in _AROUND if self._work > _LARGE else _AROUND_LARGE:
            drop = self.search.best(share * budget)
            if drop is not None:
                self.judge(drop)

        def worth(c: Candidate) -> tuple[float, float]:
            return c.extra_seconds * max(1.0, c.peak_bytes / budget) ** 4, c.peak_bytes

        # Of plans that come to the same, one.
        alike = {(c.extra_seconds, c.peak_bytes): c for c in self.tried.values()}
        near = sorted(alike.values(), key=worth)[: _SEEDS if self._work > _LARGE else _SEEDS // 4]
        fitting = self._best_tried(budget)
        return [c.drop for c in near] if fitting is None else [fitting.drop, *(c.drop for c in near)]

    def _best_tried(self, budget: int) -> Candidate | None:
        fitting = [c for c in self.tried.values() if c.peak_bytes <= budget]
        return min(fitting, key=lambda c: (c.extra_seconds, c.peak_bytes), default=None)

    def _all(self) -> list[Candidate]:
        return [*self.tried.values(), *(c for each in self._offloading for c in each.tried.values())]

    def _best(self, budget: int) -> Candidate | None:
        """Of all plans that fit; one without moves, if it is as good."""
        fitting = [c for c in self._all() if c.peak_bytes <= budget]
        return min(fitting, key=lambda c: (c.extra_seconds, c.moved_bytes, c.peak_bytes), default=None)

    def smallest(self) -> Candidate:
        """The plan with the smallest peak that was found."""
        if self.recompute:
            self._smallest_without_moves()
        if self._offloading and not self._moves_sought:
            self._moves_sought = True
            self._offloading[-1].smallest(list(self.tried.values()))  # the less in flight, the smaller
        return min(self._all(), key=lambda c: (c.peak_bytes, c.extra_seconds))

    def _smallest_without_moves(self) -> Candidate:
        if not self._sought:
            self._sought = True
            least = self._rough_smallest()
            for share in (0.97, 0.99, 0.995):
                while least.peak_bytes:
                    drop = self._polish.fitting(self._least(_SEEDS), int(least.peak_bytes * share), self._work)
                    if drop is None:
                        break
                    least = self.judge(drop)
        return self._least_tried()

    def _rough_smallest(self) -> Candidate:
        """The same as far as the search over segments goes."""
        if not self._bisected:
            self._bisected = True
            low, high = 0.0, float(self.plain.peak_bytes)
            for _ in range(7):
                middle = (low + high) / 2
                drop = self.search.best(middle)
                if drop is None:
                    low = middle
                else:
                    high = min(middle, float(self.judge(drop).peak_bytes))
        return self._least_tried()

    def _least_tried(self) -> Candidate:
        return min(self.tried.values(), key=lambda c: (c.peak_bytes, c.extra_seconds))

    def _least(self, count: int) -> list[tuple[bool, ...]]:
        return [c.drop for c in sorted(self.tried.values(), key=lambda c: (c.peak_bytes, c.extra_seconds))[:count]]

    def front(self, count: int = 10) -> tuple[Candidate, ...]:
        """Candidates of which none is better than another in both respects, by rising peak."""
        smallest = self.smallest().peak_bytes
        for i in range(1, count):
            self.within(smallest + (self.plain.peak_bytes - smallest) * i // count, rough=True)
        return pareto(self._all())


def pareto(candidates: Iterable[Candidate]) -> tuple[Candidate, ...]:
    """Those that no other one beats in both peak and time, by rising peak."""
    found: list[Candidate] = []
    for candidate in sorted(candidates, key=lambda c: (c.peak_bytes, c.extra_seconds)):
        if not found or candidate.extra_seconds < found[-1].extra_seconds:
            found.append(candidate)
    return tuple(found)


def plan(trace: Trace, budget_bytes: int, static_bytes: int = 0, transfer: Transfer | None = None) -> PlanResult:
    """The plan with the least extra time whose simulated peak is within a budget.

    Args:
        trace: the step.
        budget_bytes: what a step may take, ``static_bytes`` included.
        static_bytes: what is there between steps.
        transfer: what is known of the place that contents may move to; None: nothing moves.

    Raises:
        BudgetError: no plan fits, with the smallest peak that one has and what makes it up.
    """
    return Planner(trace, transfer).result(budget_bytes, static_bytes)
