"""How steps run: which tape is entered around one, with what around it, and what is drawn from it afterwards.

:class:`Stepping` is the machine behind :class:`~lightning_remat.Remat`, which adds what users see of it.
"""

from __future__ import annotations

import os
import warnings
from contextlib import ExitStack
from functools import partial
from types import TracebackType
from typing import Any, TypeVar
from weakref import WeakMethod

import torch
from torch import nn

from lightning_remat.engine.ledger import Ledger, LedgerTape, ModuleStack
from lightning_remat.engine.moving import MovingLedgerTape, MovingTape
from lightning_remat.engine.offload.mover import Mover
from lightning_remat.engine.plain import backward_outside
from lightning_remat.engine.planned import PlannedTape
from lightning_remat.engine.policies import OpInfo, Policy, checked_verdict
from lightning_remat.engine.replay import Clock
from lightning_remat.engine.rules import Rule
from lightning_remat.engine.sharded import Units
from lightning_remat.engine.tape import Tape
from lightning_remat.engine.transforms import transforms_allowed
from lightning_remat.engine.untold import replaced
from lightning_remat.engine.verify import Verifier
from lightning_remat.engine.writes import always
from lightning_remat.errors import ConfigurationError
from lightning_remat.runtime.binding import Binding
from lightning_remat.runtime.compiled import CompiledRegions, lasting
from lightning_remat.runtime.counters import Counters
from lightning_remat.runtime.discovery import Discovery
from lightning_remat.runtime.hidden import hide_from_the_compiler
from lightning_remat.runtime.offloading import Offloading
from lightning_remat.runtime.recovery.readiness import Readiness
from lightning_remat.runtime.recovery.retry import Retry
from lightning_remat.runtime.recovery.tightening import Fixed
from lightning_remat.runtime.settings import checked, table_for
from lightning_remat.runtime.static import device_of
from lightning_remat.runtime.tracing import TracingTape
from lightning_remat.runtime.tuning.from_file import FilePilot
from lightning_remat.runtime.tuning.pilot import Pilot
from lightning_remat.runtime.tuning.remembering import Memory

S = TypeVar("S", bound="Stepping")

hide_from_the_compiler()


