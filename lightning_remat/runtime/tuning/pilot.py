"""``policy="auto"`` under a budget: trace a step, plan, follow the plan, and notice when it no longer fits.

The first step runs lean, with block borders kept and everything else dropped, and is traced. From the second on a plan
is followed. A step can turn out to be another one than expected while it runs: other ops, or other sizes. If another
entry of :class:`~lightning_remat.runtime.tuning.known.KnownSteps` knows how it goes on, that one's plan is followed
from there. Otherwise the step goes on in a careful way, and is learned: other sizes by scaling the trace, other ops by
tracing the steps to come until they come up again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakMethod

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from lightning_remat.engine.ledger import Ledger, ModuleStack
from lightning_remat.engine.planned import PlannedTape, Script, careful_script
from lightning_remat.engine.policies import ALL_KINDS
from lightning_remat.engine.replay import Clock
from lightning_remat.engine.tape import Tape
from lightning_remat.planning.plan import PlanResult
from lightning_remat.planning.trace import Trace
from lightning_remat.planning.transfer import Transfer
from lightning_remat.runtime.counters import Counters
from lightning_remat.runtime.measuring import Measurement, StepWatch
from lightning_remat.runtime.memory import ProfilerBusy
from lightning_remat.runtime.offloading import Offloading
from lightning_remat.runtime.saying import Once, in_words
from lightning_remat.runtime.static import Optimizers, at_least, device_of, gradients_of, has_gradients, static_parts
from lightning_remat.runtime.tracer import Tracer
from lightning_remat.runtime.tuning.choosing import OFTEN, kept_bytes, whole_result
from lightning_remat.runtime.tuning.known import Known, KnownSteps
from lightning_remat.runtime.tuning.relief import FIXED, Relief

if TYPE_CHECKING:
    from lightning_remat.runtime.tuning.remembering import Memory

MOST_SEQUENCES = 6
"""How many sequences of ops are planned for; a model with more of them has another one in every step."""

_IN_A_ROW = 4  # steps that are traced, one after the other, in the hope for an unknown sequence to come up again
_ROUNDS = 5  # how often that is tried in vain
_FAR = 4  # a shape of so many times the size of any that was traced is traced as well, when it comes up again


class Pilot(Relief):
    """Chooses the tape for every step.

    Args:
        budget: bytes, or (float) a share of the device's memory, or None: what the device has.
        clock: of all tapes.
        modules: names of modules, for traces.
        margin: what is left free where there is no budget, as users write it.
        counters: where figures and decisions are written.
        offloading: where contents may go; None: they stay.
        recompute: whether a plan may drop anything.

    Attributes:
        known: everything that is known of steps.
        ledger: books of the last traced step.
        given_up: no plan can be followed; a fixed policy has to do.
        recalled: what another run knew, until the first step begins.
        before: bytes of what was there between steps in that run, for as long as no optimizer has been met.
    """

    # Here since __del__ looks at them, also where a wrong option has ended __init__ early.
    _tracer: Tracer | None = None
    _measuring: Measurement | None = None

    def __init__(
        self,
        budget: int | float | None,
        clock: Clock,
        modules: ModuleStack,
        margin: int | str = "5%",
        counters: Counters | None = None,
        offloading: Offloading | None = None,
        recompute: bool = True,
    ) -> None:
        self._say = Once("policy='auto'" if recompute else "policy='offload_only'")
        super().__init__(budget, margin, counters if counters is not None else Counters(), self._say)
        self.recompute = recompute
        self.offloading = offloading
        self.chooser.recompute = recompute
        if offloading is not None:
            self.chooser.transfer = partial(_transfer, offloading, self._roots)
        self.clock = clock
        self.modules = modules
        self.tape = PlannedTape(clock)
        # Weakly: whoever lets go of an engine in mid-step must not have to wait for the garbage collector until what
        # it counts is stopped.
        other_op: WeakMethod[Callable[..., Script | None]] = WeakMethod(self._turn)
        other_size: WeakMethod[Callable[..., Script | None]] = WeakMethod(self._other_size)
        self.tape.on_other_op = lambda position, name: _call(other_op, position, name)
        self.tape.on_other_size = lambda position, size: _call(other_size, position, size)
        self.optimizers = Optimizers(WeakMethod(self._about_to_step))
        self.ledger: Ledger | None = None
        self.recalled: Memory | None = None
        self.before: dict[str, int] = {}
        self._had_roots = False
        self._active: Known | None = None
        self._accumulating = False
        self._learning: tuple[Known, int, int] | None = None
        self._in_vain = 0  # rounds of tracing
        self._lost_at = -1  # the last step that no entry knew
        self._no_backward = 0  # traced steps that had none

    @property
    def result(self) -> PlanResult | None:
        """The plan for the largest step; None before there is one."""
        return self.main.result if self.main is not None else None

    @property
    def moves(self) -> tuple[list[int] | None, int | None, int | None]:
        """Of the step that has begun: the order in which contents come back, the window, and what is read ahead."""
        active = self._active
        result = active.result if active is not None else None
        transfer = result.transfer if result is not None else None
        if self._how == "lean" and result is not None:
            transfer = result.smallest.transfer or transfer
        if active is None or transfer is None:
            return None, None, None
        return active.order if self._how == "plan" else None, transfer.window_bytes, transfer.ahead_bytes

    @property
    def roots(self) -> list[nn.Module]:
        """The models whose memory counts, as far as they live."""
        return list(self._roots)

    @property
    def said(self) -> set[str]:
        """Topics that there was a warning about."""
        return self._say.said

    # ------------------------------------------------------------------ the ends of a step

    def begin(self, roots: Sequence[nn.Module], has_borders: bool) -> Tape | None:
        """The tape for the coming step; None if a fixed policy has to do for it."""
        self.meet(roots)
        self._conclude()
        self._how, self._begun_with = "policy", self._batch
        alive = self.roots
        if self.recalled is not None:
            self.recalled.hold_against(self, alive)
        if self.given_up or self._tight == FIXED:
            self._watch_policy(alive)
            return None
        self._step += 1
        if self._step == self._trace_at:
            self._to_trace = 1
        if self._had_roots and not alive:
            self._to_trace = max(self._to_trace, 1)  # another model, then
        self._had_roots = bool(alive)
        self._accumulating = has_gradients(alive)
        known = self.known.roots.get(self._accumulating)
        if self._tight:
            # Gradients that an undone step had met may be gone by now, so that it begins like one that is not known.
            lean = next((k for k in (known, *self.known.roots.values()) if k is not None and k.lean), None)
            if lean is None:
                self._tight = FIXED
                return None
            return self._follow(lean, careful_script(lean.lean, growing=True), "lean")
        if known is None or self._to_trace:
            tape = self._traced(alive, has_borders)
            if tape is not None or known is None:
                return tape
        if not self._look_at(known, alive):
            return None
        return self._follow(known, known.script, "plan")

    def _follow(self, known: Known, script: Script, how: str) -> Tape:
        self._active = self._last = known
        self._learning = None
        self._how = how
        self.tape.seen = []
        self.tape.start(script)
        return self.tape

    def seconds_at(self, position: int) -> float:
        """How long the op at a position of the step takes, by its trace; 0 where nobody knows."""
        ops = self._last.trace.ops if self._last is not None else []
        return ops[position].seconds if position < len(ops) else 0.0

    def meet(self, roots: Sequence[nn.Module]) -> None:
        """Models whose memory counts."""
        for root in roots:
            self._roots.add(root)

    def conclude_if_over(self) -> None:
        """Learn from the last step now, if it has been watched to its end; otherwise when the next one begins."""
        watches = self._watches()
        if (watches or self._learning is not None) and not any(watch.running for watch in watches):
            self._conclude()

    def step_over(self, failed: bool) -> None:
        """The step was left; backward may be still to come."""
        if failed:
            self._abandon()
            return
        for watch in self._watches():
            watch.leave()
        if self.tape.lost and self._active is not None:
            self._look_out()

    def _abandon(self) -> None:
        """Nothing is to be learned from the step."""
        for watch in self._watches():
            watch.stop()
        if self._tracer is not None:
            self._tracer.tape.discard()
        self._last = self._active or self._last
        self._tracer = self._measuring = self._learning = self._active = None
        self._failed = True
        self._missing = 0

    def _look_out(self) -> None:
        """A step was not what any entry knows: trace the next that is like it."""
        last, self._lost_at = self._lost_at, self._step
        if self._to_trace or self._in_vain >= _ROUNDS:
            return
        if self._in_vain and last >= 0:
            self._trace_at = 2 * self._step - last  # it may come at intervals, as every fifth step or the last of all
        else:
            self._to_trace = _IN_A_ROW

    def close(self) -> None:
        """Stop whatever is running; training may go on."""
        self._stop_watches()
        self.optimizers.stop()

    def _stop_watches(self) -> None:
        for watch in self._watches():
            watch.stop()
        self._tracer = self._measuring = None

    def __del__(self) -> None:
        self._stop_watches()  # optimizers see to themselves

    def never_drop(self, op: str) -> None:
        """Keep the results of an op from now on."""
        self.tape.never_drop(op)
        self.known.never_drop(self.tape.kept)

    @property
    def watching(self) -> bool:
        """Whether memory is being counted, in a traced or a measured step."""
        return bool(self._watches())

    def _watches(self) -> list[StepWatch]:
        return [watch for watch in (self._tracer, self._measuring) if watch is not None]

    def _about_to_step(self, optimizer: Optimizer) -> None:
        watches = self._watches()
        if watches and (not self._roots or optimizer in self.optimizers.of(self._roots)):
            for watch in watches:
                watch.update()

    def _traced(self, roots: Sequence[nn.Module], has_borders: bool) -> Tape | None:
        """A tape that traces the step; None if that cannot be (now)."""
        if self._pause:
            self._pause -= 1
            return None
        device = device_of(roots)
        if device.type not in ("cpu", "cuda"):
            self._give_up(
                "device", f"memory of the device {str(device)!r} cannot be counted, so that there is no plan", device
            )
            return None
        ledger = Ledger(self.modules)
        keeps = ALL_KINDS if not self.recompute else frozenset({"expensive"} if not has_borders else ())
        tracer = Tracer(self.clock, ledger, device, keeps, self.tape.kept, gradients_of(roots))
        try:
            tracer.start()
        except ProfilerBusy:
            if not self.known.roots:
                self._say("profiler", "a profiler is running; the step is traced once it has ended.")
            return None
        for root in roots:
            self.modules.name(root)
        self.ledger, self._tracer, self._active, self._last = ledger, tracer, None, None
        self._how = "traced"
        self.tape.lost = False
        self.optimizers.watch()
        return tracer.tape

    def _conclude(self) -> None:
        """Draw from the last step what there is to learn."""
        tracer, self._tracer = self._tracer, None
        measuring, self._measuring = self._measuring, None
        active, self._active = self._active, None
        learning, self._learning = self._learning, None
        how, failed, missing = self._how, self._failed, self._missing
        self._how, self._failed, self._missing = "", False, 0
        if how:
            self._tight = 0
        if tracer is not None:
            tracer.stop()
            self._learn_from(tracer)
            tracer.tape.discard()
        if measuring is not None:
            measuring.stop()
        if how == "policy" and not failed:
            self._policy_went_well(measuring)
        if active is None or self.tape.lost:
            return
        if how == "lean":
            self._learn_sizes(active, 0, self.tape.seen)
        elif learning is not None:
            base, position, size = learning
            self._learn_sizes(base, position, [op.size for op in base.trace.ops[:position]] + [size] + self.tape.seen)
        elif self.tape.position == len(active.trace.ops) and active.result is not None:
            self._short["lean"] = 0
            if missing:
                self.chooser.pressure(active, missing, device_of(self._roots))
            elif measuring is not None and self.offloading is not None and self.offloading.moved_less:
                active.tries = max(active.tries, 1)  # something could not leave: that says nothing of the plan
            elif measuring is not None:
                self.chooser.compare(active, measuring)
            elif self.clock.replayed_ops or self.clock.fetch_seconds or active.keeps_all:
                active.extra_seconds = self.clock.seconds + self.clock.fetch_seconds
            if active.rests and self._begun_with is not None:
                self._covered.add(self._accumulating, self._begun_with)

    def _learn_sizes(self, base: Known, position: int, sizes: list[int]) -> None:
        """A step of the sequence of ``base`` had these sizes; they differ first at ``position`` or after it."""
        ops = base.trace.ops
        if len(sizes) != len(ops) or self.known.full:
            return
        position = next((i for i in range(position, len(ops)) if ops[i].size != sizes[i]), -1)
        if position < 0 or self.known.turn(base, position, sizes[position]) is not None:
            return
        new = self.known.learn(base, position, sizes)
        traced = max(k.elements for k in self.known.all if k.traced and k.sequence == new.sequence)
        if new.elements > _FAR * traced and not self._to_trace and self._in_vain < _ROUNDS:
            self._to_trace = _IN_A_ROW

    def _learn_from(self, tracer: Tracer) -> None:
        if not tracer.complete:
            # No backward (yet), or somebody else's profiler came in between.
            self._no_backward += not (tracer.passes or tracer.failed)
            if self._no_backward == 3 and not self.known.roots:
                self._say(
                    "backward",
                    "no backward was seen of 3 traced steps (it may run on another thread), so that there is no plan. "
                    "Until one is seen, steps run under a fixed policy.",
                )
            self._pause = 0 if self._no_backward < 3 else 2 ** min(self._no_backward - 2, 7)
            return
        functions = tracer.tape.functions
        if self.known.add(self._accumulating, tracer.trace(), functions, tracer.passes, tracer.renewed):
            self._to_trace = self._in_vain = 0
        elif self._to_trace:
            self._to_trace -= 1
            self._in_vain += not self._to_trace
        self._short["traced"] = 0
        if self.known.sequences > MOST_SEQUENCES:
            self._give_up(
                "sequences",
                f"the model ran {MOST_SEQUENCES + 1} different sequences of ops so far, so that no plan holds for long",
            )

    def _give_up(self, topic: str, reason: str, device: torch.device | None = None) -> None:
        self.given_up = self.fallback.for_good = True
        self.fallback.countable = device is None
        self._active = self._last = None
        self._covered.clear()
        self.known = KnownSteps()
        self.optimizers.stop()
        self._say(topic, f"{reason}: from now on every step runs under a fixed policy.")

    # ------------------------------------------------------------------ plans

    def _look_at(self, known: Known, roots: Sequence[nn.Module]) -> bool:
        """Plan, if there is no plan yet or the memory between steps has changed; measure, if that is to be done.

        Returns:
            Whether there is a plan to follow.
        """
        device = device_of(roots)
        known.stale = known.stale or self.chooser.place_changed(known)
        anew = known.result is None or known.stale
        if anew or (self.optimizers.watching and known.steps != self.optimizers.steps):
            parts = static_parts(roots, self.optimizers.of(roots), device)
            if known.renewed and device.type == "cpu":
                parts["gradients"] = 0  # on CUDA the count sees them go; here, only the new ones come
            if not self.optimizers.steps:
                parts = at_least(parts, self.before)
            static = sum(parts.values())
            if anew or self.chooser.moved(known, static):
                self._plan(known, static, parts, self.chooser.bytes_on(device, static))
            if known.result is None:
                return False
            known.steps = self.optimizers.steps
            if self.optimizers.settled(roots):
                self.optimizers.stop()  # whatever state they make is there by now
        if self.chooser.due(known, self._step):
            known.tries = max(known.tries, 1)
        waiting = [k for k in self.known.all if k.tries]
        if waiting:
            for k in waiting:
                k.tries -= 1
            with suppress(ProfilerBusy):
                self._measuring = Measurement(device, known.passes)
        return True

    def _plan(self, known: Known, static: int, parts: dict[str, int], budget: int) -> None:
        self.chooser.plan(known, static, parts, budget)
        if self.chooser.error is not None:
            self._give_up("planner", f"no plan could be made ({self.chooser.error!r}; please report this)")
        elif known is self.main:
            self.counters.kept_bytes = kept_bytes(known)

    def share(self, names: str | None, drop: tuple[bool, ...]) -> None:
        """Follow one plan for a sequence of ops together with other processes; None: none, each its own."""
        self.chooser.shared = {} if names is None else {names: drop}
        for known in self.known.all:
            self.chooser.share(known)
            if known is self.main:
                self.counters.kept_bytes = kept_bytes(known)

    def whole_result(self) -> PlanResult | None:
        """The plan for the largest step with the whole front, which takes a while to find; None before there is one."""
        return whole_result(self.main)

    @property
    def sentence(self) -> str:
        """The plan for the largest step, in words."""
        if self.given_up:
            return f"budget {self.chooser.text}: no plan can be followed"
        if self.result is None:
            return f"budget {self.chooser.text}: the first step runs lean and is traced"
        return in_words(self.result)

    # ------------------------------------------------------------------ other steps than expected

    def _other_size(self, position: int, size: int) -> Script | None:
        active = self._active
        if active is None:
            return None
        if self._learning is not None:
            return careful_script(active.lean, growing=True)
        found = self._turn(position, size)
        if found is not None:
            return found
        if not self.known.full:
            self._learning = (active, position, size)
        self.tape.seen = []
        if size > active.trace.ops[position].size:
            return careful_script(active.lean, growing=True)
        return careful_script(active.script)

    def _turn(self, position: int, what: int | str) -> Script | None:
        """The script of the entry that knows how the step goes on."""
        active = self._active
        if active is None or self._learning is not None:
            return None
        found = self.known.turn(active, position, what)
        if found is None:
            return None
        if self._how == "lean":
            self._active = self._last = found
            return careful_script(found.lean, growing=True)
        found.met += 1
        anew = found.result is None or found.stale or (found.like and found.met == OFTEN)
        if anew or self.chooser.moved(found, active.static):
            budget = active.result.budget_bytes if active.result is not None else found.static + 1
            self._plan(found, active.static, active.parts, budget)
            if found.result is None:
                return None
        self._active = self._last = found
        return found.script


def _transfer(offloading: Offloading, roots: Iterable[nn.Module], trace: Trace) -> Transfer | None:
    return offloading.transfer(trace, device_of(roots))


def _call(method: WeakMethod[Callable[..., Script | None]], position: int, what: Any) -> Script | None:
    found = method()
    return found(position, what) if found is not None else None
