"""Streams for a host that is its own device: ops run at once, and copies beside them as late as streams admit.

For whole steps on the CPU with `HostPlace` in them. A copy runs when the ops' stream waits for it, and not before, so
whatever is written to a source too early, or read before it is back, ends in wrong bits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor


class LateEvent:
    """Happens when its stream gets there."""

    def __init__(self, stream: LateStream) -> None:
        self.stream = stream
        self.happened = False

    def query(self) -> bool:
        return self.happened

    def synchronize(self) -> None:
        while not self.happened:
            self.stream.queue.popleft()()

    def elapsed_time(self, end: LateEvent) -> float:
        return 1.0


class LateStream:
    """A queue, or (``at_once``) the stream of ops, which runs what it is given and can only make others hurry."""

    def __init__(self, at_once: bool = False) -> None:
        self.at_once = at_once
        self.queue: deque[Callable[[], None]] = deque()

    def do(self, work: Callable[[], None]) -> None:
        self.queue.append(work)
        if self.at_once:
            self.queue.popleft()()

    def wait_event(self, event: LateEvent) -> None:
        self.do(event.synchronize)


class LateStreams:
    """See `lightning_remat.engine.offload.streams.Streams`; pinned memory is plain memory."""

    def __init__(self) -> None:
        self.ops = LateStream(at_once=True)
        self.copies = 0

    def current(self) -> LateStream:
        return self.ops

    def side(self) -> LateStream:
        return LateStream()

    def mark(self, stream: LateStream) -> LateEvent:
        event = LateEvent(stream)

        def happens() -> None:
            event.happened = True

        stream.do(happens)
        return event

    def copy(self, stream: LateStream, into: Tensor, source: Tensor) -> None:
        self.copies += 1

        def move() -> None:
            with torch._C._DisableTorchDispatch(), torch.no_grad():
                into.copy_(source)

        stream.do(move)

    def hold(self, tensor: Tensor, stream: LateStream) -> None:
        """The queue holds it."""

    def pinned(self, nbytes: int) -> Tensor:
        with torch._C._DisableTorchDispatch(), torch.inference_mode(False):
            return torch.full((nbytes,), 99, dtype=torch.uint8)

    def trim(self) -> None:
        """There is nothing to trim."""
