"""How much of the time that copies between host and device take lies under kernels, from a profiler's trace."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

Interval = tuple[float, float]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same points in time, each in one interval, in order."""
    merged: list[Interval] = []
    for begin, end in sorted(intervals):
        if merged and begin <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        else:
            merged.append((begin, end))
    return merged


def common(left: list[Interval], right: list[Interval]) -> float:
    """For how long both run; each as `union` returns it."""
    total, i, j = 0.0, 0, 0
    while i < len(left) and j < len(right):
        total += max(0.0, min(left[i][1], right[j][1]) - max(left[i][0], right[j][0]))
        if left[i][1] < right[j][1]:
            i += 1
        else:
            j += 1
    return total


def hidden_copies(events: Iterable[dict[str, Any]]) -> dict[str, float | None]:
    """Seconds of copies in each direction, and the share of each that kernels run beside; None: there were none.

    Args:
        events: ``traceEvents`` of a Chrome trace that `torch.profiler` wrote, times in microseconds.
    """
    kernels: list[Interval] = []
    copies: dict[str, list[Interval]] = {"out": [], "back": []}
    for event in events:
        if event.get("ph") != "X" or "dur" not in event:
            continue
        span = (float(event["ts"]), float(event["ts"]) + float(event["dur"]))
        if event.get("cat") == "kernel":
            kernels.append(span)
        elif event.get("cat") == "gpu_memcpy":
            name = event.get("name", "")
            if "DtoH" in name:
                copies["out"].append(span)
            elif "HtoD" in name:
                copies["back"].append(span)
    busy = union(kernels)
    found: dict[str, float | None] = {}
    for direction, spans in copies.items():
        merged = union(spans)
        seconds = sum(end - begin for begin, end in merged)
        found[f"{direction}_s"] = seconds / 1e6
        found[f"{direction}_hidden"] = common(merged, busy) / seconds if seconds else None
    return found


def events_of(trace: Path) -> list[dict[str, Any]]:
    """What a trace has in it, packed or not."""
    content = trace.read_bytes()
    events: list[dict[str, Any]] = json.loads(gzip.decompress(content) if trace.suffix == ".gz" else content)[
        "traceEvents"
    ]
    return events
