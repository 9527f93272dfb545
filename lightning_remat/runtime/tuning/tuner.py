"""Finding the largest plan that really fits, by measuring real steps: secant steps (regula falsi), else bisection.

A plan is asked for by a *target*, "at most so many bytes", and comes with a predicted peak; then a step is measured.
Between the largest plan that fitted and the smallest above it that did not, the next target is where a line through
what was measured meets the limit, or the middle where such steps gain too little. Nothing here assumes that a larger
target measures larger: a plan is taken only if it was itself measured to fit.

No PyTorch here: all quantities are bytes above static memory.

Known weakness: where measurements are noisy, a plan that fitted once may not the next time; :meth:`Tuner.pressure` is
for that.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from lightning_remat.sizes import format_bytes

MOST_TRIALS = 6
"""Plans that are measured until one is settled for; each opening of the bound allows half as many again."""

CLOSE = 0.01
"""Share of the room that may stay unused, and by which a further target has to differ."""

_PROPOSALS = 4 * MOST_TRIALS  # targets asked for, those included that led to plans known already
_PATIENCE = 3  # measurements in a row that show much slack until the bound is opened
_MUCH = 0.05  # share of the room
_OPENINGS = 2
_LEAST_STEP = 0.02  # of what a plan takes: how much less the next one has to, after pressure ...
_LARGEST_STEP = 0.25  # ... and how much less at most, however much was missing


@dataclass
class Trial:
    """A plan that was measured.

    Attributes:
        target: the largest target known to lead to it.
        predicted: its predicted peak.
        measured: its measured peak; None: memory ran out.
        least: no plan has a smaller predicted peak.
        most: everything is kept.
    """

    target: int
    predicted: int
    measured: int | None
    least: bool = False
    most: bool = False


@dataclass
class Tuner:
    """Proposes targets and learns what came of them.

    Attributes:
        room: what a step may take.
        ratio: measured over predicted peak, as far as it is known.
        upward: whether a larger plan is looked for where there is slack; a smaller one always is.
        reserve: how much less than ``room`` there turned out to be.
        trials: what was measured.
        settled: no other plan is looked for.
        why: what was chosen, and for which reason; empty before.
    """

    room: int = 0
    ratio: float = 1.0
    upward: bool = True
    reserve: int = 0
    trials: list[Trial] = field(default_factory=list)
    settled: bool = False
    why: str = ""
    spent: int = 0
    proposals: int = 0
    width: float = 0.0
    openings: int = 0
    slack_seen: int = 0

    # ------------------------------------------------------------------ what is known

    @property
    def limit(self) -> int:
        """What a step may really take."""
        return self.room - self.reserve

    @property
    def best(self) -> Trial | None:
        """Of the plans that were measured to fit, the largest by prediction, which is the one that replays least."""
        fitting = [t for t in self.trials if self.fits(t)]
        return max(fitting, key=lambda t: t.predicted, default=None)

    def fits(self, trial: Trial) -> bool:
        """Whether a plan was measured to fit."""
        return trial.measured is not None and trial.measured <= self.limit

    @property
    def low(self) -> int:
        """Targets up to this one lead to nothing larger than what was measured to fit."""
        return self.best.target if self.best is not None else min([0, self.limit])

    @property
    def high(self) -> int | None:
        """Targets from this one on lead to a plan that did not fit; None: there is no such plan."""
        best = self.best
        failed = [t.predicted for t in self.trials if not self.fits(t)]
        return min([p for p in failed if best is None or p > best.predicted], default=None)

    @property
    def hard_pressed(self) -> bool:
        """Memory ran short at one time, so that there may be more room than is used; see :meth:`slack`."""
        return self.settled and self.openings < _OPENINGS and (self.reserve > 0 or self._ran_out())

    def _ran_out(self) -> bool:
        return any(t.measured is None for t in self.trials)

    # ------------------------------------------------------------------ proposing and learning

    def fit_to(self, room: int) -> None:
        """Static memory, or the budget, is another than it was."""
        before = self.best
        moved = abs(room - self.room) > CLOSE * max(1, self.room)
        self.room = room
        self.reserve = min(self.reserve, max(0, room))
        if moved or self.best is not before:
            self._begin_again()

    def _begin_again(self) -> None:
        self.settled, self.why = False, ""
        self.spent = self.proposals = 0
        self.width = 0.0
        self._conclude()

    @property
    def target(self) -> int:
        """The plan to ask for next: of at most so many bytes."""
        if self.settled or self.spent >= MOST_TRIALS:
            return self.best.predicted if self.best is not None else min(-1, self.limit)
        if not self.trials:
            return int(self.limit / self.ratio) or -1
        return self._between()

    def _between(self) -> int:
        low, high = self.low, self.high
        aim = self._aim()
        if high is None:
            return max(low + 1, int(aim))
        width = high - low
        slow = 0 < self.width < 2 * width and self.spent > 1
        if slow or not low < aim < high:
            aim = (low + high) / 2
        return max(min(int(aim), high - 1), min(low + 1, high - 1))

    def _aim(self) -> float:
        """Where the limit would be met, if measured peaks were on a line."""
        measured = [t for t in self.trials if t.measured is not None]
        if not measured:
            return 0.0
        near = sorted(measured, key=lambda t: abs((t.measured or 0) - self.limit))
        first = near[0]
        for other in near[1:]:
            rise, run = (other.measured or 0) - (first.measured or 0), other.predicted - first.predicted
            if run and rise / run > 0:
                return first.predicted + (self.limit - (first.measured or 0)) * run / rise
        return self.limit * first.predicted / max(1, first.measured or 0)

    def seen(self, predicted: int) -> bool:
        """Whether the plan with this predicted peak was measured already."""
        return any(t.predicted == predicted for t in self.trials)

    def again(self, target: int, predicted: int) -> None:
        """A target led to a plan that was measured already."""
        self.proposals += 1
        for trial in self.trials:
            if trial.predicted == predicted:
                trial.target = max(trial.target, target)
        self._conclude()

    def learn(self, target: int, predicted: int, measured: int | None, least: bool = False, most: bool = False) -> None:
        """What came of a plan.

        Args:
            target: what it was asked for with.
            predicted: its predicted peak.
            measured: its measured peak; None: memory ran out.
            least: there is no smaller one.
            most: everything is kept.
        """
        high = self.high
        self.width = high - self.low if high is not None else 0.0
        self.trials = [t for t in self.trials if t.predicted != predicted]
        self.trials.append(Trial(max(target, predicted), predicted, measured, least, most))
        if measured is not None and predicted > 0:
            self.ratio = measured / predicted
        self.spent += 1
        self.proposals += 1
        self._conclude()

    def _conclude(self) -> None:
        """Whether to look further."""
        best, high = self.best, self.high
        text = ""
        if best is None:
            if any(t.least for t in self.trials):
                text = "the plan with the smallest peak takes more than there is room for, and is followed"
        elif best.most:
            text = "everything can be kept"
        elif best.measured is not None and self.limit - best.measured <= CLOSE * self.room:
            text = f"it takes {format_bytes(best.measured)} of {format_bytes(self.limit)}"
        elif not self.upward:
            text = "it fits"
        elif high is None and self._aim() <= best.target + CLOSE * self.room:
            text = "no larger plan is expected to fit"
        elif high is not None and high - best.target <= CLOSE * self.room:
            text = "the next larger plan was measured not to fit"
        if not text and self.trials and (self.spent >= MOST_TRIALS or self.proposals >= _PROPOSALS):
            text = f"of the {len(self.trials)} plans that were measured, the largest that fits" if best else "none fits"
        self.settled = bool(text)
        if text:
            what = f"a plan of {format_bytes(best.predicted)}" if best is not None else "no plan was measured to fit"
            self.why = f"{what}: {text}"

    # ------------------------------------------------------------------ afterwards

    def pressure(self, missing: int | None, predicted: int, measured: int | None = None) -> None:
        """The plan in force turned out to need more than there is.

        Args:
            missing: by how many bytes; None: nobody knows.
            predicted: the plan's predicted peak.
            measured: its measured peak; None: what it was the last time, or else by the ratio.
        """
        known = next((t for t in self.trials if t.predicted == predicted), None)
        took = measured or (known.measured if known is not None else None) or int(predicted * self.ratio)
        step = min(max(missing or 0, int(_LEAST_STEP * took)), int(_LARGEST_STEP * took))
        self.reserve = max(self.reserve, self.room - max(0, took - max(1, step)))
        if known is None:
            self.trials.append(Trial(predicted, predicted, took))
        else:
            known.measured = took
        self.slack_seen = 0
        self._begin_again()

    def slack(self, measured: int) -> bool:
        """A further measurement of the plan in force: where much room stays unused, the bound is opened again.

        Args:
            measured: its peak.

        Returns:
            Whether another plan is looked for now.
        """
        if not self.hard_pressed or self.room - measured < _MUCH * self.room:
            self.slack_seen = 0
            return False
        self.slack_seen += 1
        if self.slack_seen < _PATIENCE:
            return False
        self.slack_seen = 0
        self.openings += 1
        # Half of it: whatever was short may still be.
        self.reserve //= 2
        self.trials = [t for t in self.trials if t.measured is not None]
        self.spent = MOST_TRIALS // 2
        self.proposals = _PROPOSALS // 2
        self.width = 0.0
        self._conclude()
        return not self.settled

    def restart(self) -> None:
        """Plans are other ones than before; what was measured of them still says how good predictions are."""
        self.trials = []
        self._begin_again()

    # ------------------------------------------------------------------ keeping it

    def state_dict(self) -> dict[str, Any]:
        """Everything, as plain numbers, lists and dictionaries."""
        return asdict(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of :meth:`state_dict`."""
        for name, value in state.items():
            setattr(self, name, [Trial(**t) for t in value] if name == "trials" else value)
