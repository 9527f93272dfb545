"""The engine as users hold it: :class:`Remat`, entered around every training step."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from torch import nn

from lightning_remat.engine.ledger import Ledger
from lightning_remat.engine.verify import Verifier
from lightning_remat.errors import ConfigurationError
from lightning_remat.offload_option import Offload
from lightning_remat.planning.planfile import PlanFile, plan_path
from lightning_remat.runtime.recovery.changes import Change, snapshot_of
from lightning_remat.runtime.recovery.company import Company, is_distributed
from lightning_remat.runtime.recovery.once import SHARDED, Once
from lightning_remat.runtime.recovery.retry import Undo
from lightning_remat.runtime.recovery.tightening import Tightening
from lightning_remat.runtime.recovery.word import explain, listening
from lightning_remat.runtime.stepping import Stepping
from lightning_remat.runtime.tuning import remembering
from lightning_remat.runtime.tuning.pilot import Pilot

if TYPE_CHECKING:
    from lightning_remat.planning.plan import PlanResult
    from lightning_remat.reporting.plan_report import PlanReport
    from lightning_remat.reporting.ranks import RankFigures
    from lightning_remat.reporting.report import Report

T = TypeVar("T")


@dataclass(frozen=True)
class StepStats:
    """What the tape did in the last step: since :class:`Remat` was entered, backward included as far as it has run.

    Attributes:
        recorded_ops: ops whose results were dropped in forward.
        replayed_ops: ops that were run again for backward.
        replay_seconds: wall-clock time of those.

    Example:
        >>> import torch
        >>> from lightning_remat import Remat
        >>> remat = Remat(policy="full", blocks="0")
        >>> model = torch.nn.Sequential(torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU()), torch.nn.ReLU())
        >>> remat.bind(model)
        >>> with remat:
        ...     loss = model(torch.ones(2, 4)).sum()
        >>> loss.backward()
        >>> remat.stats.replayed_ops  # the matrix product, whose result GELU needs
        1
    """

    recorded_ops: int
    replayed_ops: int
    replay_seconds: float


class Remat(Stepping):
    """Activation recomputation for any PyTorch training loop, as a reusable context manager.

    Ops are recorded by a dispatch mode, on a tape as in dynamic tensor rematerialisation (Kirisame et al., 2021).
    Keeping block borders, every k-th or about sqrt(N) of them, is from "Training Deep Nets with Sublinear Memory Cost"
    (Chen et al., 2016); ``"selective"`` follows "Reducing Activation Recomputation in Large Transformer Models"
    (Korthikanti et al., 2022) and PyTorch's selective checkpointing, over ops instead of modules.

    Args:
        policy: ``"auto"``, ``"none"``, ``"full"``, ``"every:k"``, ``"sqrt"``, ``"selective"``, ``"offload_only"``
            (with ``offload``: nothing is recomputed, and what autograd saves leaves the device), a plan file
            (``"plan.json"``, from :meth:`save_plan`), a function over ops (:class:`OpInfo` in, ``"keep"`` or
            ``"recompute"`` out), or a mapping from module name patterns to policies (first match wins; modules that
            match nothing keep all). With a function, what enters and leaves a block is kept only if ``blocks`` are
            named.
        budget: peak device memory of a training step: bytes, ``"20GiB"``, or a share of the device, ``"80%"``. Used by
            ``policy="auto"`` and ``"offload_only"``.
        blocks: what the model's blocks are, if those found are not the right ones: a module class, a name pattern
            (``"encoder.layers.*"``), or a list of these.
        offload: where what is kept goes until backward asks for it: ``"cpu"`` (host memory), ``"disk"``, a directory,
            or an :class:`~lightning_remat.Offload`. None: it stays on the device.
        verify: compute dropped values again while the true ones are still there and compare bitwise, up to 64 MiB a
            step, until every kind of op has been checked. An op that differs is kept from then on.
        margin: what ``policy="auto"`` leaves free where no budget is given: bytes, a size, or a share of the device.
        retries: how often a batch is run again when memory runs out; 0 lets the error through.
        verify_every_n_steps: the same check as ``verify``, from the beginning, in every n-th step, so that it finds
            what begins to differ later (until then, gradients had it in them). The steps between cost nothing. A
            verified step needs more memory, so it waits for the next one while memory is being measured, and stops
            where memory runs out. Where nothing is dropped (``policy="none"``) there is nothing to verify.
        compiled: ``"leave"``: what regions compiled by ``torch.compile`` save is left to their compiler. ``"budget"``
            (with ``policy="auto"``): where no plan fits, regions that Inductor compiles are compiled again with another
            activation budget, by bisection among five, until one was measured to fit. No random number is drawn again;
            but where Inductor fuses otherwise, gradients can differ in their last bits from those of the model as it
            is compiled without. With ``"leave"`` they never do.

    Raises:
        ConfigurationError: an option that cannot work.

    Example:
        >>> import torch
        >>> from lightning_remat import Remat
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
        offload: str | Path | Offload | None = None,
        verify: bool = False,
        margin: int | str = "5%",
        retries: int = 3,
        verify_every_n_steps: int | None = None,
        compiled: str = "leave",
    ) -> None:
        super().__init__(
            policy=policy,
            budget=budget,
            blocks=blocks,
            offload=offload,
            verify=verify,
            margin=margin,
            retries=retries,
            verify_every_n_steps=verify_every_n_steps,
            compiled=compiled,
        )

    ranks: tuple[RankFigures, ...] = ()
    """Figures of the plan of each process, where several train together under Lightning, as far as they are known."""

    def __reduce__(self) -> Any:
        """A copy has the options, and nothing of what has been learned about a model."""
        return partial(type(self), **self._options), ()

    # ------------------------------------------------------------------ what users ask

    @property
    def policy(self) -> str:
        """The name of the policy in force; for ``"auto"`` the one it has taken."""
        return self._policy.name

    @property
    def summary(self) -> str:
        """The policy in force, who chose it, and the blocks it works on, in one line."""
        names = self.blocks
        blocks = (
            f"{len(names)} blocks: {names[0]} ... {names[-1]}"
            if len(names) > 1
            else f"block {names[0]}"
            if names
            else ""
        )
        chosen = f" ({self._pilot.sentence})" if self._pilot is not None else ""
        compiled = f"; {text}" if (text := self._compiled.sentence) else ""
        return f"recomputation policy {self.policy}{chosen}, {blocks or 'no blocks'}{compiled}"

    @property
    def offload(self) -> Offload | None:
        """Where what is kept may go, or None if it stays on the device."""
        return self._settings.offload

    @property
    def stats(self) -> StepStats:
        """Figures of the last step."""
        recorded = self._active.recorded if self._active is not None else self._recorded
        return StepStats(recorded, self._clock.replayed_ops, self._clock.seconds)

    @property
    def plan(self) -> PlanResult | None:
        """The plan under a budget, with the front it was taken from, or None before there is one.

        Steps of different sizes have plans of their own; this is the one for the largest so far.

        Example:
            >>> import torch
            >>> from lightning_remat import Remat
            >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 1))
            >>> remat = Remat(budget="1GiB")
            >>> for _ in range(3):
            ...     with remat:
            ...         loss = model(torch.ones(8, 64)).sum()
            ...     loss.backward()
            >>> remat.plan.peak_bytes < remat.budget_bytes
            True
            >>> remat.plan.chosen.extra_seconds == 0  # everything fits, so nothing is computed again
            True
        """
        return self._pilot.result if isinstance(self._pilot, Pilot) else None

    @property
    def measured_peak_bytes(self) -> int | None:
        """Measured peak of a step in bytes, with the memory between steps, or None where it is not measured (yet)."""
        if self.counters.peak_bytes is not None:
            return self.counters.peak_bytes
        main = self._pilot.main if isinstance(self._pilot, Pilot) else None
        return None if main is None or main.measured is None else main.static + main.measured.peak_bytes

    @property
    def budget_bytes(self) -> int | None:
        """The peak that a step is allowed, in bytes, or None without a budget, and before it is known what it comes to.

        A share of the device, and the default, are known once the first step has begun.
        """
        if self.counters.budget_bytes is not None or self.plan is None:
            return self.counters.budget_bytes
        return self.plan.budget_bytes

    def save_plan(self, path: str | os.PathLike[str]) -> None:
        """Write the plan for the largest step so far to a JSON file, for ``policy="..."`` in another run.

        Raises:
            ConfigurationError: there is no plan: no budget was given, or the second step has not begun. Or the path
                does not end in ``.json``, by which ``policy=`` knows a plan file.
            PlanFileError: the file cannot be written; one that is there already stays as it is.

        Example:
            >>> from lightning_remat import Remat
            >>> Remat(policy="full").save_plan("plan.json")
            Traceback (most recent call last):
            ...
            lightning_remat.errors.ConfigurationError: save_plan('plan.json'): there is no plan. It takes ...
        """
        _check_ending("save_plan", path)
        if self.plan is None:
            raise ConfigurationError(
                f"save_plan({str(path)!r}): there is no plan. It takes policy='auto', or 'offload_only' with a "
                "budget, and is made when the second step begins."
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

    def report(self) -> Report | PlanReport:
        """What was kept and what runs again, to print plainly or with ``rich``.

        Under a budget, once there is a plan: predicted and measured peak and time, and per module what is kept and
        recomputed at which price; it can be saved as a page, a plot or data (``report().save("plan.html")``). Otherwise
        a table of the first step: bytes kept, bytes dropped, ops replayed and the time that took.

        Returns:
            A :class:`~lightning_remat.reporting.plan_report.PlanReport` where there is a plan, otherwise a
            :class:`~lightning_remat.reporting.report.Report`. Both can be printed and saved.

        Example:
            >>> from lightning_remat import Remat
            >>> print(Remat(policy="full").report())  # doctest: +NORMALIZE_WHITESPACE
            recomputation policy full, no blocks
            ┏━━━━━━━━┳━━━━━┳━━━━━━┳━━━━━━━━━┳━━━━━━━━━━━━━━┳━━━━━━━━━━━┓
            ┃ module ┃ ops ┃ kept ┃ dropped ┃ replayed ops ┃ replay ms ┃
            ┡━━━━━━━━╇━━━━━╇━━━━━━╇━━━━━━━━━╇━━━━━━━━━━━━━━╇━━━━━━━━━━━┩
            │ all    │     │  0 B │     0 B │            0 │      0.00 │
            └────────┴─────┴──────┴─────────┴──────────────┴───────────┘
            no step yet
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
                ranks=self.ranks,
                compiled=self._compiled.sentence,
            )
        if self._ledger is None and self._counters.steps:
            return report_table(self.summary, self.blocks, None, "nothing is listed under a plan file, or 'none'")
        if self._policy.off:
            return report_table(
                self.summary, self.blocks, None, "policy 'none' records nothing; measure_peak measures it"
            )
        return report_table(self.summary, self.blocks, self._ledger)

    @property
    def ledger(self) -> Ledger | None:
        """The books of the first step, behind :meth:`report`, or None where none are kept yet, and under a budget."""
        return self._ledger

    @property
    def verifier(self) -> Verifier | None:
        """What ``verify=True`` or ``verify_every_n_steps=`` has found so far, or None without them."""
        return self._verifier

    # ------------------------------------------------------------------ checkpoints

    def state_dict(self) -> dict[str, Any]:
        """What has been learned, for a checkpoint: plans with what they rest on, ops that are kept, counters.

        Plain strings, numbers, lists and dictionaries, of a few MiB at most; the smallest shapes are left out first.
        Lightning's checkpoints have it without further ado.

        Example:
            >>> from lightning_remat import Remat
            >>> remat, resumed = Remat(budget="1GiB"), Remat(budget="1GiB")
            >>> resumed.load_state_dict(remat.state_dict())
        """
        pilot = self._pilot if isinstance(self._pilot, Pilot) else None
        if pilot is not None and not self._depth:
            pilot.conclude_if_over()
        state = remembering.write(self._counters, self._kept_ops, pilot)
        return state | {"compiled": self._compiled.state(self._settings.budget)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with what another run learned, from the next step on; before or after :meth:`bind`.

        Nothing depends on it but memory and time. What does not fit (another budget, device or model) is planned or
        traced anew; a state that cannot be read is passed over, with a warning. One from before the first step leaves
        in place what is known already.
        """
        found = remembering.read(state)
        if found is None:
            return
        found.count(self._counters)
        self._compiled.resume(state.get("compiled"), self._settings.budget)
        for op in found.kept_ops:
            self._never_again(op)
        if found.memory is not None and isinstance(self._pilot, Pilot):
            self._memory = found.memory
            self._meeting = True
            self._readiness.end()
            self._pilot.close()
            self._pilot = self._new_pilot()

    # ------------------------------------------------------------------ the model

    def bind(self, root: nn.Module) -> None:
        """Make the model known before the first step, so that its blocks are found and options checked at once.

        Strategies call this at setup. In a plain loop it is optional: the model is met when the first step calls it.

        Args:
            root: the whole model; names of blocks start from it.

        Raises:
            ConfigurationError: no blocks where the policy needs them, a pattern that matches nothing, or a model that
                already does activation checkpointing.

        Example:
            >>> import torch
            >>> from lightning_remat import Remat
            >>> model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(4, 4)) for _ in range(3)))
            >>> remat = Remat(policy="full")
            >>> remat.bind(model)
            >>> remat.blocks
            ['0', '1', '2']
        """
        if not self._policy.off:
            binding = self._new_binding(self._settings.policy)
            binding.bind(root)
            self._policy = self._settings.policy
            self._steps = 0
            self._begin_anew(binding)

    def close(self) -> None:
        """Stop what is being counted, if anything is: strategies call this when training ends. It may go on later."""
        if isinstance(self._pilot, Pilot):
            self._pilot.conclude_if_over()
        self._readiness.end()
        if self._pilot is not None:
            self._pilot.close()
        if self.offloading is not None:
            self.offloading.close()

    # ------------------------------------------------------------------ out of memory

    def attempt(self, step: Callable[[], T], *changes: Change) -> T:
        """Run a training step of a plain loop so that running out of memory, or a failure of offload, loses no batch.

        Args:
            step: forward (under this context) and backward; called again if memory runs out, or if something cannot
                be had back that had left the device, after everything that it changed has been put back. It may step
                optimizers.
            changes: the models and optimizers that the step changes; also its gradient scaler, if the step updates
                that, and schedulers that it steps. Gradients, buffers, random streams (PyTorch's, Python's, NumPy's),
                metrics and plain attributes of modules are put back, and what optimizers have done.

        Returns:
            What ``step`` returned.

        Raises:
            ConfigurationError: a model is one of several replicas (``DistributedDataParallel``), and none of them can
                run its part again by itself.
            NoMemoryLeft: it does not fit, whatever is done; the models are as before the step.
            OffloadError: something cannot be had back, and the step cannot be undone; it says why.

        Example:
            >>> import torch
            >>> from lightning_remat import Remat
            >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.Linear(8, 1))
            >>> remat = Remat()
            >>> def step():
            ...     with remat:
            ...         loss = model(torch.ones(2, 4)).square().mean()
            ...     loss.backward()
            ...     return loss.item()
            >>> loss = remat.attempt(step, model)
        """
        undo: list[Undo] = [snapshot_of(changes)]
        self.guarded = True
        if is_distributed():
            undo.insert(0, Company())
        for module in [c for c in changes if isinstance(c, nn.Module)]:
            self.meet(module)
        with listening():
            try:
                return self.run(step, undo)
            except BaseException as error:
                explain(error, at_exit=True)
                raise

    def run(
        self,
        step: Callable[[], T],
        undo: Sequence[Undo],
        *,
        deferred: bool = False,
        ours: Callable[[BaseException], bool] = lambda error: True,
    ) -> T:
        """What :meth:`attempt` does, for trainers; see :meth:`~lightning_remat.runtime.recovery.retry.Retry.run`."""
        if self.units:
            undo, deferred = [Once(SHARDED)], False
        try:
            return self.retry.run(step, Tightening(self), undo, deferred=deferred, ours=ours)
        finally:
            if self.offloading is not None and not self.retry.running:
                self.offloading.step_over()


def _check_ending(method: str, path: str | os.PathLike[str]) -> None:
    if plan_path(path) is None:
        raise ConfigurationError(
            f"{method}({str(path)!r}): policy= knows a plan file by its ending; give a name that ends in .json."
        )
