"""Does it fit, under which plan, at which price, with which batch size: answered without a device.

A step of each batch size is traced on fake tensors and planned for the budget. What is there between steps is counted:
parameters, buffers, the batch, and the optimizer's state, which a step of the optimizer on fake tensors brings into
being. The optimizer's own step is a second peak, after backward has let go of the activations; whichever is higher
counts.

Known weaknesses: see :mod:`~lightning_remat.planning.fake.step`; gradients are taken to be freed between steps, as
``zero_grad()`` and Lightning do; with several processes, what these add (buckets, shards) is not counted.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim.optimizer import Optimizer
from torch.utils._pytree import tree_leaves

from lightning_remat.errors import ConfigurationError
from lightning_remat.planning.fake.meter import Meter
from lightning_remat.planning.fake.step import fake_batch, fake_mode, fake_module, trace_of
from lightning_remat.planning.plan import Candidate, judged
from lightning_remat.planning.planner import Planner
from lightning_remat.planning.simulation import simulate
from lightning_remat.planning.trace import Trace
from lightning_remat.runtime.target import Target, shown

PRECISIONS: dict[str, tuple[torch.dtype | None, torch.dtype | None]] = {
    # Lightning's names -> (dtype of autocast, dtype of everything)
    "32-true": (None, None),
    "bf16-mixed": (torch.bfloat16, None),
    "16-mixed": (torch.float16, None),
    "bf16-true": (None, torch.bfloat16),
    "16-true": (None, torch.float16),
}
DEVICES = ("cuda", "cpu")
MARGIN = 0.1
"""Share of the memory that is left free by default, for what an estimate cannot see."""


@dataclass(frozen=True, kw_only=True)
class Fit:
    """What one batch size comes to; bytes include what is there between steps.

    Attributes:
        batch_size: number of samples.
        plain_bytes: peak without recomputation.
        smallest_bytes: the smallest peak that a plan has; None where none is needed.
        chosen: the plan within the budget with the least extra time; None if none fits.
        planned_bytes: its peak.
        step_seconds: forward and backward, a rough estimate.
    """

    batch_size: int
    plain_bytes: int
    smallest_bytes: int | None
    chosen: Candidate | None
    planned_bytes: int | None
    step_seconds: float


@dataclass(frozen=True, kw_only=True)
class Static:
    """Bytes that are there between steps, and what the optimizer's step takes on top.

    Attributes:
        parameters, buffers, optimizer_state: between steps.
        gradients: come into being in every step.
        optimizer_scratch: most that the optimizer's step has at once, above all of these.
        optimizers: names of their classes.
    """

    parameters: int
    buffers: int
    optimizer_state: int
    gradients: int
    optimizer_scratch: int
    optimizers: tuple[str, ...]

    @property
    def between(self) -> int:
        """Bytes between steps."""
        return self.parameters + self.buffers + self.optimizer_state

    @property
    def optimizer_peak(self) -> int:
        """Bytes in the optimizer's step."""
        return self.between + self.gradients + self.optimizer_scratch


