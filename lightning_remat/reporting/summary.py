"""What recomputation did in a training, told at its end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_remat.reporting.ranks import RankFigures, ranks_in_words
from lightning_remat.reporting.text import format_seconds, format_size, three_digits
from lightning_remat.runtime.counters import Counters

MOST_NOTES = 12
"""Of what was decided, so much is shown: the beginning, and what came last."""


@dataclass(frozen=True, kw_only=True)
class Training:
    """A training in figures; those of this process.

    Attributes:
        policy: the policy or plan in force, in words.
        counters: what happened in this training alone.
        predicted_peak_bytes: of the plan for the largest step; None: there is none.
        seconds: wall-clock time of the training, evaluation and loading of data included.
        recompute_seconds: of these, wall-clock time of running ops again.
        verifies: whether anything was to be verified.
        ranks: figures of the plan of each process, where several train together.
    """

    policy: str
    counters: Counters
    predicted_peak_bytes: int | None
    seconds: float
    recompute_seconds: float
    verifies: bool
    ranks: Sequence[RankFigures] = ()


def since(now: Counters, before: Counters) -> Counters:
    """What was counted after ``before`` was copied; what is not a count (peaks, the last step) is as it is now."""
    return Counters(
        steps=now.steps - before.steps,
        out_of_memory=now.out_of_memory - before.out_of_memory,
        evictions=now.evictions - before.evictions,
        evicted_bytes=now.evicted_bytes - before.evicted_bytes,
        retries=now.retries - before.retries,
        retried_batches=now.retried_batches - before.retried_batches,
        peak_bytes=now.peak_bytes,
        kept_bytes=now.kept_bytes,
        budget_bytes=now.budget_bytes,
        replayed_ops=now.replayed_ops,
        recompute_seconds=now.recompute_seconds,
        verified=now.verified - before.verified,
        verified_different=now.verified_different - before.verified_different,
        bytes_out=now.bytes_out - before.bytes_out,
        bytes_in=now.bytes_in - before.bytes_in,
        transfer_seconds=now.transfer_seconds - before.transfer_seconds,
        waited_seconds=now.waited_seconds - before.waited_seconds,
        offload_failures=now.offload_failures - before.offload_failures,
        offload_refused=now.offload_refused - before.offload_refused,
        last_bytes_out=now.last_bytes_out,
        last_bytes_in=now.last_bytes_in,
        last_transfer_seconds=now.last_transfer_seconds,
        last_waited_seconds=now.last_waited_seconds,
        compilations=now.compilations - before.compilations,
        activation_budget=now.activation_budget,
        notes=now.notes[len(before.notes) :],
    )


def in_lines(training: Training) -> str:
    """The summary as plain text; what did not happen has no line."""
    c = training.counters
    lines = [
        f"Recomputation in this training: {counted(c.steps, 'step')}, {format_seconds(training.seconds)}",
        f"  in force    {training.policy}",
    ]
    peaks = [
        f"{name} {format_size(count)}"
        for name, count in (
            ("predicted", training.predicted_peak_bytes),
            ("measured", c.peak_bytes),
            ("budget", c.budget_bytes),
        )
        if count is not None
    ]
    if peaks:
        lines.append(f"  peak        {', '.join(peaks)}")
    if c.kept_bytes is not None:
        lines.append(f"  kept        {format_size(c.kept_bytes)} for backward")
    share = 100 * training.recompute_seconds / training.seconds if training.seconds > 0 else 0.0
    lines.append(
        f"  run again   {counted(c.replayed_ops, 'op')} in the last step; {format_seconds(training.recompute_seconds)} "
        f"in all, {three_digits(share)} % of the time"
    )
    lines += _moved(c)
    if c.out_of_memory or c.evictions or c.retries:
        lines.append(f"  memory ran out {counted(c.out_of_memory, 'time')}")
    if c.evictions:
        lines.append(f"  evicted     {counted(c.evictions, 'value')} of {format_size(c.evicted_bytes)} together")
    if c.retries:
        batches = counted(c.retried_batches, "batch", "batches")
        lines.append(f"  retried     {batches}, {counted(c.retries, 'time')} in all")
    if training.verifies:
        found = f"{c.verified_different:,} differed" if c.verified_different else "none differed"
        some = f"{counted(c.verified, 'comparison')}, {found}"
        none = "nothing: no step was due, or those that were recomputed nothing"
        lines.append(f"  verified    {some if c.verified else none}")
    if ranks := ranks_in_words(training.ranks):
        lines.append(f"  ranks       {ranks}")
    lines += [f"  {'decided' if i == 0 else '':11} {note}" for i, note in enumerate(shortened(c.notes))]
    return "\n".join(lines)


def _moved(c: Counters) -> list[str]:
    """What left the device, and what stayed although it was to leave."""
    lines = []
    if c.bytes_out or c.bytes_in:
        hidden = f", {100 * c.hidden:.0f} % hidden" if c.hidden is not None else ""
        lines.append(
            f"  moved       {format_size(c.bytes_out)} out, {format_size(c.bytes_in)} back; waited "
            f"{format_seconds(c.waited_seconds)} for {format_seconds(c.transfer_seconds)} of transfers{hidden}"
        )
    if c.offload_refused:
        they = "that was to leave: it" if c.offload_refused == 1 else "that were to leave: they"
        lines.append(f"  no room     for {counted(c.offload_refused, 'content')} {they} stayed")
    if c.offload_failures:
        lines.append(f"  failed      {counted(c.offload_failures, 'transfer')}")
    return lines


def shortened(notes: Sequence[str]) -> list[str]:
    """Notes without repetitions, and the middle of many left out."""
    told = list(dict.fromkeys(notes))
    if len(told) <= MOST_NOTES:
        return told
    first = MOST_NOTES // 3
    last = MOST_NOTES - first - 1
    return [*told[:first], f"... ({len(told) - first - last} more)", *told[-last:]]


def counted(count: int, one: str, several: str | None = None) -> str:
    """``"1 step"``, ``"1,200 steps"``."""
    return f"{count:,} {one if count == 1 else several or one + 's'}"
