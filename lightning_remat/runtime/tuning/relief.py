"""What a pilot does where no plan is the answer: for steps that need no tape, and steps that ran out of memory.

A step rests, which costs what a plain one does, if everything can be kept and it is no larger than those that were seen
to fit. After memory ran out, the same step is tried with less and less: first under the plan with the smallest peak,
then under a fixed policy, without counting anything.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from typing import Any
from weakref import WeakSet

import torch
from torch import nn

from lightning_remat.engine.planned import PlannedTape
from lightning_remat.engine.policies import OFFLOAD_ONLY, Policy
from lightning_remat.runtime.counters import Counters
from lightning_remat.runtime.measuring import Measurement
from lightning_remat.runtime.memory import ProfilerBusy
from lightning_remat.runtime.saying import Once
from lightning_remat.runtime.static import Optimizers, device_of, has_gradients, static_parts
from lightning_remat.runtime.tuning.choosing import Chooser
from lightning_remat.runtime.tuning.fallback import Fallback
from lightning_remat.runtime.tuning.known import Known, KnownSteps
from lightning_remat.runtime.tuning.resting import Covered, Look, look
from lightning_remat.sizes import format_bytes

LEAN_PLAN, FIXED = 1, 2
"""What comes after a step that ran out of memory: the smallest plan, or a policy without one."""

_SHORT = 2  # how often memory may run out in a lean step until no more plans are made
_SPARE = 2  # how many times the largest step has to fit for the tape to go where batches cannot be seen


class Relief(ABC):
    """The state of this, and what a pilot shares with it.

    Attributes:
        known: everything that is known of steps.
        given_up: no plan can be followed; a fixed policy has to do.
        off: the coming step (or the one that runs) needs no tape.
        chooser: makes the plans.
        recompute: whether anything may be computed again.
        fallback: chooses the policy of steps without one.
        counters: where figures and decisions are written.
    """

    tape: PlannedTape
    optimizers: Optimizers

    def __init__(self, budget: int | float | None, margin: int | str, counters: Counters, warn: Once) -> None:
        self.counters = counters
        self.chooser = Chooser(budget, margin, counters, warn)
        self.fallback = Fallback(self.chooser.note, lean=budget is not None)
        self.known = KnownSteps()
        self.given_up = False
        self.off = False
        self._roots: WeakSet[nn.Module] = WeakSet()  # of all steps, as long as they live
        self._measuring: Measurement | None = None
        self._step = 0
        self._to_trace = 0  # steps
        self._trace_at = -1  # a step in which one is expected that nobody knows
        self._pause = 0  # steps until the next one is traced
        self._how = ""  # the step that runs, or ran last: "traced", by "plan" or "lean" plan, "policy", "rest"
        self._failed = False
        self._last: Known | None = None  # the entry that step went by
        self._tight = 0  # how much less than usual the coming step has to need: LEAN_PLAN, FIXED
        self._short = {"lean": 0, "traced": 0}  # how often memory ran out in such steps
        self._missing = 0  # bytes, in this step
        self._looked = False  # batches are shown to us
        self._batch: Look | None = None
        self._begun_with: Look | None = None
        self._covered = Covered()
        self._moves_for_good = False  # no fixed policy fits without that
        self.recompute = True

    @property
    def main(self) -> Known | None:
        """Of the steps that there are plans for, the largest: it decides whether training fits."""
        return self.known.largest

    def policy(self, has_blocks: bool) -> Policy:
        """The policy for a step that there was no tape for."""
        if not self.recompute:
            return OFFLOAD_ONLY
        return self.fallback.policy(has_blocks, tightest=self._tight == FIXED)

    @property
    def moves_all(self) -> bool:
        """Whether a step without a tape of ours is to move all that its policy keeps, if anything may move."""
        return self._tight == FIXED or self._moves_for_good or not self.recompute

    @abstractmethod
    def _conclude(self) -> None:
        """Draw from the last step what there is to learn."""

    @abstractmethod
    def _abandon(self) -> None:
        """Nothing is to be learned from the step."""

    @abstractmethod
    def _give_up(self, topic: str, reason: str, device: torch.device | None = None) -> None:
        """No more plans."""

    # ------------------------------------------------------------------ steps without a tape

    def look_at(self, batch: Any) -> None:
        """The batch of the coming step."""
        self._looked, self._batch = True, look(batch)

    def resting(self, guarded: bool = False) -> bool:
        """Whether the coming step needs no tape: everything is kept and fits, and it is no larger than those before.

        Args:
            guarded: somebody catches out-of-memory errors and runs the step again.
        """
        self._conclude()
        self.fallback.guarded = guarded
        before, self.off = self.off, self._may_rest()
        if self.off:
            self._how = "rest"
            if not before:
                self.chooser.note("everything can be kept: steps run without the tape")
        return self.off

    def _may_rest(self) -> bool:
        alive = list(self._roots)
        if self._tight or not alive:
            return False
        if self.given_up:
            return self.fallback.rests
        if self._to_trace or self._trace_at > self._step or self.optimizers.watching:
            return False
        planned = [known for known in self.known.all if known.result is not None]
        accumulating = has_gradients(alive)
        root, main = self.known.roots.get(accumulating), self.main
        if root is None or main is None or main.result is None or not all(known.rests for known in planned):
            return False
        if self._looked:
            return self._batch is not None and self._covered.covers(accumulating, self._batch)
        if self.chooser.budget is not None or not root.rests:
            return False
        # Nobody says what comes next. With room to spare, the tape is not worth its time.
        spare = 1 if self.fallback.guarded else _SPARE
        return main.static + spare * main.result.plain.peak_bytes <= main.result.budget_bytes

    def _watch_policy(self, roots: Sequence[nn.Module]) -> None:
        if self.fallback.to_measure:
            with suppress(ProfilerBusy):
                self._measuring = Measurement(device_of(roots))

    def _policy_went_well(self, measuring: Measurement | None) -> None:
        if not self.fallback.for_good:
            return
        peak, room = None, 0
        if measuring is not None and measuring.complete:
            alive = list(self._roots)
            device = device_of(alive)
            static = sum(static_parts(alive, self.optimizers.of(alive), device).values())
            peak, room = measuring.result().peak_bytes, self.chooser.bytes_on(device, static) - static
            self.counters.peak_bytes = static + peak
        self.fallback.went_well(peak, room)

    # ------------------------------------------------------------------ memory runs short

    def pressure(self, missing: int) -> None:
        """Memory ran short in this step, by so many bytes, and that was got over: the next plan is to need less."""
        self._missing += missing

    def undone(self) -> None:
        """The step was undone for another reason than memory: it is going to be run again."""
        self._abandon()
        self._how, self._failed = "", False

    def tighten(self, asked_bytes: int | None) -> str | None:
        """The step ran out of memory and was undone: see to it that the next one, the same again, needs less.

        Args:
            asked_bytes: what was asked for in vain, if that is known.

        Returns:
            What is tried next, in words; None if there is nothing that needs less.
        """
        how, tight = self._how, self._tight
        self._abandon()
        self._how, self._failed = "", False
        known = self.main if how == "rest" else self._last
        self._covered.clear()
        text: str | None = None
        if how in ("plan", "rest") and known is not None and known.result is not None:
            smallest = known.result.smallest
            unknown = how == "plan" and (self.tape.lost or bool(self.tape.seen))  # not what the plan was for
            if not unknown:
                self.chooser.pressure(known, asked_bytes, device_of(self._roots))
            if unknown or known.result.chosen.peak_bytes > smallest.peak_bytes:
                self._tight = LEAN_PLAN
                text = f"under the plan with the smallest peak, {format_bytes(known.static + smallest.peak_bytes)}"
        elif how == "policy" or not how:
            text = None if tight == FIXED else self.fallback.failed()
            if text is None and not self.moves_all and self.chooser.transfer is not None:
                self._moves_for_good = True
                text = "under the same policy, with what it keeps moved off the device"
            if text is None:
                return None
        if text is None:
            self._tight = FIXED
            text = "under a fixed policy that keeps what enters the model's blocks"
            if how != "policy":
                self._ran_short("traced" if how == "traced" else "lean")
        self.chooser.note(f"out of memory: the step is to run again {text}")
        return text

    def _ran_short(self, how: str) -> None:
        """Not even a lean step fitted: it is not tried again and again."""
        self._short[how] += 1
        self._to_trace = 0
        if self._short[how] > _SHORT:
            self._give_up("memory", "memory ran out again and again where a plan needs least")
        elif how == "traced":
            self._pause = 8 ** self._short[how]
