"""Peak memory of a piece of code, counted exactly from allocation events.

Other names: memory profile, high-water mark. `measure_peak` reads the events that PyTorch's own allocators report to
`torch.profiler` (``profile_memory=True``): every allocation and every release, with its size and its time. Nothing is
sampled, and the dispatcher and Python objects are left alone, so the code under test runs as it always does.

Known weaknesses:

- On the CPU a release is reported only for memory that was allocated inside the measured code. The figure is therefore
  what that code added, whatever lived before.
- Memory that does not pass through PyTorch's allocators (NumPy arrays, Python objects, the workspaces of BLAS and
  oneDNN) is not seen.
- The profiler costs time on every op: take durations elsewhere.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch._C._autograd import _profiler_enabled
from torch._C._profiler import _ExtraFields_Allocation, _ProfilerEvent
from torch.profiler import ProfilerActivity, profile

_DEVICES = ("cpu", "cuda")


@dataclass(frozen=True, kw_only=True)
class PeakResult:
    """What `measure_peak` counted on one device."""

    peak_bytes: int
    """The most bytes that were live at once, above what was live when the measurement began."""

    timeline: tuple[tuple[float, int], ...]
    """``(seconds since the start, live bytes after this event)``, in order of time. The first entry is ``(0.0, 0)``;
    the last one is the end of the measured code, so its bytes are what the code left behind."""

    @property
    def left_bytes(self) -> int:
        """Bytes that the code allocated and that were still live when it ended."""
        return self.timeline[-1][1]


def measure_peak(fn: Callable[[], object], device: torch.device | str = "cpu") -> PeakResult:
    """Run ``fn`` once and count what it allocated on ``device``.

    Args:
        fn: Called without arguments, exactly once. What it returns is dropped while the count is still running.
        device: A CPU or CUDA device. On CUDA the peak is the allocator's own (`torch.cuda.max_memory_allocated`, whose
            counter is reset), less what was allocated before; releases of older memory lower the timeline there.

    Raises:
        ValueError: If the device is neither a CPU nor a CUDA device.
        RuntimeError: If this thread is being profiled already. PyTorch has one profiler at a time, and a second one
            would silently take away the events of the first.

    Whatever ``fn`` raises is passed on, with the profiler switched off.

    >>> import torch
    >>> measure_peak(lambda: torch.empty(1000, dtype=torch.uint8)).peak_bytes
    1000
    """
    where = _checked_device(device)
    if _profiler_enabled():
        raise RuntimeError(
            "measure_peak needs PyTorch's profiler, which is running already: call it outside of the profiled code, "
            "or switch that profiler off (in Lightning: Trainer(profiler=None))."
        )
    profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
    before = _allocated_on_cuda(where)
    older = torch.empty(1)
    with _without_profiler_chatter():
        profiler.start()
        # The allocator warns at the first, and at every thousandth, release of something older than the profile.
        del older
    try:
        fn()
        if where.type == "cuda":
            torch.cuda.synchronize(where)
    finally:
        with _without_profiler_chatter():
            profiler.stop()
    timeline = tuple(_timeline(profiler, where))
    peak = max(live for _, live in timeline)
    if where.type == "cuda":
        # The allocator also counts what it hands out on threads that the profiler does not follow.
        peak = torch.cuda.max_memory_allocated(where) - before
    return PeakResult(peak_bytes=peak, timeline=timeline)


def _checked_device(device: torch.device | str) -> torch.device:
    where = torch.device(device)
    if where.type not in _DEVICES:
        names = " and ".join(_DEVICES)
        raise ValueError(
            f"device={str(device)!r}: memory is counted on {names} devices only. Measure on one of these, "
            "or use the memory statistics of your device's own torch module."
        )
    index: int | None = where.index  # the stubs say int, but "cuda" has none
    if where.type == "cuda" and index is None:
        where = torch.device("cuda", torch.cuda.current_device())
    return where


def _allocated_on_cuda(where: torch.device) -> int:
    """Bytes allocated on a CUDA device now, its peak counter reset; 0 for a CPU."""
    if where.type != "cuda":
        return 0
    torch.cuda.synchronize(where)
    torch.cuda.reset_peak_memory_stats(where)
    return torch.cuda.memory_allocated(where)


def _timeline(profiler: profile, where: torch.device) -> Iterator[tuple[float, int]]:
    """The profiler's memory events of one device as running totals."""
    inner = profiler.profiler
    if inner is None or inner.kineto_results is None:
        raise RuntimeError("The measured code stopped the profiler, so that its memory could not be counted.")
    results = inner.kineto_results
    start = results.trace_start_ns()
    events = list(_allocations(results.experimental_event_tree(), where))
    events.sort(key=lambda event: event[0])
    born: set[int] = set()
    live = 0
    seconds = 0.0
    yield seconds, live
    for at, pointer, size in events:
        if size > 0:
            born.add(pointer)
        elif where.type == "cpu" and pointer not in born:
            # The CPU's allocator knows the size of this one because an earlier profile saw it come.
            continue
        else:
            born.discard(pointer)
        live += size
        seconds = max(seconds, (at - start) / 1e9)
        yield seconds, live


def _allocations(events: list[_ProfilerEvent], where: torch.device) -> Iterator[tuple[int, int, int]]:
    """``(time in ns, address, bytes)`` of each allocation on ``where``, releases with negative bytes, in any order."""
    stack = list(events)
    while stack:
        event = stack.pop()
        stack.extend(event.children)
        fields = event.extra_fields
        if not isinstance(fields, _ExtraFields_Allocation) or fields.device.type != where.type:
            continue
        # The events of the CPU's allocator carry an index that means nothing.
        if where.type == "cpu" or fields.device.index == where.index:
            yield event.start_time_ns, fields.ptr, fields.alloc_size


@contextmanager
def _without_profiler_chatter() -> Iterator[None]:
    """Hold back the lines that Kineto prints from C++ when it starts and stops.

    torch 2.13 writes "USDT:... profiler_start" on file descriptor 2 at every start, in the middle of any progress bar.
    Its switch, ``KINETO_LOG_LEVEL``, is read while torch is imported, which is long past here. The same holds for what
    the CPU's allocator says about memory older than the profile. All other lines that arrive meanwhile are written out
    afterwards.
    """
    try:
        sys.stderr.flush()
        saved = os.dup(2)
    except (OSError, ValueError, AttributeError):  # no stderr, as under pythonw or a daemon: nothing to hold back
        yield
        return
    with tempfile.TemporaryFile() as held:
        os.dup2(held.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(saved, 2)
            os.close(saved)
            held.seek(0)
            for line in held:
                if not line.startswith((b"USDT:", b"STAGE:")) and b"CPUAllocator.cpp" not in line:
                    os.write(2, line)
