"""What an engine has, from one step to the next: its options, a policy in force, a model, and who chooses its tapes.

How a step runs with it is in :mod:`~lightning_remat.runtime.stepping`.
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from functools import partial
from typing import Any
from weakref import WeakMethod

from torch import nn

from lightning_remat.engine.ledger import Ledger, ModuleStack
from lightning_remat.engine.moving import MovingTape
from lightning_remat.engine.policies import Policy
from lightning_remat.engine.replay import Clock
from lightning_remat.engine.sharded import Units
from lightning_remat.engine.tape import Tape
from lightning_remat.engine.verify import Verifier
from lightning_remat.errors import ConfigurationError
from lightning_remat.runtime.binding import Binding
from lightning_remat.runtime.compiled import CompiledRegions, lasting
from lightning_remat.runtime.counters import Counters
from lightning_remat.runtime.offloading import Offloading
from lightning_remat.runtime.recovery.readiness import Readiness
from lightning_remat.runtime.recovery.retry import Retry
from lightning_remat.runtime.recovery.tightening import Fixed
from lightning_remat.runtime.settings import checked, table_for
from lightning_remat.runtime.static import device_of
from lightning_remat.runtime.tuning.from_file import FilePilot
from lightning_remat.runtime.tuning.pilot import Pilot
from lightning_remat.runtime.tuning.remembering import Memory


class BetweenSteps:
    """What one engine has between steps.

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

    def _never_again(self, op: str) -> None:
        """Keep the results of an op from now on."""
        self._kept_ops.add(op)
        if self._pilot is not None:
            self._pilot.never_drop(op)
        self._binding.regions.outside.clear()
        for part in self._binding.regions.parts:
            part.table.clear()
