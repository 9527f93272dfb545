"""``policy="plan.json"``: following a plan that was made and saved before."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from torch import nn

from lightning_remat.engine.ledger import Ledger
from lightning_remat.engine.planned import PlannedTape, Script, careful_script, without
from lightning_remat.engine.replay import Clock
from lightning_remat.engine.tape import Tape
from lightning_remat.planning.planfile import PlanFile
from lightning_remat.runtime.saying import warn
from lightning_remat.sizes import format_bytes

log = logging.getLogger("lightning_remat")


class FilePilot:
    """Follows one plan file; the counterpart of :class:`~lightning_remat.runtime.pilot.Pilot`.

    Args:
        path: as the user gave it.
        plan: what the file holds.
        clock: of the tape.

    Attributes:
        given_up: the plan is for another sequence of ops; a fixed policy has to do.
        ledger: none is kept.
    """

    def __init__(self, path: str, plan: PlanFile, clock: Clock) -> None:
        self.path = path
        self.plan = plan
        self.tape = PlannedTape(clock)
        self.tape.on_other_op = self._other_op
        self.tape.on_other_size = self._other_size
        self.given_up = False
        self.ledger: Ledger | None = None
        names, sizes = self.plan.names, self.plan.elements
        self._script: Script = list(zip(names, map(int, self.plan.drop), sizes, strict=True))
        self._lean: Script = list(zip(names, map(int, self.plan.lean), sizes, strict=True))
        self._larger = False
        self._fits = False  # a step was as planned, from beginning to end
        self._said: set[str] = set()

    @property
    def sentence(self) -> str:
        """The plan, in words."""
        plan = self.plan
        return (
            f"plan {self.path}: predicted peak {format_bytes(plan.peak_bytes)} for the step it was made from, "
            f"{sum(plan.drop)} of {len(plan.names)} ops run again"
        )

    def begin(self, roots: Sequence[nn.Module], has_borders: bool) -> Tape | None:
        """The tape for the coming step; None if a fixed policy has to do for it."""
        if self.given_up:
            return None
        self._larger = False
        self.tape.start(self._script)
        return self.tape

    def step_over(self, failed: bool) -> None:
        """The step was left."""
        count, position = len(self.plan.names), self.tape.position
        if failed or self.given_up or self.tape.lost or not position:
            return  # nothing has run, or all has been said
        if position == count:
            self._fits = True
        elif not self._fits:
            # It does no harm, and such a step may be one that was left early.
            self._say("short", f"a step ended after {position} ops, and the plan has {count}.")

    def close(self) -> None:
        """Nothing runs between steps."""

    def meet(self, roots: Sequence[nn.Module]) -> None:
        """The plan is the plan, whatever the model."""

    def tighten(self, asked: int | None) -> str | None:
        return None

    def never_drop(self, op: str) -> None:
        """Keep the results of an op from now on."""
        self.tape.never_drop(op)
        self._script, self._lean = without(self._script, self.tape.kept), without(self._lean, self.tape.kept)

    def _other_op(self, position: int, name: str) -> Script | None:
        if position >= len(self.plan.names):
            self._mismatch(f"the step runs {name} after the plan's {position} ops")
        else:
            where = f" in {self.plan.modules[position]}" if self.plan.modules[position] else ""
            self._mismatch(f"op {position} is {name}, and in the plan {self.plan.names[position]}{where}")
        return None

    def _other_size(self, position: int, size: int) -> Script | None:
        if size <= self.plan.elements[position] and not self._larger:
            return careful_script(self._script)
        if "larger" not in self._said:
            self._said.add("larger")
            log.info("%s: op %d has %d elements; the plan is for %d. Steps that are larger than planned run lean.",
                     self.path, position, size, self.plan.elements[position])  # fmt: skip
        self._larger = True
        return careful_script(self._lean, growing=True)

    def _mismatch(self, difference: str) -> None:
        if self._fits:
            self._say(
                "other",
                f"not every step is as planned: {difference}. From there on such a step runs under a fixed policy; "
                "results are the same.",
            )
            return
        self.given_up = True
        self._say(
            "model",
            f"the plan is for another model or another setting of it: {difference}. This and all further steps run "
            "under a fixed policy instead; results are the same. Make a new plan with policy='auto', a budget and "
            "save_plan().",
        )

    def _say(self, topic: str, text: str) -> None:
        if topic not in self._said:
            self._said.add(topic)
            warn(f"policy={self.path!r}: {text}")
