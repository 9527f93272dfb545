"""What the user sees of recomputation while a model trains: metrics, an item in the progress bar, a summary, a warning.

Metrics go straight to the trainer's loggers and not through ``LightningModule.log``, which would put them among the
user's own results. All figures are those of this process: rank zero writes its own, and nothing is gathered from other
ranks, as that would take collectives that the user's training does not have.

A batch is over when the next one starts or training ends, which is all that a strategy is told. So the row of a step is
written then, under the number that Lightning gave the step.
"""

from __future__ import annotations

import logging
import warnings
from dataclasses import replace
from time import monotonic
from typing import TYPE_CHECKING, Any

from lightning_remat.integrations.sharing import Board
from lightning_remat.runtime.alarm import RetryAlarm
from lightning_remat.runtime.tuning.pilot import Pilot
from lightning_remat.sizes import format_bytes

if TYPE_CHECKING:
    from lightning_remat.runtime.session import Remat

log = logging.getLogger("lightning.pytorch")  # Lightning's, so that what is said appears where its own lines do

PREFIX = "remat/"
ITEM = "remat"
"""The name of the item in the progress bar."""


def figures(remat: Remat) -> dict[str, float]:
    """What is known now, by the names under which it is logged; what is not known is left out.

    ``peak_bytes``, ``predicted_peak_bytes``, ``kept_bytes`` and ``budget_bytes`` belong to the plan; ``recompute_ms``
    and ``replayed_ops`` to the last step, and so do, where ``offload=`` is given, ``offloaded_bytes``,
    ``fetched_bytes``, ``transfer_wait_seconds`` and ``transfer_hidden`` (a share, from 0 to 1). The others count from
    the beginning of the engine: ``evictions``, ``evicted_bytes``, ``out_of_memory``, ``retries``, ``retried_batches``,
    and, if anything is to be verified, ``verified`` and ``verified_different``.
    """
    counters, stats, plan = remat.counters, remat.stats, remat.plan
    known: dict[str, float | None] = {
        "peak_bytes": remat.measured_peak_bytes,
        "predicted_peak_bytes": plan.peak_bytes if plan is not None else None,
        "kept_bytes": counters.kept_bytes,
        "budget_bytes": remat.budget_bytes,
        "recompute_ms": 1e3 * stats.replay_seconds,
        "replayed_ops": stats.replayed_ops,
        "evictions": counters.evictions,
        "evicted_bytes": counters.evicted_bytes,
        "out_of_memory": counters.out_of_memory,
        "retries": counters.retries,
        "retried_batches": counters.retried_batches,
        "verified": counters.verified if remat.verifier is not None else None,
        "verified_different": counters.verified_different if remat.verifier is not None else None,
    }
    if remat.offload is not None:
        known |= {
            "offloaded_bytes": counters.last_bytes_out,
            "fetched_bytes": counters.last_bytes_in,
            "transfer_wait_seconds": counters.last_waited_seconds,
            "transfer_hidden": counters.last_hidden,
        }
    return {name: float(value) for name, value in known.items() if value is not None}


def item(remat: Remat) -> str:
    """For the progress bar: the measured peak, else the predicted one (``~``), else the name of the policy."""
    measured, plan = remat.measured_peak_bytes, remat.plan
    if measured is not None:
        return _short(measured)
    return remat.policy if plan is None else f"~{_short(plan.peak_bytes)}"


