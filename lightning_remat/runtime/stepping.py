"""How steps run: which tape is entered around one, with what around it, and what is drawn from it afterwards.

:class:`Stepping` is the machine behind :class:`~lightning_remat.Remat`, which adds what users see of it.
"""

from __future__ import annotations

import warnings
from contextlib import ExitStack
from types import TracebackType
from typing import Any, TypeVar

import torch
from torch import nn

from lightning_remat.engine.ledger import Ledger, LedgerTape
from lightning_remat.engine.moving import MovingLedgerTape, MovingTape
from lightning_remat.engine.offload.mover import Mover
from lightning_remat.engine.plain import backward_outside
from lightning_remat.engine.planned import PlannedTape
from lightning_remat.engine.policies import OpInfo, checked_verdict
from lightning_remat.engine.rules import Rule
from lightning_remat.engine.tape import Tape
from lightning_remat.engine.transforms import transforms_allowed
from lightning_remat.engine.untold import replaced
from lightning_remat.engine.writes import always
from lightning_remat.runtime.between_steps import BetweenSteps
from lightning_remat.runtime.discovery import Discovery
from lightning_remat.runtime.hidden import hide_from_the_compiler
from lightning_remat.runtime.static import device_of
from lightning_remat.runtime.tracing import TracingTape
from lightning_remat.runtime.tuning.pilot import Pilot

S = TypeVar("S", bound="Stepping")

hide_from_the_compiler()


