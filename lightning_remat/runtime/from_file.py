"""``policy="plan.json"``: following a plan that was made and saved before."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Sequence

from torch import nn

from lightning_remat.engine.ledger import Ledger
from lightning_remat.engine.planned import PlannedTape, Script, careful_script, without
from lightning_remat.engine.replay import Clock
from lightning_remat.engine.tape import Tape
from lightning_remat.planning.planfile import PlanFile
from lightning_remat.sizes import format_bytes

log = logging.getLogger("lightning_remat")


class FilePilot:
    """Follows one plan file; the counterpart of :class:`~lightning_remat.runtime.pilot.Pilot`.

    Args:
        path: as the user gave it.
        clock: of the tape.

    Attributes:
        given_up: the plan is for another sequence of ops; a fixed policy has to do.
        ledger: none is kept.

    Raises:
        PlanFileError: see :meth:`~lightning_remat.planning.planfile.PlanFile.load`.
    """

    def __init__(self, path: str, clock: Clock) -> None:
        self.path = path
        self.plan = PlanFile.load(path)
        self.tape = PlannedTape(clock)
        self.tape.on_other_op = self._other_op
        self.tape.on_other_size = self._other_size
        self.given_up = False
        self.ledger: Ledger | None = None
        names, sizes = self.plan.names, self.plan.elements
        self._script: Script = list(zip(names, map(int, self.plan.drop), sizes, strict=True))
        self._lean: Script = list(zip(names, map(int, self.plan.lean), sizes, strict=True))
        self._larger = False
        self._running = False

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
        self._running = True
        self.tape.start(self._script)
        return self.tape

    def step_over(self, failed: bool) -> None:
        """The step was left."""
        if self._running and not failed and not self.tape.lost and self.tape.position < len(self.plan.names):
            position = self.tape.position
            self._mismatch(f"the step ended after {position} ops, and the plan has {len(self.plan.names)}")
        self._running = False

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
        if not self._larger:
            log.info("%s: op %d has %d elements; the plan is for %d. This step runs lean.",
                     self.path, position, size, self.plan.elements[position])  # fmt: skip
        self._larger = True
        return careful_script(self._lean, growing=True)

    def _mismatch(self, difference: str) -> None:
        self.given_up = True
        warnings.warn(
            f"policy={self.path!r}: the plan is for another model or another setting of it: {difference}. This and all "
            "further steps run under a fixed policy instead; results are the same. Make a new plan with policy='auto', "
            "a budget and save_plan().",
            stacklevel=5,
        )
