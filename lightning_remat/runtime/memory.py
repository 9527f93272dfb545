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

import gc
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch._C._autograd import _profiler_enabled
from torch._C._profiler import RecordScope, _ExtraFields_Allocation, _ProfilerEvent, _RecordFunctionFast
from torch.autograd import profiler
from torch.profiler import ProfilerActivity, profile
from torch.profiler.profiler import PROFILER_STEP_NAME

_DEVICES = ("cpu", "cuda")
_MARK = "lightning_remat#"
_autograd_profiler: Any = profiler  # its functions are not declared as exported


@dataclass(frozen=True, kw_only=True)
class PeakResult:
    """What :func:`measure_peak` counted on one device, in bytes and seconds."""

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

    Whatever ``fn`` raises is passed on, with the profiler switched off.

    Args:
        fn: Called without arguments, exactly once. What it returns is dropped while the count is still running.
        device: A CPU or CUDA device. On CUDA the peak is the allocator's own, ``torch.cuda.max_memory_allocated``
            (whose counter is reset), less what was allocated before; releases of older memory lower the timeline there.

    Returns:
        The most bytes that were live at once, and what was live when.

    Raises:
        ValueError: If the device is neither a CPU nor a CUDA device.
        RuntimeError: If this thread is being profiled already. PyTorch has one profiler at a time, and a second one
            would silently take away the events of the first.

    Example:
        >>> import torch
        >>> from lightning_remat.runtime.memory import measure_peak
        >>> measure_peak(lambda: torch.empty(1000, dtype=torch.uint8)).peak_bytes
        1000
    """
    recorder = Recorder(device)
    recorder.start()
    try:
        fn()
    finally:
        recorder.stop()
    return recorder.result()


def profiler_is_on() -> bool:
    """Whether somebody profiles, on whichever thread, or is about to, so that nothing can be recorded.

    PyTorch has one profiler for the whole process: a second one crashes it, on another thread or in the warm-up phase
    of a profiler's schedule. Nothing tells of the latter, so that all profilers there are must be looked at.
    """
    if _profiler_enabled() or _autograd_profiler._is_profiler_enabled:
        return True
    if PROFILER_STEP_NAME not in _autograd_profiler.KinetoStepTracker._step_dict:
        return False  # as long as that is empty, none has been made
    profilers = gc.get_referrers(_autograd_profiler.profile)
    return any(
        isinstance(p, _autograd_profiler.profile) and p.entered and p.enabled and p.kineto_results is None
        for p in profilers
    )


class ProfilerBusy(RuntimeError):
    """Somebody else is profiling."""


_starting = threading.Lock()  # and stopping: standard error is bent meanwhile, for the whole process


class Recorder:
    """Counts allocations from :meth:`start` to :meth:`stop`; what :func:`measure_peak` does, in pieces.

    Args:
        device: see :func:`measure_peak`.

    Attributes:
        marks: how many marks have been put into the stream.
        cut: it was ended before its time, since somebody else began to profile.

    Raises:
        ValueError: see :func:`measure_peak`.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = _checked_device(device)
        self.marks = 0
        self.cut = False
        self._thread = threading.current_thread()
        self._running = False
        self._prepare: Callable[..., Any] | None = None
        self._profiler: profile | None = None
        self._before = 0
        self._peak: int | None = None

    def start(self) -> None:
        """Begin to count.

        Raises:
            RuntimeError: see :func:`measure_peak`.
        """
        with _starting:
            if profiler_is_on():
                raise ProfilerBusy(
                    "measure_peak needs PyTorch's profiler, which is running already: call it outside of the profiled "
                    "code, or switch that profiler off (in Lightning: Trainer(profiler=None))."
                )
            self._thread = threading.current_thread()
            others = PROFILER_STEP_NAME in _autograd_profiler.KinetoStepTracker._step_dict
            self._profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
            if not others:
                _autograd_profiler.KinetoStepTracker.erase_step_count(PROFILER_STEP_NAME)
            self._before = _allocated_on_cuda(self.device)
            older = torch.empty(1)
            with _without_profiler_chatter(), _following_calls_only():
                self._profiler.start()
                # The allocator warns at the first, and at every thousandth, release of something older than the
                # profile.
                del older
            self._running = True
        self._prepare = _autograd_profiler._prepare_profiler
        _autograd_profiler._prepare_profiler = self._make_way

    def _make_way(self, *args: Any, **kwargs: Any) -> Any:
        """Somebody begins to profile while we do: theirs must not suffer from it."""
        prepare = self._prepare
        self.stop()
        self.cut = True
        assert prepare is not None
        return prepare(*args, **kwargs)

    def mark(self) -> None:
        """Put a mark into the stream of allocations; marks are numbered from 0."""
        with _RecordFunctionFast(f"{_MARK}{self.marks}"):
            self.marks += 1

    def stop(self) -> None:
        """End the count; safe to repeat. A profiler can only be switched off on the thread where it was switched on."""
        if not self._running or self._profiler is None:
            return
        if _autograd_profiler._prepare_profiler == self._make_way:
            _autograd_profiler._prepare_profiler = self._prepare
        if threading.current_thread() is not self._thread:
            self.cut = True
            if not self._thread.is_alive():
                self._running = False
                _autograd_profiler._set_is_profiler_enabled(False)  # it went with its thread
            return
        self._running = False
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            # The allocator also counts what it hands out on threads that the profiler does not follow.
            self._peak = torch.cuda.max_memory_allocated(self.device) - self._before
        with _starting, _without_profiler_chatter():
            self._profiler.stop()

    def result(self) -> PeakResult:
        """What was counted.

        Raises:
            RuntimeError: the code stopped the profiler itself.
        """
        timeline = tuple((seconds, live) for seconds, live, _, _ in self.stream())
        peak = max(live for _, live in timeline)
        return PeakResult(peak_bytes=peak if self._peak is None else self._peak, timeline=timeline)

    def stream(self) -> Iterator[tuple[float, int, int, int]]:
        """``(seconds, live bytes, change, mark)`` in order of time; change is 0 at marks, mark is -1 elsewhere."""
        inner = self._profiler.profiler if self._profiler is not None else None
        if inner is None or inner.kineto_results is None:
            raise RuntimeError("The measured code stopped the profiler, so that its memory could not be counted.")
        return _stream(inner.kineto_results, self.device)

    @property
    def complete(self) -> bool:
        """Whether all was counted: nobody put an end to it, and every mark is there."""
        if self.cut or self._running or self._profiler is None:
            return False
        inner = self._profiler.profiler
        if inner is None or inner.kineto_results is None:
            return False
        return sum(mark >= 0 for _, _, _, mark in self.stream()) == self.marks


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