class Stepping(BetweenSteps):
    """One engine, entered around every training step.

    Arguments, attributes and errors are those of :class:`~lightning_remat.runtime.between_steps.BetweenSteps`.
    """

    def __enter__(self: S) -> S:
        """Begin a step: what autograd saves from here on is the tape's business."""
        self._depth += 1
        if self._depth > 1 or self._policy.off or not torch.is_grad_enabled():
            return self
        try:
            self._begin()
        except BaseException:
            self._compiled.end()
            self._end()
            self._depth -= 1
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End it. Backward may run before or after."""
        self._depth -= 1
        if self._depth == 0:
            self._compiled.end()
        if self._depth == 0 and self._resting:
            self._resting = False
            self._counters.steps += kind is None
        elif self._depth == 0 and self._stack is not None:
            tape = self._active
            self._end()
            if self._pilot is not None:
                self._pilot.step_over(failed=kind is not None)
            self._after_step(tape, failed=kind is not None)

    def look_at(self, batch: Any) -> None:
        """Show the batch of the coming step: one that is known to fit without it is spared the tape."""
        if self._pilot is not None:
            self._pilot.look_at(batch)

    def _begin(self) -> None:
        self._clock.on_replay = None
        self._look_at_compiled()
        self._compiled.begin()
        if self._pilot is not None and self._pilot.resting(self.guarded):
            self._resting = True
            self._recorded = 0
            self._clock.reset()
            return
        for op in replaced() - self._kept_ops:
            self._never_again(op)
        tape = self._planned_tape() or self._choose_tape()
        if self.offloading is not None:
            pilot = self._pilot
            moves = pilot.moves if pilot is not None and tape is pilot.tape else (None, None, None)
            if moves[1] is not None:
                self.offloading.on(device_of(self._binding.roots))
            self.offloading.begin(tape, *moves)
        self._clock.reset()
        stack = self._stack = ExitStack()
        self._active = tape
        self._verify(tape)
        tape.recorded = 0
        tape.registered = len(torch.library._impls)
        regions = self._binding.regions
        if self._needs_modules:
            tape.decide = self._decide
            stack.callback(setattr, tape, "decide", always)  # or the tape would keep its engine alive
        if not isinstance(tape, PlannedTape):
            stack.callback(regions.remove)
            regions.install(tape)
        stack.callback(self.units.remove)
        self.units.install(tape)
        if not self._binding.final and not isinstance(tape, PlannedTape):
            stack.enter_context(Discovery(regions, self._met).watching())
        elif not self._binding.final and self._meeting:
            stack.enter_context(Discovery(regions, self._only_met).watching())
        if isinstance(tape, LedgerTape) or self._needs_modules:
            stack.enter_context(self._modules.watching())
        stack.callback(tape.clear)
        stack.enter_context(transforms_allowed(tape.hooks))
        stack.enter_context(backward_outside(tape))
        stack.enter_context(tape.hooks)
        stack.enter_context(tape)

    def _planned_tape(self) -> Tape | None:
        """Under a budget, the tape that traces this step or follows a plan; None if the policy has to do."""
        pilot = self._pilot
        if pilot is None:
            return None
        # In a plain loop the model is not known before the first step has met it; most have borders.
        has_borders = not self._binding.final or bool(self.blocks)
        tape = pilot.begin(self._binding.roots, has_borders)
        self._memory = None
        if isinstance(tape, TracingTape):
            self._ledger = pilot.ledger
            self._clock.on_replay = tape.replayed
            if not self._binding.bound:
                self._modules.names.clear()  # it may be another model
        elif tape is None and pilot.policy(has_borders) is not self._policy:
            self.put_in_force(pilot.policy(has_borders))
        return tape

    def _met(self, root: nn.Module) -> list[Any]:
        """A root is met in a step."""
        found = self._binding.met(root)
        self.meet(root)
        return found

    def _only_met(self, root: nn.Module) -> list[Any]:
        """A root is met under a plan, where blocks are not watched."""
        self._met(root)
        return []

    @property
    def _needs_modules(self) -> bool:
        return self._policy.ask is not None or any(part.ask is not None for _, part in self._policy.parts)

    def _choose_tape(self) -> Tape:
        if self._ledger is None:
            for root in self._binding.roots:
                self._modules.name(root)
            ledger = self._ledger = Ledger(self._modules)
            mover = self._mover()
            tape: Tape = (
                LedgerTape(self._clock, ledger) if mover is None else MovingLedgerTape(self._clock, ledger, mover)
            )
            if mover is not None:
                self._readiness.eviction.attach(tape)
            self._clock.on_replay = ledger.replayed
        else:
            tape = self._fixed_tape()
            self._clock.on_replay = None
        return tape

    def _mover(self) -> Mover | None:
        """Moves what a fixed policy keeps; None if that is to stay."""
        if self.offloading is None or (self._pilot is not None and not self._pilot.moves_all):
            return None
        return self.offloading.on(device_of(self._binding.roots))

    def _fixed_tape(self) -> Tape:
        """The tape of steps under a fixed policy, from the second one on."""
        mover = self._mover()
        if mover is None:
            return self._tape
        tape = self._moving_tape
        if tape is None or tape.mover is not mover:
            tape = self._moving_tape = MovingTape(self._clock, mover)
            self._readiness.eviction.attach(tape)
        return tape

    def _verify(self, tape: Tape) -> None:
        """Let the verifier look at this step, if that is to be."""
        verifier, every = self._verifier, self._settings.verify_every_n_steps
        if verifier is None:
            return
        if every is not None:
            watched = isinstance(self._pilot, Pilot) and self._pilot.watching
            due = (self._counters.steps + 1) % every == 0
            # Verification takes memory of its own, which is not to be counted as the plan's: rather the next step, but
            # not for ever.
            now = due and self._verify_due if watched else due or self._verify_due
            self._verify_due = (due or self._verify_due) and not now
            if now:
                verifier.begin_anew()
            elif not self._verify_always:
                return
        verifier.attach(tape)

    def _verified(self) -> None:
        """Take the verifier away, and its results into the counters."""
        verifier = self._verifier
        if verifier is None:
            return
        self._counters.verified, self._counters.verified_different = verifier.compared, verifier.differed
        if not self._verify_always:
            verifier.detach()

    def _end(self) -> None:
        stack, self._stack = self._stack, None
        if self._active is not None:
            self._recorded = self._active.recorded
            self._active = None
            self._verified()
        if stack is not None:
            stack.close()

    def _after_step(self, tape: Tape | None, failed: bool) -> None:
        if self._ledger is not None:
            self._ledger.close()
        if failed:
            if self._steps == 0:
                self._ledger = None  # half a step is no report
            return
        self._steps += 1
        self._counters.steps += 1
        self._readiness.step_over()
        meeting, self._meeting = self._meeting, False
        if isinstance(tape, PlannedTape) and (self._binding.final or not meeting):
            return  # a plan needs no blocks, and none were looked for
        self._binding.final = True  # whatever there was to meet has been met
        parts = self._binding.regions.parts
        problem = self._binding.problem
        if problem is not None and not any(part.named for part in parts):
            raise problem  # no root of this step fits the patterns; nothing has been trained yet
        if self._pilot is not None:
            self._pilot.meet(self._binding.roots)
            if not self._binding.bound and (isinstance(tape, TracingTape) or not any(part.calls for part in parts)):
                # The next step that has to meet a model may meet another one, and this one is not to be kept alive.
                self._blocks = self.blocks
                self._binding.regions.discard()
                self._binding = self._new_binding(self._policy)
            return
        if any(part.expected and part.calls for part in parts) and (self._steps > 1 or self._recorded):
            return
        if self._steps > 1 and not self._binding.bound and any(part.named for part in parts):
            self._begin_anew(self._new_binding(self._policy))  # another model than before: meet it in the next step
        elif self._steps == 1 and (self._policy.needs_blocks or self._policy.parts):
            warnings.warn(
                f"policy={self._policy.name!r} works on blocks, and the first step ran none that could be watched "
                "(what is compiled, scripted, or checkpointed by itself cannot): everything was kept. Name others with "
                "blocks=, or use policy='selective'.",
                stacklevel=3,
            )

    def _decide(self, rule: Rule, out: Any) -> bool:
        """What the function over ops in force says about an op that has just run."""
        regions = self._binding.regions
        asks = [part.policy.ask for part in regions.parts if part.inside and part.policy.ask is not None]
        ask = asks[-1] if asks else self._policy.ask
        if ask is None:
            return False
        outs = out if isinstance(out, (tuple, list)) else (out,)
        there = [o for o in outs if isinstance(o, torch.Tensor) and o.layout is torch.strided]
        nbytes = sum(o.untyped_storage().nbytes() for o in there)
        return checked_verdict(ask, OpInfo(rule.name, self._modules.current, regions.block, nbytes, rule.kind))
