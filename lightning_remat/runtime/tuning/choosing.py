"""Under a budget: which plan each kind of step gets, and what its measured peak does to that.

Usually a prediction holds, and the plan for the budget is the plan; where it does not, a
:class:`~lightning_remat.runtime.tuning.tuner.Tuner` for each kind of step finds another. A trial is a real training
step.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

import torch

from lightning_remat.errors import BudgetError
from lightning_remat.planning.plan import Candidate, PlanResult, judged
from lightning_remat.planning.planner import pareto
from lightning_remat.planning.simulation import simulate
from lightning_remat.planning.trace import NEED, Trace
from lightning_remat.planning.transfer import Transfer
from lightning_remat.runtime.counters import Counters
from lightning_remat.runtime.measuring import Measurement
from lightning_remat.runtime.room import default_budget
from lightning_remat.runtime.saying import Once, in_words
from lightning_remat.runtime.tuning.known import Known
from lightning_remat.sizes import device_memory, format_bytes, parse_margin

log = logging.getLogger("lightning_remat")

CLOSE = 1.002
"""A peak that is missed by a smaller factor is met."""

OFTEN = 3
"""How often a shape comes up for which a search is worth its time."""

_LESS, _MORE = 1.02, 1.25  # factors by which the device may differ from what it had in a run that is resumed
_EVERY = 8  # steps between two measurements of a plan that is smaller than it might be


class Chooser:
    """Makes plans, and corrects them.

    Args:
        budget: bytes, or (float) a share of the device's memory, or None: what the device has.
        margin: what that leaves free, as users write it.
        counters: where budget, peak and decisions are written.
        warn: for what users are told.

    Attributes:
        error: a fault that makes planning impossible.
        transfer: says for a trace what is known of the place that its contents may move to; None: nothing moves.
        recompute: whether a plan may drop anything.
        wishes: for each entry, by its number, the plan that this process would follow by itself.
        shared: for a sequence of ops, by its names, what the plan drops that all processes follow (see
            ``integrations/sharing.py``).
        more_to_try: whether, where no plan fits, something else is tried before users are told.
    """

    def __init__(self, budget: int | float | None, margin: int | str, counters: Counters, warn: Once) -> None:
        self.budget = budget
        self.counters = counters
        self.error: Exception | None = None
        self._margin = margin
        parse_margin(margin)  # so that it is refused before the first step
        self._warn = warn
        self._default: int | None = None
        self._frozen = False
        self.transfer: Callable[[Trace], Transfer | None] | None = None
        self.more_to_try: Callable[[], bool] = lambda: False
        self.recompute = True
        self.wishes: dict[int, Candidate] = {}
        self.shared: dict[str, tuple[bool, ...]] = {}

    def tell(self, topic: str, text: str) -> None:
        """Tell the user, unless something else is still to be tried."""
        if not self.more_to_try():
            self._warn(topic, text)

    def note(self, text: str) -> None:
        """Write a decision down."""
        self.counters.note(text)

    def bytes_on(self, device: torch.device, static: int) -> int:
        """The budget in bytes; the default one is taken anew until a plan was measured to fit."""
        if self.budget is None:
            if self._default is None or not self._frozen:
                self._default = self._of_the_device(device, static)
            found = self._default
        else:
            found = self.budget if isinstance(self.budget, int) else int(self.budget * device_memory(device))
        self.counters.budget_bytes = found
        return found

    @property
    def settled_default(self) -> int | None:
        """The budget where none is given, once a plan was measured to fit into it."""
        return self._default if self.budget is None and self._frozen else None

    def resume(self, default: int | None, device: torch.device, static: int) -> int:
        """The budget in bytes, where another run had settled for a ``default``: the same, if the device is about it."""
        found = self.bytes_on(device, static)
        if self.budget is None and default is not None and default / _LESS <= found <= default * _MORE:
            self._default, self._frozen = default, True
            found = self.counters.budget_bytes = default
        return found

    def _of_the_device(self, device: torch.device, static: int) -> int:
        found = default_budget(static, device, self._margin)
        if found is None:
            # What others use is not known here, so that this is the most it can be.
            margin = parse_margin(self._margin)
            total = device_memory(device)
            found = total - (margin if isinstance(margin, int) else int(margin * total))
        return max(1, found)

    @property
    def text(self) -> str:
        """The budget in words."""
        if self.budget is None:
            return "what the device has" if self._default is None else format_bytes(self._default)
        return format_bytes(self.budget) if isinstance(self.budget, int) else f"{self.budget:.0%} of the device"

    # ------------------------------------------------------------------ plans

    def moved(self, known: Known, static: int) -> bool:
        """Whether the memory between steps is another than a plan was made for."""
        budget = known.result.budget_bytes if known.result is not None else 0
        return abs(static - known.static) > (CLOSE - 1) * budget

    def place_changed(self, known: Known) -> bool:
        """Whether the place that a plan moves contents to is no longer what it was taken for."""
        transfer = known.result.transfer if known.result is not None else None
        return transfer is not None and self.transfer is not None and self.transfer(known.trace) != known.transfer

    def plan(self, known: Known, static: int, parts: dict[str, int], budget: int) -> None:
        """Put a plan into force that is within the budget, as far as is known; sets :attr:`error` if that fails."""
        tuner = known.tuner
        tuner.fit_to(budget - static)
        result: PlanResult | None = None
        try:
            while True:
                target = tuner.target
                if result is not None:
                    # One search is enough: it has left a family of plans to go on among.
                    result = _another(result, target)
                else:
                    result = known.quick_plan(static + target, static) if known.met < OFTEN else None
                    result = result or self._searched(known, target, static, parts, budget)
                if tuner.settled or not tuner.seen(result.chosen.peak_bytes):
                    break
                tuner.again(target, result.chosen.peak_bytes)
        except (ArithmeticError, LookupError, TypeError, ValueError) as error:
            # A fault of ours, and no reason to lose somebody's training.
            self.error = error
            return
        result = self._together(known, result.with_budget(budget))
        known.follow(result, static, parts, target)
        text = in_words(result)
        log.info(text)
        self.note(f"{text} ({tuner.why})" if tuner.why else text)

    def _together(self, known: Known, result: PlanResult) -> PlanResult:
        """The plan that is followed: this one, or that of all processes."""
        self.wishes[known.number] = result.chosen
        shared = self.shared.get(known.names)
        if shared is None or shared == result.chosen.drop:
            return result
        return replace(result, chosen=judged(known.trace, shared))

    def share(self, known: Known) -> None:
        """Follow from now on what :attr:`shared` says."""
        wish = self.wishes.get(known.number)
        if known.result is None or wish is None:
            return
        result = self._together(known, replace(known.result, chosen=wish))
        if result.chosen.drop != known.result.chosen.drop:
            known.follow(result, known.static, known.parts, known.target)
            self.note(in_words(result))

    def _searched(self, known: Known, target: int, static: int, parts: dict[str, int], budget: int) -> PlanResult:
        planner = known.planner = known.planner or known.new_planner()
        if self.transfer is not None and planner.plain.peak_bytes > target:
            # Only now, since nobody's disk is measured for nothing.
            known.moves_to(self.transfer(known.trace), self.recompute)
            if known.planner is not planner:
                planner = known.planner = known.new_planner()
        try:
            return planner.result(static + target, static, parts)
        except BudgetError as error:
            # Said of the user's own budget only, and not where measured peaks have moved the target.
            if static + target >= budget or error.smallest_bytes > budget:
                said = planner.too_small(budget, static, parts)  # the target may be another one by now
                self.tell("budget", f"{said} Training goes on under the plan with the smallest peak.")
            found = planner.result(static + planner.plain.peak_bytes, static)
            return replace(found, chosen=found.smallest)

    # ------------------------------------------------------------------ what was measured

    def due(self, known: Known, step: int) -> bool:
        """Whether the step is to be measured although its plan was: memory was short, and may no longer be."""
        return known.tuner.hard_pressed and not known.stale and step % _EVERY == 0

    def compare(self, known: Known, measuring: Measurement) -> None:
        """Hold a plan to its prediction."""
        result = known.result
        if result is None or known.stale or not measuring.complete:
            return
        known.tries = 0
        measured = known.measured = measuring.result()
        self.counters.peak_bytes = known.static + measured.peak_bytes
        tuner, chosen = known.tuner, result.chosen
        tuner.fit_to(result.budget_bytes - known.static)
        peak = measured.peak_bytes
        if known.names in self.shared:
            # Nobody looks for a larger one, which the others might not be able to follow.
            if peak > max(tuner.limit, CLOSE * chosen.peak_bytes):
                tuner.pressure(peak - tuner.limit, chosen.peak_bytes, peak)
                known.stale = True
                self.note(f"a step took {format_bytes(peak - tuner.room)} more than there is: a smaller plan is needed")
            return
        if abs(peak - chosen.peak_bytes) <= (CLOSE - 1) * chosen.peak_bytes:
            peak = chosen.peak_bytes
        if tuner.settled and tuner.seen(chosen.peak_bytes):
            if peak > tuner.room:
                tuner.pressure(peak - tuner.room, chosen.peak_bytes, peak)
                self.note(f"a step took {format_bytes(peak - tuner.room)} more than planned: the next plan is smaller")
            elif tuner.slack(peak):
                self.note("memory was left over for several steps: larger plans are tried again")
        else:
            least = chosen.peak_bytes <= result.smallest.peak_bytes
            tuner.learn(known.target, chosen.peak_bytes, peak, least, most=known.keeps_all)
            if tuner.settled:
                self.note(f"measured peak {format_bytes(known.static + peak)}. {tuner.why}")
                if tuner.best is None and tuner.reserve:
                    self._warn(
                        "short",
                        "memory runs out although the plan with the smallest peak is followed, which took "
                        f"{format_bytes(known.static + peak)} of a budget of {format_bytes(result.budget_bytes)}: "
                        "somebody else takes what there is. Training goes on under that plan.",
                    )
                elif tuner.best is None:
                    self.tell(
                        "budget",
                        f"budget={format_bytes(result.budget_bytes)} is not feasible: no plan was measured to fit, and "
                        f"the one with the smallest peak took {format_bytes(known.static + peak)}. Training goes on "
                        "under that.",
                    )
        best = tuner.best
        if not tuner.settled or (best is not None and best.predicted != chosen.peak_bytes):
            known.stale = True
        elif best is not None:
            self._frozen = True

    def pressure(self, known: Known, missing: int | None, device: torch.device | None) -> None:
        """A step under its plan ran out of memory, or came close to that."""
        if known.result is None:
            return
        tuner, chosen = known.tuner, known.result.chosen
        tuner.fit_to(known.result.budget_bytes - known.static)
        measured = known.measured.peak_bytes if known.measured is not None and not known.stale else None
        tuner.pressure(missing, chosen.peak_bytes, measured)
        known.stale = True
        if self.budget is None and self._default is not None and device is not None:
            # Others may have taken memory meanwhile. What they took is not to be counted twice.
            now = self._of_the_device(device, known.static)
            if now < self._default:
                tuner.reserve = max(0, tuner.reserve - (self._default - now))
                self._default = now
        self.note(f"memory ran short under a plan of {format_bytes(chosen.peak_bytes)}: the next one is smaller")


def kept_bytes(known: Known) -> int:
    """What there is when backward begins, under the plan in force, by the simulator."""
    if known.result is None:
        return 0
    turn = next((i for i, event in enumerate(known.trace.events) if event[0] == NEED), len(known.trace.events))
    chosen = known.result.chosen
    levels = simulate(known.trace, chosen.drop, True, chosen.move, known.result.transfer).levels
    return levels[turn - 1] if turn and levels else 0


def whole_result(known: Known | None) -> PlanResult | None:
    """A plan with the whole front, which takes a while to find; None before there is one."""
    if known is None or known.result is None:
        return None
    if known.planner is not None:
        known.result = replace(known.result, front=pareto([*known.planner.front(), known.result.chosen]))
    return known.result


def _another(result: PlanResult, target: int) -> PlanResult:
    """Of the plans that were found, the one with the least extra time of at most ``target`` bytes, or the smallest."""
    fitting = [c for c in result.front if c.peak_bytes <= target]
    return replace(result, chosen=min(fitting, key=lambda c: c.extra_seconds, default=result.smallest))
