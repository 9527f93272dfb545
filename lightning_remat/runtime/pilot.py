"""``policy="auto"`` under a budget: trace a step, plan, follow the plan, and notice when it no longer fits.

The first step runs lean, with block borders kept and everything else dropped, and is traced. From the second on a plan
is followed. A step can turn out to be another one than expected while it runs: other ops, or other sizes. What is known
of steps is therefore a tree: where a step leaves what one entry expects, a *turn* leads to the entry that knows how it
goes on. Where none does, the step goes on in a careful way, and is learned.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from lightning_remat.engine.ledger import Ledger, ModuleStack
from lightning_remat.engine.planned import PlannedTape, Script, careful_script, script_for
from lightning_remat.engine.replay import Clock
from lightning_remat.engine.tape import Tape
from lightning_remat.errors import BudgetError
from lightning_remat.planning.plan import Candidate, PlanResult
from lightning_remat.planning.planner import Planner
from lightning_remat.planning.rescale import rescaled
from lightning_remat.planning.trace import NEED, Trace
from lightning_remat.runtime.measuring import Measurement
from lightning_remat.runtime.memory import profiler_is_on
from lightning_remat.runtime.static import Optimizers, device_of, has_gradients, static_parts
from lightning_remat.runtime.tracer import Tracer
from lightning_remat.sizes import device_memory, format_bytes

log = logging.getLogger("lightning_remat")

MOST_SHAPES = 64
"""How many shapes of one sequence are told apart."""

MOST_SEQUENCES = 6
"""How many sequences of ops are planned for; a model with more of them has another one in every step."""

_SIMILAR = 1.15  # a plan for a shape of at most this many times the bytes serves a smaller one
_ESTIMATED = 0.98  # share of the room that a plan for a shape that was never traced may take


@dataclass
class Known:
    """What is known of one sequence of ops at one shape.

    Attributes:
        number: identity, for turns.
        trace: as measured, or rescaled from another shape.
        functions: overload of each op.
        script: instructions of the plan in force.
        lean: instructions of the plan with the smallest peak.
        result: the plan in force.
        static: memory between steps that it was made for.
        correction: measured over predicted peak of the step, where the prediction was too low.
    """

    number: int
    trace: Trace
    functions: Sequence[Any]
    traced: bool = True
    script: Script = field(default_factory=list)
    lean: Script = field(default_factory=list)
    result: PlanResult | None = None
    planner: Planner | None = None
    static: int = -1
    correction: float = 1.0


class Pilot:
    """Chooses the tape for every step.

    Args:
        budget: bytes, or (float) a share of the device's memory.
        clock: of all tapes.
        modules: names of modules, for traces.

    Attributes:
        result: the plan last followed, None before there is one.
        measurement: peak of a step under it, as measured; None before.
        parts: what static memory consists of.
        ledger: books of the last traced step.
        given_up: the sequence of ops changes all the time; a fixed policy has to do.
    """

    def __init__(self, budget: int | float, clock: Clock, modules: ModuleStack) -> None:
        self.budget = budget
        self.clock = clock
        self.modules = modules
        self.tape = PlannedTape(clock)
        self.tape.on_other_op = self._other_op
        self.tape.on_other_size = self._other_size
        self.optimizers = Optimizers()
        self.result: PlanResult | None = None
        self.measurement: Measurement | None = None
        self.extra_seconds: float | None = None
        self.parts: dict[str, int] = {}
        self.ledger: Ledger | None = None
        self.given_up = False
        self._roots: dict[bool, Known] = {}  # by whether gradients are there when the step begins
        self._all: list[Known] = []
        self._turns: dict[tuple[int, int, int | str], Known] = {}
        self._tracer: Tracer | None = None
        self._measuring: Measurement | None = None
        self._active: Known | None = None
        self._accumulating = False
        self._learning: tuple[Known, int, int] | None = None
        self._trace_wanted = False
        self._seen_steps = -1
        self._said: set[str] = set()

    # ------------------------------------------------------------------ the ends of a step

    def begin(self, roots: Sequence[nn.Module], has_borders: bool) -> Tape | None:
        """The tape for the coming step; None if a fixed policy has to do for it."""
        self._conclude(roots)
        if self.given_up:
            return None
        self.optimizers.watch()
        self._accumulating = has_gradients(roots)
        known = self._roots.get(self._accumulating)
        if known is None or self._trace_wanted:
            if profiler_is_on():
                self._say("profiler", "a profiler is running; the step is traced once it has ended.")
                return None
            return self._traced(roots, has_borders)
        self._refresh(known, roots)
        self._active = known
        self._learning = None
        self.tape.start(known.script)
        self.extra_seconds = None
        return self.tape

    def step_over(self, failed: bool) -> None:
        """The step was left; backward may be still to come."""
        for watcher in (self._tracer, self._measuring):
            if watcher is not None:
                watcher.step_over = True
                if failed:
                    watcher.stop()
        if failed:
            self._tracer = self._measuring = self._learning = None
        if self.tape.lost and self._active is not None:
            self._trace_wanted = True

    def close(self) -> None:
        """Stop whatever is running."""
        for watcher in (self._tracer, self._measuring):
            if watcher is not None:
                watcher.stop()
        self._tracer = self._measuring = None
        self.optimizers.stop()

    def _traced(self, roots: Sequence[nn.Module], has_borders: bool) -> Tape:
        for root in roots:
            self.modules.name(root)
        self._active = None
        self.tape.lost = False
        self.ledger = Ledger(self.modules)
        keeps: frozenset[str] = frozenset() if has_borders else frozenset({"expensive"})
        tracer = self._tracer = Tracer(self.clock, self.ledger, device_of(roots), keeps)
        tracer.start()
        return tracer.tape

    def _conclude(self, roots: Sequence[nn.Module]) -> None:
        """Draw from the last step what there is to learn."""
        tracer, self._tracer = self._tracer, None
        if tracer is not None:
            tracer.stop()
            trace = tracer.trace()
            if any(kind == NEED for kind, _, _ in trace.events):
                self._trace_wanted = False
                self._add(trace, tracer.tape.functions)
        measuring, self._measuring = self._measuring, None
        if measuring is not None:
            measuring.stop()
            self._compare(measuring)
        elif self._active is not None and self._learning is None:
            self.extra_seconds = self.clock.seconds
        if self._learning is not None:
            self._learn(*self._learning)
            self._learning = None

    # ------------------------------------------------------------------ plans

    def _refresh(self, known: Known, roots: Sequence[nn.Module]) -> None:
        """Plan, if there is no plan yet or the memory between steps has changed."""
        if known.result is not None and self.optimizers.steps == self._seen_steps:
            return
        if self.optimizers.steps > 2:
            self.optimizers.stop()  # whatever state they make is there by now
        self._seen_steps = self.optimizers.steps
        device = device_of(roots)
        self.parts = static_parts(roots, self.optimizers.of(roots), device)
        static = sum(self.parts.values())
        budget = self.budget if isinstance(self.budget, int) else int(self.budget * device_memory(device))
        if known.result is None or abs(static - known.static) > 0.002 * budget:
            self._plan(known, static, budget)
            if known.traced and not profiler_is_on():
                self._measuring = Measurement(device)

    def _plan(self, known: Known, static: int, budget: int) -> None:
        if known.planner is None:
            known.planner = Planner(known.trace)
        known.static = static
        share = 1.0 if known.traced else _ESTIMATED
        room = int((budget - static) * share / known.correction)
        try:
            known.result = known.planner.result(static + room, static, self.parts)
        except BudgetError as error:
            self._say("budget", f"{error} Training goes on under the plan with the smallest peak.")
            known.result = known.planner.result(error.smallest_bytes, static)
        known.result = known.result.with_budget(budget)
        self._instruct(known, known.result.chosen, known.result.smallest)
        self.result = known.result
        log.info(self.sentence)

    def _instruct(self, known: Known, chosen: Candidate, smallest: Candidate) -> None:
        sizes = [op.size for op in known.trace.ops]
        known.script = script_for(known.functions, sizes, chosen.drop)
        known.lean = script_for(known.functions, sizes, smallest.drop)

    def _compare(self, measuring: Measurement) -> None:
        """Hold the plan to its prediction."""
        known = self._active
        if known is None or known.result is None or not measuring.complete:
            return
        self.measurement = measuring
        predicted, measured = known.result.chosen.peak_bytes, measuring.peak_bytes
        if known.static + measured > known.result.budget_bytes and measured > 1.002 * predicted:
            known.correction *= measured / predicted
            self._seen_steps = -1
            known.result = None

    @property
    def sentence(self) -> str:
        """The plan in force, in words."""
        result = self.result
        if result is None:
            return f"budget {self._budget_text()}: the first step runs lean and is traced"
        dropped = sum(result.chosen.drop)
        return (
            f"budget {format_bytes(result.budget_bytes)}: predicted peak {format_bytes(result.peak_bytes)}, "
            f"{dropped} of {len(result.trace.ops)} ops run again, {result.chosen.extra_seconds * 1e3:.1f} ms a step"
        )

    def _budget_text(self) -> str:
        return format_bytes(self.budget) if isinstance(self.budget, int) else f"{self.budget:.0%} of the device"

    # ------------------------------------------------------------------ other steps than expected

    def _add(self, trace: Trace, functions: Sequence[Any]) -> None:
        """A traced step: the first of its kind, or another sequence or shape."""
        known = Known(len(self._all), trace, functions)
        root = self._roots.setdefault(self._accumulating, known)
        if root is not known and not self._graft(root, known):
            return
        self._all.append(known)
        if len({k.trace.sequence for k in self._all}) > MOST_SEQUENCES:
            self.given_up = True
            self._say(
                "sequences",
                f"the model ran {MOST_SEQUENCES + 1} different sequences of ops so far, so that no plan holds for "
                "long: from now on every step runs under a fixed policy.",
            )

    def _graft(self, root: Known, new: Known) -> bool:
        """Put an entry where a step that begins like ``root`` finds it; False if there is one like it already."""
        at = root
        while True:
            turn = _difference(at.trace, new.trace)
            if turn is None:
                return False
            key = (at.number, *turn)
            found = self._turns.setdefault(key, new)
            if found is new:
                return True
            at = found

    def _other_op(self, position: int, name: str) -> Script | None:
        return self._turn(position, name)

    def _other_size(self, position: int, size: int) -> Script | None:
        active = self._active
        if active is None:
            return None
        if self._learning is not None:
            return careful_script(active.lean, growing=True)
        found = self._turn(position, size)
        if found is not None:
            return found
        if len(self._all) < MOST_SHAPES:
            self._learning = (active, position, size)
        self.tape.seen = []
        if size > active.trace.ops[position].size:
            return careful_script(active.lean, growing=True)
        return careful_script(active.script)

    def _turn(self, position: int, what: int | str) -> Script | None:
        if self._active is None:
            return None
        found = self._turns.get((self._active.number, position, what))
        if found is None:
            return None
        if found.result is None:
            planned = self._active
            budget = planned.result.budget_bytes if planned.result is not None else 0
            self._plan(found, planned.static, budget)
        self._active = found
        return found.script

    def _learn(self, base: Known, position: int, size: int) -> None:
        """A step that began like ``base`` had other sizes from ``position`` on."""
        ops = base.trace.ops
        sizes = [op.size for op in ops[:position]] + [size] + self.tape.seen
        if self.tape.lost or len(sizes) != len(ops):
            return
        new = Known(len(self._all), rescaled(base.trace, sizes), base.functions, traced=False)
        self._all.append(new)
        self._turns[base.number, position, size] = new
        total = sum(new.trace.nbytes)
        for other in sorted(self._all, key=lambda k: sum(k.trace.nbytes)):
            if (
                other.result is not None
                and other.trace.sequence == new.trace.sequence
                and total <= sum(other.trace.nbytes) <= _SIMILAR * total
                and all(a >= b for a, b in zip(other.trace.nbytes, new.trace.nbytes, strict=True))
            ):
                # Its plan fits, and another search would gain next to nothing.
                new.result, new.static = other.result, other.static
                self._instruct(new, other.result.chosen, other.result.smallest)
                return

    def _say(self, topic: str, text: str) -> None:
        """Warn, once for each topic."""
        if topic not in self._said:
            self._said.add(topic)
            warnings.warn(f"policy='auto': {text}", stacklevel=5)


def _difference(known: Trace, new: Trace) -> tuple[int, int | str] | None:
    """Where a step under ``known`` would notice that it is ``new``: the position, and the op's name or size."""
    for position, op in enumerate(new.ops):
        if position >= len(known.ops) or known.ops[position].name != op.name:
            return position, op.name
        if known.ops[position].size != op.size:
            return position, op.size
    return None