class Monitor:
    """Follows one training, from ``start`` to ``end``; ``close`` is called whatever happens.

    It says nothing of a training without a step under the engine.
    """

    def __init__(self, remat: Remat) -> None:
        self.remat = remat
        self._alarm = RetryAlarm()
        self._bar: _Bar | None = None
        self._step: int | None = None  # of the batch that is running, as Lightning counts for loggers
        self._seen = self._before = replace(remat.counters, notes=list(remat.counters.notes))
        self._began = self._ended = monotonic()
        self._running = True
        self._recompute_seconds = 0.0
        self._board = Board(remat)
        self._broken: list[Any] = []  # loggers that would not take what we had to say

    def __reduce__(self) -> Any:
        """A copy follows nothing yet."""
        return Monitor, (self.remat,)

    def start(self, trainer: Any) -> None:
        """Training begins."""
        self._board.begin()
        bar = trainer.progress_bar_callback
        if bar is not None:
            self._bar = _Bar(bar, self.remat)

    def batch_starts(self, trainer: Any) -> None:
        """A batch begins, and the one before is over."""
        self.batch_over(trainer)
        self._step = trainer.fit_loop.epoch_loop._batches_that_stepped

    def batch_over(self, trainer: Any) -> None:
        """Note what a batch did; write it if Lightning has written the user's metrics for it."""
        now, before, step = self.remat.counters, self._seen, self._step
        if step is None:
            return
        self._step = None
        self._board.leave()
        if now.steps != before.steps:
            self._recompute_seconds += self.remat.stats.replay_seconds
        if self._alarm.batch(now.retried_batches > before.retried_batches):
            warnings.warn(
                f"Memory ran out again and again: {now.retried_batches} batches so far had to be run more than once, "
                "which costs time. Set a smaller budget= or a larger margin=, use policy='full', or make the batches "
                "smaller.",
                stacklevel=2,
            )
        self._seen = replace(now)
        # What Lightning's logger connector asks: has the optimizer stepped, and is it this step's turn?
        stepped = trainer.fit_loop.epoch_loop._batches_that_stepped > step
        every = trainer.log_every_n_steps
        if stepped and every and ((step + 1) % every == 0 or trainer.should_stop):
            self._write(trainer, step)

    def end(self, trainer: Any) -> None:
        """Training went through to its end."""
        self.batch_over(trainer)
        if isinstance(self.remat.pilot, Pilot):
            self.remat.pilot.conclude_if_over()
        self._board.leave()
        self._board.read()
        self._stop()

    def close(self, *, speak: bool) -> None:
        """Training is over, or was broken off: leave everything as it was, and tell what happened."""
        self._stop()
        text = self.summary() if speak else None
        if text is not None:
            log.info(text)

    def _stop(self) -> None:
        if self._running:
            self._running = False
            self._ended = monotonic()
        bar, self._bar = self._bar, None
        if bar is not None:
            bar.restore()

    def summary(self) -> str | None:
        """What happened, in lines; None if nothing did."""
        # Upwards, and only at the end.
        from lightning_remat.reporting.summary import Training, in_lines, since

        remat = self.remat
        happened = since(remat.counters, self._before)
        if not happened.steps:
            return None
        happened = replace(
            happened,
            peak_bytes=remat.measured_peak_bytes,
            budget_bytes=remat.budget_bytes,
            replayed_ops=remat.stats.replayed_ops,
        )
        plan = remat.plan
        return in_lines(
            Training(
                policy=remat.summary,
                counters=happened,
                predicted_peak_bytes=plan.peak_bytes if plan is not None else None,
                seconds=self._ended - self._began,
                recompute_seconds=self._recompute_seconds,
                verifies=remat.verifier is not None,
                ranks=remat.ranks,
            )
        )

    def _write(self, trainer: Any, step: int) -> None:
        if not trainer.is_global_zero or self.remat.counters.steps == self._before.steps:
            return
        metrics = {PREFIX + name: value for name, value in figures(self.remat).items()}
        for logger in trainer.loggers:
            if any(logger is broken for broken in self._broken):
                continue
            try:
                logger.log_metrics(metrics=dict(metrics), step=step)
                logger.save()
            except Exception as error:
                # Lightning lets a logger's error end the training, and does so for the user's own metrics. These are
                # an addition that nobody asked for.
                self._broken.append(logger)
                warnings.warn(
                    f"{type(logger).__name__} did not take the metrics of recomputation ({error!r}); it gets no more "
                    "of them.",
                    stacklevel=2,
                )


class _Bar:
    """An item more in a progress bar, by its ``get_metrics``: the trainer's and the user's metrics stay as they are."""

    def __init__(self, bar: Any, remat: Remat) -> None:
        self.bar = bar
        self.remat = remat
        self._steps = remat.counters.steps
        self._own = vars(bar).get("get_metrics")  # somebody else's, on the instance
        self._get_metrics = bar.get_metrics
        bar.get_metrics = self

    def __call__(self, trainer: Any, pl_module: Any) -> Any:
        items = self._get_metrics(trainer, pl_module)
        if self.remat.counters.steps == self._steps or ITEM in items:
            return items  # nothing to say, or the user shows something else under that name
        return {**items, ITEM: item(self.remat)}

    def restore(self) -> None:
        """Leave the bar as it was."""
        if vars(self.bar).get("get_metrics") is not self:
            return  # somebody came after us, and holds on to what was there
        if self._own is None:
            del self.bar.get_metrics
        else:
            self.bar.get_metrics = self._own


def _short(count: int) -> str:
    return format_bytes(count).replace(" ", "")
