"""``policy="plan.json"``: following a plan that was made and saved before."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from torch import nn

from lightning_remat.engine.ledger import Ledger
from lightning_remat.engine.planned import DROPPED, MOVED, PlannedTape, Script, careful_script, without
from lightning_remat.engine.policies import LEAN, SELECTIVE, Policy
from lightning_remat.engine.replay import Clock
from lightning_remat.engine.tape import Tape
from lightning_remat.planning.planfile import PlanFile
from lightning_remat.runtime.saying import warn
from lightning_remat.sizes import format_bytes

_SHORT = 2  # steps that may run out of memory under the plan until all run under the one with the smallest peak

log = logging.getLogger("lightning_remat")


class FilePilot:
    """Follows one plan file; the counterpart of :class:`~lightning_remat.runtime.tuning.pilot.Pilot`.

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
        self._script: Script = list(zip(names, _actions(plan.drop, plan.move), sizes, strict=True))
        self._lean: Script = list(zip(names, _actions(plan.lean, plan.lean_move), sizes, strict=True))
        self._larger = False
        self._fits = False  # a step was as planned, from beginning to end
        self._said: set[str] = set()
        self._how = ""  # the step that runs, or ran last: by "plan" or "lean" plan, or "policy"
        self._tight = ""  # how the coming step has to run: "lean" or "policy"
        self._short = 0  # steps under the plan that ran out of memory

    @property
    def sentence(self) -> str:
        """The plan, in words."""
        plan = self.plan
        moved = f", the results of {sum(plan.move)} are moved" if plan.moves else ""
        return (
            f"plan {self.path}: predicted peak {format_bytes(plan.peak_bytes)} for the step it was made from, "
            f"{sum(plan.drop)} of {len(plan.names)} ops run again{moved}"
        )

    @property
    def moves(self) -> tuple[list[int] | None, int | None, int | None]:
        """See :attr:`~lightning_remat.runtime.tuning.pilot.Pilot.moves`; the order is found out."""
        plan = self.plan
        return (None, plan.window_bytes, plan.ahead_bytes) if plan.moves else (None, None, None)

    @property
    def moves_all(self) -> bool:
        """Whether a step without a tape of ours is to move all that its policy keeps, if anything may move."""
        return self._how == "policy" and not self.given_up

    def begin(self, roots: Sequence[nn.Module], has_borders: bool) -> Tape | None:
        """The tape for the coming step; None if a fixed policy has to do for it."""
        self._how, self._tight = self._tight or ("plan" if self._short < _SHORT else "lean"), ""
        if self.given_up or self._how == "policy":
            self._how = "policy"
            return None
        self._larger = False
        self.tape.start(self._script if self._how == "plan" else careful_script(self._lean, growing=True))
        return self.tape

    def policy(self, has_blocks: bool) -> Policy:
        """The policy for a step that :meth:`begin` had no tape for."""
        return LEAN if has_blocks else SELECTIVE

    def look_at(self, batch: Any) -> None:
        """The plan is the plan, whatever the batch."""

    def resting(self, guarded: bool = False) -> bool:
        """A plan that keeps everything is followed as well: a step may be larger than planned."""
        return False

    def pressure(self, missing: int) -> None:
        """There is no other plan to go over to."""

    def tighten(self, asked_bytes: int | None) -> str | None:
        """See :meth:`~lightning_remat.runtime.tuning.pilot.Pilot.tighten`."""
        how, self._how = self._how, ""
        self._short += how == "plan"
        if how == "plan" and any(self.plan.lean):
            self._tight = "lean"
            return "under the plan with the smallest peak that the file holds"
        if how in ("plan", "lean"):
            self._tight = "policy"
            return "under a fixed policy that keeps what enters the model's blocks"
        return None

    def undone(self) -> None:
        """The step was undone for another reason than memory: it is going to be run again."""
        self._how = ""

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


def _actions(drop: Sequence[bool], move: Sequence[bool]) -> list[int]:
    """For the script: what becomes of each op's outputs."""
    return [MOVED if m else DROPPED if d else 0 for d, m in zip(drop, move or [False] * len(drop), strict=True)]
