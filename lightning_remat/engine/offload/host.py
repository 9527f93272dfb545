"""Host memory as the place where contents go: pinned buffers, and a stream for each direction beside the current one.

Nothing here makes the host wait for the device, except `HostPlace.close`. What must be in order is put in order by
marks in streams that other streams wait for:

- A copy out waits for what the current stream has queued when it begins, since that makes the content. The current
  stream waits for the copy in `finish_out`.
- A copy back waits for what the current stream has queued when it begins, since that may still use the memory that is
  now ``into``, and for the copy out. The current stream waits for it in `finish_back`.
- What is copied into a buffer waits for the last copy out of it or into it.

Which stream is current is asked for at each call: backward may run on another thread, and under another stream.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from pathlib import Path

import torch
from torch import Tensor

from lightning_remat.engine.offload.pinned import Buffer, PinnedPool
from lightning_remat.engine.offload.place import Traffic
from lightning_remat.engine.offload.streams import DeviceStreams, Event, Stream, Streams, host_refusal
from lightning_remat.errors import ConfigurationError, OffloadError

_UNKNOWN_HOST = 4 << 30
"""The cap where the host does not tell how much memory it has: not much, since what is pinned nobody else can use."""


class HostPlace:
    """Pinned host memory of one device; see `Place`.

    Args:
        device: a CUDA, ROCm or XPU device.
        budget: the most bytes of pinned memory, whether contents are in them or not; None: half of what the host has
            available now.
        streams: the device's queues; for tests.

    Attributes:
        name: ``"cpu"``.
        pool: the buffers.

    Raises:
        ConfigurationError: the device has no use for that (`host_refusal`).
    """

    def __init__(self, device: torch.device, *, budget: int | None = None, streams: Streams | None = None) -> None:
        if streams is None:
            if refusal := host_refusal(device):
                raise ConfigurationError(refusal)
            streams = DeviceStreams(device)
        self.name = "cpu"
        self.streams = streams
        self.pool = PinnedPool(streams.pinned, streams.trim, available_bytes() // 2 if budget is None else budget)
        self.out_stream = streams.side()
        self.back_stream = streams.side()
        self.closed = False
        self._traffic = Traffic()
        # Not reentrant on purpose. `release` may be called by a destructor in the middle of anything, also of what
        # holds the lock; so it puts the buffer here and lets whoever gets the lock next do the rest.
        self._lock = threading.Lock()
        self._returned: deque[Buffer] = deque()
        # Begin and end of what was queued, in the order in which it ends: out, back, the current stream's waits.
        self._spans: tuple[deque[tuple[Event, Event]], ...] = (deque(), deque(), deque())

    @property
    def traffic(self) -> Traffic:
        """What was moved, with the times of what has ended until now."""
        self.settle()
        return self._traffic

    @traffic.setter
    def traffic(self, begun_anew: Traffic) -> None:
        self._traffic = begun_anew

    @property
    def used_bytes(self) -> int:
        """What contents take now, in whole buffers; less than what is pinned (``pool.held_bytes``)."""
        self.settle()
        return self.pool.used_bytes

    @used_bytes.setter
    def used_bytes(self, value: int) -> None:
        raise AttributeError("what is used is counted by the pool")

    @property
    def peak_bytes(self) -> int:
        """The most that contents took."""
        return self.pool.peak_bytes

    @peak_bytes.setter
    def peak_bytes(self, value: int) -> None:
        self.pool.peak_bytes = value

    def take(self, source: Tensor) -> HostContent:
        """See `Place`."""
        streams, out = self.streams, self.out_stream
        with self._lock:
            self._tidy()
            if self.closed:
                raise OffloadError("the place in host memory is closed")
            try:
                buffer = self.pool.take(source.numel())
            except OffloadError:
                self._traffic.refused += 1
                raise
            try:
                current = streams.current()
                out.wait_event(streams.mark(current))
                if buffer.last is not None and not buffer.last.query():
                    out.wait_event(buffer.last)
                begun = streams.mark(out)
                streams.copy(out, buffer.memory[: source.numel()], source)
                buffer.last = ended = streams.mark(out)
            except BaseException:
                self.pool.give_back(buffer)
                raise
            self._spans[0].append((begun, ended))
            self._traffic.bytes_out += source.numel()
        return HostContent(self, buffer, source, current, ended)

    def settle(self) -> None:
        """Add up the times of what has ended, and take back what was released; does not wait for anything."""
        if self._lock.acquire(blocking=False):
            try:
                self._tidy()
            finally:
                self._lock.release()

    def close(self) -> None:
        """See `Place`; this waits for the device."""
        with self._lock:
            if self.closed:
                return
            self.closed = True
            for stream in (self.out_stream, self.back_stream):
                self.streams.mark(stream).synchronize()
            self._tidy()
            self.pool.clear()

    # ------------------------------------------------------------------ for contents

    def copy_back(self, buffer: Buffer, into: Tensor, out: Event) -> Stream:
        """Queue the copy of a buffer to the device; returns the stream that was current."""
        streams, back = self.streams, self.back_stream
        with self._lock:
            self._tidy()
            current = streams.current()
            back.wait_event(streams.mark(current))
            if not out.query():
                back.wait_event(out)
            begun = streams.mark(back)
            streams.copy(back, into, buffer.memory[: into.numel()])
            buffer.last = streams.mark(back)
            self._spans[1].append((begun, buffer.last))
            self._traffic.bytes_in += into.numel()
        return current

    def wait(self, stream: Stream, event: Event) -> None:
        """Let a stream of the step wait for a copy, unless that has ended already."""
        if event.query():
            return  # what the host queues from now on comes after it anyway
        before = self.streams.mark(stream)
        stream.wait_event(event)
        # Stamped when a stream gets there: what lies between the two marks is the time that it stood still.
        self._spans[2].append((before, self.streams.mark(stream)))

    def give_back(self, buffer: Buffer) -> None:
        """Take a buffer back; from any thread, never waits."""
        self._returned.append(buffer)
        self.settle()

    def _tidy(self) -> None:
        while self._returned:
            buffer = self._returned.popleft()
            if not self.closed:
                self.pool.give_back(buffer)
        out, back, waits = (_seconds(spans) for spans in self._spans)
        self._traffic.seconds_out += out
        self._traffic.seconds_in += back
        self._traffic.waited_seconds += waits


class HostContent:
    """One storage's bytes in a pinned buffer; see `Content`."""

    def __init__(self, place: HostPlace, buffer: Buffer, source: Tensor, stream: Stream, out: Event) -> None:
        self.nbytes = source.numel()
        self._place = place
        self._out = out
        self._source: Tensor | None = source
        self._made_on = stream
        self._back: tuple[Tensor, Stream] | None = None
        # A list, since taking the last element out of it is one step: of two that release, one gets the buffer.
        self._buffers = [buffer]

    def is_out(self) -> bool:
        """See `Content`."""
        try:
            return self._out.query()
        except RuntimeError:  # the device has failed, and whoever waits for it will be told
            return False

    def finish_out(self) -> None:
        """See `Content`.

        The caller may then free the source, although the host has not waited: the caching allocator gives its memory
        to ops of the stream that it was allocated on, and these come after the copy. That stream is the one that was
        current when the content was taken, or the one that is current now.
        """
        self._buffer()
        if self._source is None:
            return
        current = self._place.streams.current()
        self._place.wait(current, self._out)
        if self._made_on != current:
            self._made_on.wait_event(self._out)
        self._source = None

    def begin_back(self, into: Tensor) -> None:
        """See `Content`."""
        buffer = self._buffer()
        self._back = into, self._place.copy_back(buffer, into, self._out)

    def finish_back(self) -> None:
        """See `Content`."""
        buffer = self._buffer()
        if self._back is None:
            return
        into, begun_on = self._back
        current = self._place.streams.current()
        assert buffer.last is not None
        self._place.wait(current, buffer.last)
        if current != begun_on:
            # Where it is freed, its memory goes to ops of the stream that it was allocated on. Those must wait for what
            # uses it here, and for the copy, which is in front of that.
            self._place.streams.hold(into, current)
        self._back = None

    def release(self) -> None:
        """See `Content`."""
        try:
            buffer = self._buffers.pop()
        except IndexError:
            return
        # A copy that is on its way reads the source or writes to `into`, which now may be freed before any stream of
        # the step has waited for it. Writing late would be fatal. Reading late gives bytes that nobody wants, but the
        # memory must be there. So the allocator has to know.
        source, back = self._source, self._back
        self._source = self._back = None
        # Whatever happens to a device, letting go must not fail.
        with contextlib.suppress(Exception):
            if source is not None and not self.is_out():
                self._place.streams.hold(source, self._place.out_stream)
            if back is not None and buffer.last is not None and not buffer.last.query():
                self._place.streams.hold(back[0], self._place.back_stream)
        with contextlib.suppress(Exception):
            self._place.give_back(buffer)

    def __del__(self) -> None:
        """An owner that forgets to release does not cost the others their room."""
        self.release()

    def _buffer(self) -> Buffer:
        buffers = self._buffers[:]
        if not buffers:
            raise OffloadError("a content in host memory was asked for after it was released")
        if self._place.closed:
            raise OffloadError("a content in host memory was asked for after the place was closed")
        return buffers[0]


def available_bytes(meminfo: str = "/proc/meminfo") -> int:
    """What the host could hand out now; where it does not say, half of what it has; where it says nothing, 4 GiB.

    Limits of control groups are not looked at: whoever knows better gives a budget.
    """
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in Path(meminfo).read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    with contextlib.suppress(AttributeError, OSError, ValueError):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    return _UNKNOWN_HOST


def _seconds(spans: deque[tuple[Event, Event]]) -> float:
    """Take out what has ended, and add up how long it took."""
    total = 0.0
    while spans and spans[0][1].query():
        begun, ended = spans.popleft()
        total += begun.elapsed_time(ended) / 1000
    return total
