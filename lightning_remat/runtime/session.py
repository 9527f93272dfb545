"""The engine as users hold it: :class:`Remat`, entered around every training step."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from lightning_remat.engine import (
    generators,
    ledger,
    plain,
    planned,
    regions,
    replay,
    rules,
    store,
    tape,
    transforms,
    values,
    verify,
    writes,
)
from lightning_remat.engine.ledger import Ledger, LedgerTape, ModuleStack
from lightning_remat.engine.opaque import hide_from_compiler
from lightning_remat.engine.plain import backward_outside
from lightning_remat.engine.planned import PlannedTape
from lightning_remat.engine.policies import OpInfo, Policy, checked_verdict
from lightning_remat.engine.replay import Clock
from lightning_remat.engine.rules import Rule
from lightning_remat.engine.tape import Tape
from lightning_remat.engine.transforms import transforms_allowed
from lightning_remat.engine.verify import Verifier
from lightning_remat.errors import ConfigurationError
from lightning_remat.planning.planfile import PlanFile, plan_path
from lightning_remat.runtime import (
    choosing,
    fallback,
    from_file,
    known,
    measuring,
    memory,
    pilot,
    relief,
    remembering,
    resting,
    static,
    tracer,
    tracing,
)
from lightning_remat.runtime.binding import Binding
from lightning_remat.runtime.counters import Counters
from lightning_remat.runtime.discovery import Discovery
from lightning_remat.runtime.from_file import FilePilot
from lightning_remat.runtime.pilot import Pilot
from lightning_remat.runtime.remembering import Memory
from lightning_remat.runtime.retry import Retry, Undo
from lightning_remat.runtime.settings import checked, table_for
from lightning_remat.runtime.snapshot import Snapshot
from lightning_remat.runtime.tightening import Fixed, Tightening
from lightning_remat.runtime.tracing import TracingTape

if TYPE_CHECKING:
    from lightning_remat.planning.plan import PlanResult
    from lightning_remat.reporting.plan_report import PlanReport
    from lightning_remat.reporting.report import Report

T = TypeVar("T")

log = logging.getLogger("lightning_remat")

hide_from_compiler(
    generators, ledger, plain, planned, regions, replay, rules, store, tape, transforms, values, verify, writes
)
# A step that is traced, planned or measured runs these inside of what may be compiled.
hide_from_compiler(
    choosing, fallback, from_file, known, measuring, memory, pilot, relief, resting, static, tracer, tracing
)


@dataclass(frozen=True)
class StepStats:
    """What the tape did in the last step: since :class:`Remat` was entered, backward included as far as it has run.

    Attributes:
        recorded_ops: ops whose results were dropped in forward.
        replayed_ops: ops that were run again for backward.
        replay_seconds: wall-clock time of those.
    """

    recorded_ops: int
    replayed_ops: int
    replay_seconds: float


class Remat:
    """Activation recomputation for any PyTorch training loop, as a reusable context manager.

    Args:
        policy: ``"auto"``, ``"none"``, ``"full"``, ``"every:k"``, ``"sqrt"``, ``"selective"``, a plan file
            (``"plan.json"``, from :meth:`save_plan`), a function over ops (:class:`OpInfo` in, ``"keep"`` or
            ``"recompute"`` out), or a mapping from module name patterns to policies (first match wins; modules that
            match nothing keep all). With a function, what enters and leaves a block is kept only if ``blocks`` are
            named.
        budget: peak device memory of a training step: bytes, ``"20GiB"``, or a share of the device, ``"80%"``. Used by
            ``policy="auto"`` only.
        blocks: what the model's blocks are, if those found are not the right ones: a module class, a name pattern
            (``"encoder.layers.*"``), or a list of these.
        offload: not available yet; must be None.
        verify: compute dropped values again while the true ones are still there and compare bitwise, up to 64 MiB a
            step, until every kind of op has been checked. An op that differs is kept from then on.
        margin: what ``policy="auto"`` leaves free where no budget is given: bytes, a size, or a share of the device.
        retries: how often a batch is run again when memory runs out; 0 lets the error through.
        verify_every_n_steps: the same check as ``verify``, from the beginning, in every n-th step, so that it finds
            what begins to differ later (until then, gradients had it in them). The steps between cost nothing. A
            verified step needs more memory, so it waits for the next one while memory is being measured, and stops
            where memory runs out. Where nothing is dropped (``policy="none"``) there is nothing to verify.

    Raises:
        ConfigurationError: an option that cannot work.

    Example:
        >>> import torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.Linear(8, 1))
        >>> remat = Remat(policy="selective")
        >>> with remat:
        ...     loss = model(torch.ones(2, 4)).square().mean()
        >>> loss.backward()
        >>> remat.stats.replayed_ops
        1
    """

    def __init__(
        self,
        policy: Any = "auto",
        *,
        budget: int | str | None = None,
        blocks: Any = None,
        offload: str | None = None,
        verify: bool = False,
        margin: int | str = "5%",
        retries: int = 3,
        verify_every_n_steps: int | None = None,
    ) -> None:
        self._options = {
            "budget": budget,
            "blocks": blocks,
            "offload": offload,
            "verify": verify,
            "margin": margin,
            "retries": retries,
            "verify_every_n_steps": verify_every_n_steps,
            "policy": policy,
        }
        self._settings = checked(policy, budget, blocks, offload, verify, margin, retries, verify_every_n_steps)
        self.counters = Counters()
        self.retry = Retry(self._settings.retries, self.counters)
        self.fixed: Fixed | None = None
        self.guarded = False  # whoever runs steps again that ran out of memory says so
        if self._settings.plan_path is not None:
            self._options["policy"] = os.path.abspath(self._settings.plan_path)  # for a copy in another folder
        self._policy = self._settings.policy
        self._blocks_option = blocks
        self._kept_ops: set[str] = set()
        self._clock = Clock()
        self._tape = Tape(self._clock)
        self._modules = ModuleStack()
        self._ledger: Ledger | None = None
        self._verifier = Verifier(self._never_again) if verify or verify_every_n_steps is not None else None
        self._verify_always = verify
        self._verify_due = False
        self._binding = self._new_binding(self._policy)
        self._memory: Memory | None = None  # from a checkpoint, until a step begins with it
        self._meeting = False  # the model is to be met although there is a plan already
        self._pilot = self._new_pilot()
        self._blocks: list[str] = []
        self._depth = 0
        self._stack: ExitStack | None = None
        self._resting = False  # the step that runs has no tape
        self._active: Tape | None = None
        self._steps = 0
        self._recorded = 0

    def __reduce__(self) -> Any:
        """A copy has the options, and nothing of what has been learned about a model."""
        return partial(type(self), **self._options), ()

    def _new_pilot(self) -> Pilot | FilePilot | None:
        settings = self._settings
        pilot: Pilot | FilePilot
        if settings.plan_path is not None and settings.plan is not None:
            pilot = FilePilot(settings.plan_path, settings.plan, self._clock)
        elif settings.auto:
            pilot = Pilot(settings.budget, self._clock, self._modules, settings.margin, self.counters)
        else:
            return None
        for op in self._kept_ops:
            pilot.never_drop(op)
        if isinstance(pilot, Pilot) and self._memory is not None:
            self._memory.recall(pilot)
        return pilot

    # ------------------------------------------------------------------ what users ask

    @property
    def policy(self) -> str:
        """The name of the policy in force; for ``"auto"`` the one it has taken."""
        return self._policy.name

    @property
    def blocks(self) -> list[str]:
        """Qualified names of the blocks in use; empty until the model is known (at the latest after the first step)."""
        return [name for part in self._binding.regions.parts for name, _ in part.named] or self._blocks

    @property
    def summary(self) -> str:
        """One line: the policy in force, who chose it, and the blocks it works on."""
        names = self.blocks
        blocks = (
            f"{len(names)} blocks: {names[0]} ... {names[-1]}"
            if len(names) > 1
            else f"block {names[0]}"
            if names
            else ""
        )
        chosen = f" ({self._pilot.sentence})" if self._pilot is not None else ""
        return f"recomputation policy {self.policy}{chosen}, {blocks or 'no blocks'}"

    @property
    def stats(self) -> StepStats:
        """Figures of the last step."""
        recorded = self._active.recorded if self._active is not None else self._recorded
        return StepStats(recorded, self._clock.replayed_ops, self._clock.seconds)

    @property
    def plan(self) -> PlanResult | None:
        """The plan under a budget, with the front it was taken from; None before there is one.

        Steps of different sizes have plans of their own: this is the one for the largest so far.
        """
        return self._pilot.result if isinstance(self._pilot, Pilot) else None

    @property
    def measured_peak_bytes(self) -> int | None:
        """Measured peak of a step, memory between steps included; None: not measured (yet)."""
        if self.counters.peak_bytes is not None:
            return self.counters.peak_bytes
        main = self._pilot.main if isinstance(self._pilot, Pilot) else None
        return None if main is None or main.measured is None else main.static + main.measured.peak_bytes

    @property
    def budget_bytes(self) -> int | None:
        """The peak that a step is allowed; None: there is no budget, or it is not known yet what it comes to."""
        if self.counters.budget_bytes is not None or self.plan is None:
            return self.counters.budget_bytes
        return self.plan.budget_bytes

    def save_plan(self, path: str | os.PathLike[str]) -> None:
        """Write the plan for the largest step so far to a JSON file, for ``policy="..."`` in another run.

        Raises:
            ConfigurationError: there is no plan: no budget was given, or the second step has not begun. Or the path
                does not end in ``.json``, by which ``policy=`` knows a plan file.
            PlanFileError: the file cannot be written; one that is there already stays as it is.
        """
        _check_ending("save_plan", path)
        if self.plan is None:
            raise ConfigurationError(
                f"save_plan({str(path)!r}): there is no plan. It takes policy='auto' with a budget, and is made when "
                "the second step begins."
            )
        PlanFile.of(self.plan).save(path)

    def save_tightened_plan(self, path: str | os.PathLike[str]) -> None:
        """Write the plan with the smallest peak for the largest known step, for ``policy="..."`` in another run.

        Raises:
            ConfigurationError: no step has been traced, or the path does not end in ``.json``.
            PlanFileError: the file cannot be written; one that is there already stays as it is.
        """
        _check_ending("save_tightened_plan", path)
        steps = self._pilot.known.all if isinstance(self._pilot, Pilot) else []
        if not steps:
            raise ConfigurationError(
                f"save_tightened_plan({str(path)!r}): no step is known. It takes policy='auto' with a budget, and one "
                "step that was traced."
            )
        PlanFile.of(max(steps, key=lambda k: (k.nbytes, k.traced)).tightest_plan()).save(path)

    # ------------------------------------------------------------------ checkpoints

    def state_dict(self) -> dict[str, Any]:
        """What has been learned, for a checkpoint: plans with what they rest on, ops that are kept, counters.

        Plain strings, numbers, lists and dictionaries, of a few MiB at most; the smallest shapes are left out first.
        Lightning's checkpoints have it without further ado.
        """
        pilot = self._pilot if isinstance(self._pilot, Pilot) else None
        if pilot is not None and not self._depth:
            pilot.conclude_if_over()
        return remembering.write(self.counters, self._kept_ops, pilot)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with what another run learned, from the next step on; before or after :meth:`bind`.

        Nothing depends on it but memory and time. What does not fit (another budget, device or model) is planned or
        traced anew; a state that cannot be read is passed over, with a warning. One from before the first step leaves
        in place what is known already.
        """
        found = remembering.read(state)
        if found is None:
            return
        found.count(self.counters)
        for op in found.kept_ops:
            self._never_again(op)
        if found.memory is not None and isinstance(self._pilot, Pilot):
            self._memory = found.memory
            self._meeting = True
            self._pilot.close()
            self._pilot = self._new_pilot()

    def report(self) -> Report | PlanReport:
        """What was kept and what runs again, to print plainly or with ``rich``.

        Under a budget, once there is a plan: predicted and measured peak and time, and per module what is kept and
        recomputed at which price; it can be saved as a page, a plot or data (``report().save("plan.html")``). Otherwise
        a table of the first step: bytes kept, bytes dropped, ops replayed and the time that took.
        """
        # Upwards, and only for those who ask.
        from lightning_remat.reporting.plan_report import plan_report
        from lightning_remat.reporting.report import report_table

        main = self._pilot.main if isinstance(self._pilot, Pilot) else None
        result = self._pilot.whole_result() if isinstance(self._pilot, Pilot) else None
        if main is not None and result is not None:
            measured = main.measured
            return plan_report(
                result,
                self.blocks,
                measured_peak_bytes=None if measured is None else result.static_bytes + measured.peak_bytes,
                measured_extra_seconds=main.extra_seconds,
                static_parts=main.parts,
                timeline=None if measured is None else measured.timeline,
            )
        return report_table(self.summary, self.blocks, self._ledger)

    @property
    def ledger(self) -> Ledger | None:
        """The books of the first step, behind :meth:`report`."""
        return self._ledger

    @property
    def verifier(self) -> Verifier | None:
        """What ``verify=True`` or ``verify_every_n_steps=`` has found so far; None without them."""
        return self._verifier

    # ------------------------------------------------------------------ the model

    def bind(self, root: nn.Module) -> None:
        """Make the model known before the first step, so that its blocks are found and options checked at once.

        Strategies call this at setup. In a plain loop it is optional: the model is met when the first step calls it.

        Raises:
            ConfigurationError: no blocks where the policy needs them, a pattern that matches nothing, or a model that
                already does activation checkpointing.
        """
        if not self._policy.off:
            binding = self._new_binding(self._settings.policy)
            binding.bind(root)
            self._policy = self._settings.policy
            self._steps = 0
            self._begin_anew(binding)

    def _new_binding(self, policy: Policy) -> Binding:
        return Binding(policy, self._blocks_option, partial(table_for, self._kept_ops))

    def _begin_anew(self, binding: Binding) -> None:
        """Go on with another model: the books and the names of the one before are of no use for it."""
        self._binding = binding
        self._blocks = []
        self._ledger = None
        self._modules.names.clear()
        if self._pilot is not None:
            self._pilot.close()
            self._pilot = self._new_pilot()

    def close(self) -> None:
        """Stop what is being counted, if anything is: strategies call this when training ends. It may go on later."""
        if isinstance(self._pilot, Pilot):
            self._pilot.conclude_if_over()
        if self._pilot is not None:
            self._pilot.close()

    # ------------------------------------------------------------------ out of memory

    def attempt(self, step: Callable[[], T], *changes: nn.Module | Optimizer) -> T:
        """Run a training step of a plain loop so that running out of memory loses no batch.

        Args:
            step: forward (under this context) and backward; called again if memory runs out, after everything that it
                changed has been put back. It may step optimizers.
            changes: the models and optimizers that the step changes. Gradients, buffers, random streams (PyTorch's,
                Python's, NumPy's), metrics and plain attributes of modules are put back, and what optimizers have done.

        Returns:
            What ``step`` returned.

        Raises:
            NoMemoryLeft: it does not fit, whatever is done; the models are as before the step.

        Example:
            >>> import torch
            >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.Linear(8, 1))
            >>> remat = Remat()
            >>> def step():
            ...     with remat:
            ...         loss = model(torch.ones(2, 4)).square().mean()
            ...     loss.backward()
            ...     return loss.item()
            >>> loss = remat.attempt(step, model)
        """
        self.guarded = True
        modules = [c for c in changes if isinstance(c, nn.Module)]
        optimizers = [c for c in changes if not isinstance(c, nn.Module)]
        return self.run(step, [Snapshot(modules, optimizers, manual=bool(optimizers))])

    def run(
        self,
        step: Callable[[], T],
        undo: Sequence[Undo],
        *,
        deferred: bool = False,
        ours: Callable[[BaseException], bool] = lambda error: True,
    ) -> T:
        """What :meth:`attempt` does, for trainers; see :meth:`~lightning_remat.runtime.retry.Retry.run`."""
        return self.retry.run(step, Tightening(self), undo, deferred=deferred, ours=ours)

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

    def press(self) -> None:
        """Memory ran out: from now on, be ready for it."""

    # ------------------------------------------------------------------ a step

    def __enter__(self) -> Remat:
        """Begin a step: what autograd saves from here on is the tape's business."""
        self._depth += 1
        if self._depth > 1 or self._policy.off or not torch.is_grad_enabled():
            return self
        try:
            self._begin()
        except BaseException:
            self._end()
            self._depth -= 1
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End it. Backward may run before or after."""
        self._depth -= 1
        if self._depth == 0 and self._resting:
            self._resting = False
            self.counters.steps += kind is None
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
        if self._pilot is not None and self._pilot.resting(self.guarded):
            self._resting = True
            self._recorded = 0
            self._clock.reset()
            return
        tape = self._planned_tape() or self._choose_tape()
        self._clock.reset()
        stack = self._stack = ExitStack()
        self._active = tape
        self._verify(tape)
        tape.recorded = 0
        regions = self._binding.regions
        if self._needs_modules:
            tape.decide = self._decide
        if not isinstance(tape, PlannedTape):
            stack.callback(regions.remove)
            regions.install(tape)
        if not self._binding.final and not isinstance(tape, PlannedTape):
            stack.enter_context(Discovery(regions, self._binding.met).watching())
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

    def _only_met(self, root: nn.Module) -> list[Any]:
        """A root is met under a plan, where blocks are not watched."""
        self._binding.met(root)
        return []

    @property
    def _needs_modules(self) -> bool:
        return self._policy.ask is not None or any(part.ask is not None for _, part in self._policy.parts)

    def _choose_tape(self) -> Tape:
        if self._ledger is None:
            for root in self._binding.roots:
                self._modules.name(root)
            ledger = self._ledger = Ledger(self._modules)
            tape: Tape = LedgerTape(self._clock, ledger)
            self._clock.on_replay = ledger.replayed
        else:
            tape = self._tape
            self._clock.on_replay = None
        return tape

    def _verify(self, tape: Tape) -> None:
        """Let the verifier look at this step, if that is to be."""
        verifier, every = self._verifier, self._settings.verify_every_n_steps
        if verifier is None:
            return
        if every is not None:
            watched = isinstance(self._pilot, Pilot) and self._pilot.watching
            due = (self.counters.steps + 1) % every == 0
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
        self.counters.verified, self.counters.verified_different = verifier.compared, verifier.differed
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
        meeting, self._meeting = self._meeting, False
        self.counters.steps += 1
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
        if any(part.expected and part.calls for part in parts):
            return
        if self._steps > 1 and not self._binding.bound and any(part.named for part in parts):
            self._begin_anew(self._new_binding(self._policy))  # another model than before: meet it in the next step
        elif self._steps == 1 and (self._policy.needs_blocks or self._policy.parts):
            warnings.warn(
                f"policy={self._policy.name!r} works on blocks, and the first step ran none that could be watched "
                "(what is compiled or scripted cannot): everything was kept. Name others with blocks=, or use "
                "policy='selective'.",
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


def _check_ending(method: str, path: str | os.PathLike[str]) -> None:
    if plan_path(path) is None:
        raise ConfigurationError(
            f"{method}({str(path)!r}): policy= knows a plan file by its ending; give a name that ends in .json."
        )