class Stepping:
    """One engine, entered around every training step.

    Args:
        options: those of :class:`~lightning_remat.Remat`, by name.

    Attributes:
        retry: runs steps again that memory ran out in.
        fixed: a fixed policy that the lean one stands in for.
        guarded: somebody does that, so that a step may be tried that is not sure to fit.
        units: of sharded parameters.
        offloading: what may leave the device; None: nothing.

    Raises:
        ConfigurationError: an option that cannot work.
    """

    def __init__(self, **options: Any) -> None:
        self._options = options
        self._settings = checked(**options)
        self._counters = Counters()
        self.retry = Retry(self._settings.retries, self._counters)
        offload = self._settings.offload
        self._readiness = Readiness(
            self._counters, WeakMethod(self._pressed), WeakMethod(self._seconds_at), lasting=offload is not None
        )
        eviction = self._readiness.eviction
        self.offloading = Offloading(offload, self._counters, eviction) if offload is not None else None
        self.fixed: Fixed | None = None
        self.guarded = False
        if self._settings.plan_path is not None:
            self._options["policy"] = os.path.abspath(self._settings.plan_path)  # for a copy in another folder
        if offload is not None:
            self._options["offload"] = offload  # likewise: its directory is absolute
        self._policy = self._settings.policy
        self._blocks_option = options["blocks"]
        self._kept_ops: set[str] = set()
        self._clock = Clock()
        self._tape = Tape(self._clock)
        self._moving_tape: MovingTape | None = None
        self._modules = ModuleStack()
        self._ledger: Ledger | None = None
        wanted = options["verify"] or self._settings.verify_every_n_steps is not None
        self._verifier: Verifier | None = Verifier(self._never_again) if wanted else None
        self._verify_always = bool(options["verify"])
        self._verify_due = False
        self.units = Units()
        self._binding = self._new_binding(self._policy)
        self._memory: Memory | None = None  # from a checkpoint, until a step begins with it
        self._meeting = False  # the model is to be met although there is a plan already
        self._compiled = CompiledRegions(self._counters, self._settings.compiled == "budget")
        self._pilot = self._new_pilot()
        self._blocks: list[str] = []
        self._depth = 0
        self._stack: ExitStack | None = None
        self._resting = False  # the step that runs has no tape
        self._active: Tape | None = None
        self._steps = 0
        self._recorded = 0

    def _new_pilot(self) -> Pilot | FilePilot | None:
        settings = self._settings
        pilot: Pilot | FilePilot
        if settings.plan_path is not None and settings.plan is not None:
            pilot = FilePilot(settings.plan_path, settings.plan, self._clock)
        elif settings.auto:
            pilot = Pilot(
                settings.budget,
                self._clock,
                self._modules,
                settings.margin,
                self._counters,
                self.offloading,
                settings.recompute,
            )
        else:
            return None
        for op in self._kept_ops:
            pilot.never_drop(op)
        if isinstance(pilot, Pilot) and self._memory is not None:
            self._memory.recall(pilot)
        if isinstance(pilot, Pilot):
            regions = self._compiled
            pilot.chooser.more_to_try = lambda: regions.may_give_more
        return pilot

    def _look_at_compiled(self) -> None:
        """See whether compiled regions get another activation budget; then steps are others than those known."""
        pilot = self._pilot
        if not isinstance(pilot, Pilot) or not self._compiled.governed:
            return
        pilot.conclude_if_over()
        if self._compiled.look_at(pilot):
            self._learn_anew(pilot)

    def tighten_compiled(self) -> str | None:
        """Hold compiled regions to less, after memory ran out; what was done, in words, or None."""
        pilot = self._pilot
        words = self._compiled.tighten() if isinstance(pilot, Pilot) else None
        if words is not None:
            assert isinstance(pilot, Pilot)  # or there were no words
            self._learn_anew(pilot)
        return words

    def _learn_anew(self, pilot: Pilot) -> None:
        """Forget what is known of steps: they are others from now on."""
        roots = pilot.roots
        before = lasting(pilot, roots)
        self._readiness.end()  # which looks after its tape
        pilot.close()
        self._memory = None
        fresh = self._pilot = self._new_pilot()
        assert isinstance(fresh, Pilot)  # the options are the same
        fresh.meet(roots)
        fresh.before = before

    @property
    def counters(self) -> Counters:
        """What happened so far, the step that runs included."""
        counters = self._counters
        counters.replayed_ops, counters.recompute_seconds = self._clock.replayed_ops, self._clock.seconds
        if self.offloading is not None:
            self.offloading.count()
        return counters

    @property
    def blocks(self) -> list[str]:
        """Qualified names of the blocks in use, none before the model is known (at the latest after the first step)."""
        return [name for part in self._binding.regions.parts for name, _ in part.named] or self._blocks

    def _new_binding(self, policy: Policy) -> Binding:
        return Binding(policy, self._blocks_option, partial(table_for, self._kept_ops))

    def _begin_anew(self, binding: Binding) -> None:
        """Go on with another model: the books and the names of the one before are of no use for it."""
        self._binding = binding
        self.units.forget()
        for root in binding.roots:
            self.meet(root)
        self._blocks = []
        self._ledger = None
        self._modules.names.clear()
        if self._pilot is not None:
            self._readiness.end()  # which looks after its tape
            self._pilot.close()
            self._pilot = self._new_pilot()

    @property
    def pilot(self) -> Pilot | FilePilot | None:
        """Who chooses the tape under ``policy="auto"`` or a plan file."""
        return self._pilot

    @property
    def binding(self) -> Binding:
        """The model, and where in it which policy holds."""
        return self._binding

    @property
    def policy_in_force(self) -> Policy:
        """What steps run under that no pilot chooses a tape for."""
        return self._policy

    def put_in_force(self, policy: Policy, binding: Binding | None = None) -> None:
        """From the next step on another policy holds."""
        if binding is None:
            binding = self._new_binding(policy)
            if self._binding.bound:
                for root in self._binding.roots:
                    binding.bind(root)
        self._binding, self._policy = binding, policy

    def meet(self, root: nn.Module) -> None:
        """Find out which parameters of a model are sharded; wrappers around it have to be shown for themselves.

        Raises:
            ConfigurationError: some are, and an option does not go with that.
        """
        self.units.meet(root)
        if self.units:
            self.guarded = False
            if self.units.on_host:
                raise ConfigurationError(
                    f"{type(root).__name__}: cpu_offload=True keeps shards of FullyShardedDataParallel in host memory; "
                    "recomputation with that was never run. Leave cpu_offload out, or use fully_shard with a "
                    "CPUOffloadPolicy (base=ModelParallelStrategy)."
                )
            if self._settings.offload is not None:
                raise ConfigurationError(
                    f"offload={str(self._settings.offload.to)!r}: parameters of {type(root).__name__} are sharded, and "
                    "offload together with that is not known to be exact. Leave offload= out, or use base='ddp'."
                )

    def press(self) -> None:
        """Memory ran out: from the next step on, be ready for it.

        Not where parameters are sharded: what is evicted could not be computed again while they are not gathered.
        """
        if self.units:
            return
        if self.offloading is not None:
            self.offloading.on(device_of(self._binding.roots))
        tapes = [self._tape, self._moving_tape, self._pilot.tape if self._pilot is not None else None]
        self._readiness.begin([tape for tape in tapes if tape is not None])

    def check_place(self) -> None:
        """See whether what is kept can leave the device that the model is on; to be called when it is there.

        Raises:
            ConfigurationError: it cannot, or it would free nothing.
        """
        if self.offloading is not None:
            self.offloading.check(device_of(self._binding.roots))

    def _pressed(self, nbytes: int) -> None:
        if self._pilot is not None:
            self._pilot.pressure(nbytes)

    def _seconds_at(self, position: int) -> float:
        return self._pilot.seconds_at(position) if isinstance(self._pilot, Pilot) else 0.0

    # ------------------------------------------------------------------ a step

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

    def _never_again(self, op: str) -> None:
        """Keep the results of an op from now on."""
        self._kept_ops.add(op)
        if self._pilot is not None:
            self._pilot.never_drop(op)
        self._binding.regions.outside.clear()
        for part in self._binding.regions.parts:
            part.table.clear()

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
