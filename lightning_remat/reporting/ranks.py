"""By how much the plans of several processes differ, in figures and in one sentence."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lightning_remat.reporting.text import format_size


@dataclass(frozen=True, kw_only=True)
class RankFigures:
    """The plan of one process for its largest step.

    Attributes:
        rank: of the process.
        ops: of the step.
        sequence: fingerprint of these ops.
        plan: fingerprint of what is run again and what leaves the device.
        dropped: ops that run again.
        predicted_peak_bytes: memory between steps included.
        measured_peak_bytes: the same, measured; None: not yet.
        budget_bytes: what it may take.
        extra_seconds: predicted time of what is run again.
    """

    rank: int
    ops: int
    sequence: str
    plan: str
    dropped: int
    predicted_peak_bytes: int
    measured_peak_bytes: int | None
    budget_bytes: int
    extra_seconds: float


def ranks_in_words(ranks: Sequence[RankFigures]) -> str:
    """One sentence; empty where there is nothing to compare.

    Example:
        >>> one = dict(ops=9, sequence="a", plan="p", measured_peak_bytes=None, budget_bytes=4096, extra_seconds=0.001)
        >>> first = RankFigures(rank=0, dropped=3, predicted_peak_bytes=2048, **one)
        >>> second = RankFigures(rank=1, dropped=3, predicted_peak_bytes=3072, **one)
        >>> ranks_in_words([first, second])
        '2 ranks, one plan: predicted peak 2.0 to 3.0 KiB (most on rank 1), 3 ops and 1.0 ms a step run again'
    """
    if len(ranks) < 2:
        return ""
    plans, sequences = len({r.plan for r in ranks}), len({r.sequence for r in ranks})
    head = f"{len(ranks)} ranks, {'one plan' if plans == 1 else f'{plans} plans'}"
    if sequences > 1:
        head += f" for {sequences} different sequences of ops"
    parts = [_peaks("predicted peak", ranks, lambda r: r.predicted_peak_bytes)]
    if all(r.measured_peak_bytes is not None for r in ranks):
        parts.append(_peaks("measured", ranks, lambda r: r.measured_peak_bytes or 0))
    dropped = _span(sorted({str(r.dropped) for r in ranks}, key=int))
    times = _span(sorted({f"{r.extra_seconds * 1e3:.1f}" for r in ranks}, key=float))
    return f"{head}: {', '.join(parts)}, {dropped} ops and {times} ms a step run again"


def _peaks(name: str, ranks: Sequence[RankFigures], of: Callable[[RankFigures], int]) -> str:
    low, high = min(map(of, ranks)), max(map(of, ranks))
    if low == high:
        return f"{name} {format_size(high)}"
    least, most = format_size(low), format_size(high)
    if least.split()[-1] == most.split()[-1]:
        least = least.split()[0]
    return f"{name} {least} to {most} (most on rank {max(ranks, key=of).rank})"


def _span(texts: Sequence[str]) -> str:
    return texts[0] if len(texts) == 1 else f"{texts[0]} to {texts[-1]}"