class Estimator:
    """Answers for one model on one device; every batch size is looked at once.

    Args:
        target: the model and its step.
        budget: bytes that training may take.
        device: ``"cuda"`` or ``"cpu"``.
        precision: one of :data:`PRECISIONS`.

    Raises:
        ConfigurationError: an unknown device or precision, or an optimizer that cannot be estimated.
    """

    def __init__(self, target: Target, budget: int, device: str = "cuda", precision: str = "32-true") -> None:
        if device not in DEVICES:
            raise ConfigurationError(f"--device={device!r}: estimates are for {' and '.join(DEVICES)}.")
        name = {"32": "32-true", "bf16": "bf16-mixed", "16": "16-mixed"}.get(precision, precision)
        if name not in PRECISIONS:
            raise ConfigurationError(f"--precision={precision!r} is unknown; there are {', '.join(PRECISIONS)}.")
        self.target = target
        self.budget = budget
        self.device = device
        self.precision = name
        self.autocast, self.dtype = PRECISIONS[name]
        self.static = self._static()
        self.fits: dict[int, Fit] = {}

    # ------------------------------------------------------------------ what users ask

    def at(self, batch_size: int) -> Fit:
        """One batch size.

        Raises:
            ConfigurationError: the step cannot be traced.
        """
        found = self.fits.get(batch_size)
        if found is None:
            found = self.fits[batch_size] = self._at(batch_size)
        return found

    def table(self, most: int) -> list[Fit]:
        """Powers of two, up to the first that does not fit under any plan, and at most ``most``.

        Raises:
            ConfigurationError: the step cannot be traced with one sample, nor with two.
        """
        rows: list[Fit] = []
        size = 1
        while size <= most:
            try:
                rows.append(self.at(size))
            except ConfigurationError:
                if size > 1 or most == 1:
                    raise
                size = 2  # a batch norm that needs two samples, for instance; a real problem comes up again
                continue
            if rows[-1].chosen is None:
                break
            size *= 2
        return rows

    def largest(self, rows: list[Fit], most: int, planned: bool) -> int:
        """The largest batch that fits, by bisection between the sizes of a table; 0 if not even the first does.

        Args:
            rows: see :meth:`table`.
            most: look no further.
            planned: under some plan; False: without recomputation.
        """

        def fits(fit: Fit) -> bool:
            return fit.chosen is not None if planned else fit.plain_bytes <= self.budget

        good = max((row.batch_size for row in rows if fits(row)), default=0)
        bad = min((row.batch_size for row in rows if not fits(row)), default=most + 1)
        if not good:
            return 0
        straight = True
        while bad - good > 1:
            # Memory is nearly a straight line over batch size; every second guess makes sure that it ends soon.
            middle = self._where_it_meets(good, bad, planned) if straight else (good + bad) // 2
            straight = not straight
            if fits(self.at(middle)):
                good = middle
            else:
                bad = middle
        return good

    def _where_it_meets(self, good: int, bad: int, planned: bool) -> int:
        """The size at which a straight line through two others meets the budget."""
        if bad not in self.fits:
            return (good + bad) // 2
        need, most = (f.smallest_bytes if planned else f.plain_bytes for f in (self.fits[good], self.fits[bad]))
        if need is None or most is None or most <= need:
            return (good + bad) // 2
        guess = good + int((bad - good) * (self.budget - need) / (most - need))
        return min(max(guess, good + 1), bad - 1)

    # ------------------------------------------------------------------ one batch size

    def _at(self, batch_size: int) -> Fit:
        batch = self.target.make_batch(batch_size)
        mode = fake_mode()
        copy = self._copy(mode)
        stand_in = fake_batch(mode, batch, self.dtype)
        try:
            trace = trace_of(self._step, copy, stand_in, mode, self.device)
        except ConfigurationError:
            raise
        except Exception as error:
            raise ConfigurationError(
                f"a training step with {batch_size} samples failed in the estimate with {shown(error)}. It runs "
                "without a trainer, and without the content of activations; if it needs either, give a simpler step "
                "with --step."
            ) from error
        between = self.static.between + _bytes(t for t in tree_leaves(stand_in) if isinstance(t, Tensor))
        return self._judged(batch_size, trace, between)

    def _judged(self, batch_size: int, trace: Trace, between: int) -> Fit:
        optimizer = self.static.optimizer_peak
        room = self.budget - between
        chosen: Candidate | None = judged(trace, [False] * len(trace.ops))
        assert chosen is not None
        plain = max(between + chosen.peak_bytes, optimizer)
        smallest = None
        if chosen.peak_bytes > room:  # planning takes longer than tracing
            planner = Planner(trace)
            smallest = max(between + planner.smallest().peak_bytes, optimizer)
            chosen = planner.within(room)
        if optimizer > self.budget:
            chosen, smallest = None, smallest or plain
        return Fit(
            batch_size=batch_size,
            plain_bytes=plain,
            smallest_bytes=smallest,
            chosen=chosen,
            planned_bytes=None if chosen is None else max(between + chosen.peak_bytes, optimizer),
            step_seconds=trace.forward_seconds + trace.backward_seconds,
        )

    def _step(self, module: nn.Module, batch: Any) -> Any:
        around: AbstractContextManager[Any] = nullcontext()
        if self.autocast is not None:
            around = torch.autocast("cpu", self.autocast)  # where the fake tensors are
        with around:
            return self.target.step(module, batch)

    def _copy(self, mode: FakeTensorMode) -> nn.Module:
        return fake_module(mode, self.target.module, self.dtype).train()

    # ------------------------------------------------------------------ between steps

    def _static(self) -> Static:
        mode = fake_mode()
        copy = self._copy(mode)
        parameters = list(copy.parameters())
        trained = [p for p in parameters if p.requires_grad]
        if not trained:
            raise ConfigurationError(f"{type(copy).__name__} has no parameter that is trained: nothing to estimate.")
        with mode:
            for p in trained:
                p.grad = torch.empty_like(p)
            optimizers = self.target.make_optimizers(copy)
            state = scratch = 0
            for optimizer in optimizers:
                _as_on(self.device, optimizer)
                made, _ = self._optimizer_step(optimizer, trained)
                state += made
                scratch = max(scratch, self._optimizer_step(optimizer, trained)[1])
        return Static(
            parameters=_bytes(parameters),
            buffers=_bytes(copy.buffers()),
            optimizer_state=state,
            gradients=_bytes(trained),
            optimizer_scratch=scratch,
            optimizers=tuple(type(optimizer).__name__ for optimizer in optimizers),
        )

    def _optimizer_step(self, optimizer: Optimizer, parameters: list[nn.Parameter]) -> tuple[int, int]:
        """Bytes that one step leaves behind, and the most that it has at once."""
        meter = Meter(self.device, lambda: "optimizer")
        meter.leave_step()
        for p in parameters:
            meter.outside(p)
            if p.grad is not None:
                meter.outside(p.grad)
        try:
            with meter, torch.random.fork_rng(devices=[]):
                optimizer.step()
        except Exception as error:
            raise ConfigurationError(
                f"a step of {type(optimizer).__name__} failed in the estimate with {shown(error)}. Name a similar one "
                "of torch.optim with --optimizer."
            ) from error
        run = simulate(meter.close(), [], timeline=True)
        return (run.levels[-1] if run.levels else 0), run.peak


def _as_on(device: str, optimizer: Optimizer) -> None:
    """Take the implementation that the optimizer would choose on a GPU: over all parameters at once."""
    for group in optimizer.param_groups:
        if device != "cpu" and group.get("foreach", False) is None and not group.get("fused"):
            group["foreach"] = True


def _bytes(tensors: Iterable[Tensor]) -> int:
    """Each storage once."""
    seen = {id(t.untyped_storage()): t.untyped_storage().nbytes() for t in tensors if t.layout is torch.strided}
    return sum(seen.values())