def _stream(results: Any, where: torch.device) -> Iterator[tuple[float, int, int, int]]:
    """See :meth:`Recorder.stream`."""
    start = results.trace_start_ns()
    events = list(_events(results.experimental_event_tree(), where))
    events.sort(key=lambda event: event[0])
    born: set[int] = set()
    live = 0
    seconds = 0.0
    yield seconds, live, 0, -1
    for at, pointer, size, mark in events:
        if mark < 0:
            if size > 0:
                born.add(pointer)
            elif where.type == "cpu" and pointer not in born:
                # The CPU's allocator knows the size of this one because an earlier profile saw it come.
                continue
            else:
                born.discard(pointer)
            live += size
        seconds = max(seconds, (at - start) / 1e9)
        yield seconds, live, size, mark


def _events(events: list[_ProfilerEvent], where: torch.device) -> Iterator[tuple[int, int, int, int]]:
    """``(time in ns, address, bytes, mark)`` of allocations on ``where``, releases negative, and of marks."""
    stack = list(events)
    while stack:
        event = stack.pop()
        stack.extend(event.children)
        fields = event.extra_fields
        if not isinstance(fields, _ExtraFields_Allocation):
            if event.name.startswith(_MARK):
                yield event.start_time_ns, 0, 0, int(event.name[len(_MARK) :])
        elif fields.device.type == where.type and (where.type == "cpu" or fields.device.index == where.index):
            # The events of the CPU's allocator carry an index that means nothing.
            yield event.start_time_ns, fields.ptr, fields.alloc_size, -1


@contextmanager
def _following_calls_only() -> Iterator[None]:
    """A profile that starts here follows what has begun and ended on one thread, and nothing that is still under way.

    A collective that nobody has waited for yet (of a step that failed, say, or one that the next step waits for) is
    such a thing: it would note its end in the profile from a thread of its own, into memory that was freed when the
    profile was ended, and the process would crash. torch counts them as of the user's scope.
    """
    enable = _autograd_profiler._enable_profiler
    scopes = {RecordScope.FUNCTION}  # that of ops, and of our marks; allocations have none
    _autograd_profiler._enable_profiler = partial(enable, scopes=scopes)
    try:
        yield
    finally:
        _autograd_profiler._enable_profiler = enable


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
