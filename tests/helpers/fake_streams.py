"""A device that is made up: streams, events and memory on the CPU, in which nothing happens before it must.

Work is queued and stays queued until something lets it run (`FakeStreams.advance`, `FakeStreams.drain`, an event's
``synchronize``), so that a test decides which of the orders that streams admit is taken. The fake is late by default:
an event that nobody has let happen has not happened.

Beside running things it proves order. Each queued piece of work carries a vector clock (Lamport, Mattern): what is
certain to be over when it runs, by the order of its stream, by the events that the stream has waited for, and by what
the host had seen to be over when it queued the work. Two pieces that touch the same bytes, one of them writing, must be
ordered by that; and so must be whatever touches memory, before that memory is freed to the stream it came from.
Otherwise there is an entry in `FakeStreams.hazards`, whether or not this run happened to go well.

Device memory is freed as the caching allocator does it: to the stream that was current when it was allocated, at once,
unless `FakeStreams.hold` (``record_stream``) names a stream that has to be done with it. The next request of that size
on that stream gets the same bytes. Freed pinned memory is never used again, which is what PyTorch's host allocator
promises as far as queued copies are concerned.
"""

from __future__ import annotations

import random
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

Clock = dict[int, int]


def _merge(into: Clock, other: Clock) -> None:
    for stream, index in other.items():
        into[stream] = max(into.get(stream, -1), index)


@dataclass(eq=False)
class Work:
    """Something queued: what it does, and the number it has in its stream."""

    name: str
    stream: FakeStream
    index: int
    run: Callable[[], None]
    waits_for: FakeEvent | None = None


@dataclass(eq=False)
class Access:
    """That a piece of work touches bytes ``start`` to ``end`` of a block."""

    work: Work
    start: int
    end: int
    writes: bool


@dataclass(eq=False)
class Block:
    """Memory, and all that has ever touched it."""

    base: Tensor
    stream: FakeStream | None
    accesses: list[Access] = field(default_factory=list)
    held_for: set[FakeStream] = field(default_factory=set)


class FakeEvent:
    """See `lightning_remat.engine.offload.streams.Event`; times are those of the fake's clock."""

    def __init__(self, device: FakeStreams, clock: Clock) -> None:
        self._device = device
        self._clock = clock
        self.time: float | None = None

    def query(self) -> bool:
        if self.time is None:
            return False
        _merge(self._device.host, self._clock)
        return True

    def synchronize(self) -> None:
        self._device.run_until(self)
        assert self.query()

    def elapsed_time(self, end: FakeEvent) -> float:
        assert self.time is not None
        assert end.time is not None
        return end.time - self.time

    def covers(self, clock: Clock) -> None:
        """Add what is over when this event has happened."""
        _merge(clock, self._clock)


class FakeStream:
    """See `lightning_remat.engine.offload.streams.Stream`."""

    def __init__(self, device: FakeStreams, number: int) -> None:
        self.number = number
        self.queue: deque[Work] = deque()
        self.clock: Clock = {}
        self.length = 0
        self._device = device

    def __repr__(self) -> str:
        return f"stream {self.number}"

    def wait_event(self, event: FakeEvent) -> None:
        if (self.number, self._device.stream_of[event]) in self._device.deaf:
            return
        self._device.enqueue(self, "wait", waits_for=event)
        event.covers(self.clock)


class FakeStreams:
    """See `lightning_remat.engine.offload.streams.Streams`.

    Args:
        seed: of the orders that `drain` and `run_until` take.
        pinned_limit: more pinned memory than that the driver refuses.
        deaf: pairs of streams' numbers ``(a, b)``: a does not wait for events of b. The stream of ops is number 0, and
            others have numbers in the order in which they are made.
    """

    def __init__(
        self, seed: int = 0, *, pinned_limit: int = 1 << 40, deaf: frozenset[tuple[int, int]] = frozenset()
    ) -> None:
        self.deaf = deaf
        self.stream_of: weakref.WeakKeyDictionary[FakeEvent, int] = weakref.WeakKeyDictionary()
        self.hazards: list[str] = []
        self.host: Clock = {}
        self.time = 0.0
        self.trims = 0
        self.streams: list[FakeStream] = []
        self.ops = self.side()
        self._current = self.ops
        self._random = random.Random(seed)
        self._pinned_limit = pinned_limit
        self._pinned_alive = 0
        self._blocks: list[Block] = []
        self._free: dict[tuple[FakeStream, int], list[Block]] = {}
        self._not_yet_free: list[tuple[Block, list[FakeEvent]]] = []

    # ------------------------------------------------------------------ what a place asks for

    def current(self) -> FakeStream:
        return self._current

    def side(self) -> FakeStream:
        self.streams.append(FakeStream(self, len(self.streams)))
        return self.streams[-1]

    def mark(self, stream: FakeStream) -> FakeEvent:
        event = FakeEvent(self, {})

        def happens() -> None:
            event.time = self.time

        self.enqueue(stream, "mark", run=happens)
        _merge(event._clock, stream.clock)
        self.stream_of[event] = stream.number
        return event

    def copy(self, stream: FakeStream, into: Tensor, source: Tensor) -> None:
        assert into.shape == source.shape
        target, origin = self._memory(into), self._memory(source)
        nbytes = source.numel()

        def move() -> None:
            target.copy_(origin)
            self.time += nbytes

        self.enqueue(stream, "copy", run=move, reads=source, writes=into)

    def hold(self, tensor: Tensor, stream: FakeStream) -> None:
        self._block(tensor)[0].held_for.add(stream)

    def pinned(self, nbytes: int) -> Tensor:
        if self._pinned_alive + nbytes > self._pinned_limit:
            raise RuntimeError("CUDA error: out of memory")
        self._pinned_alive += nbytes
        return self._hand_out(Block(torch.empty(nbytes, dtype=torch.uint8), None))

    def trim(self) -> None:
        self.trims += 1

    # ------------------------------------------------------------------ what a step does

    def switch(self, stream: FakeStream) -> None:
        """Make another stream the current one, ordered behind the one before as a careful user does it."""
        stream.wait_event(self.mark(self._current))
        self._current = stream

    def alloc(self, nbytes: int) -> Tensor:
        """Device memory, on the current stream; free it by letting go of it."""
        for block, events in self._not_yet_free[:]:
            if all(event.query() for event in events):
                self._not_yet_free.remove((block, events))
                self._make_free(block)
        free = self._free.get((self._current, nbytes))
        return self._hand_out(
            free.pop() if free else Block(torch.empty(nbytes, dtype=torch.uint8), stream=self._current)
        )

    def write(self, tensor: Tensor, content: Tensor) -> None:
        """Queue an op that fills ``tensor``."""
        target = self._memory(tensor)
        self.enqueue(self._current, "op", run=lambda: target.copy_(content), writes=tensor)

    def read(self, tensor: Tensor) -> list[Tensor]:
        """Queue an op that reads ``tensor``; what it finds is in the list once it has run."""
        found: list[Tensor] = []
        origin = self._memory(tensor)
        self.enqueue(self._current, "op", run=lambda: found.append(origin.clone()), reads=tensor)
        return found

    # ------------------------------------------------------------------ letting things happen

    def advance(self, stream: FakeStream) -> bool:
        """Let a stream do the next thing in its queue; False: it has nothing to do, or waits."""
        if not self._can_run(stream):
            return False
        stream.queue.popleft().run()
        self.time += 1
        return True

    def run_until(self, event: FakeEvent) -> None:
        """Let streams run, in some order, until an event has happened."""
        while event.time is None:
            able = [stream for stream in self.streams if self._can_run(stream)]
            assert able, "nothing can run, and the event has not happened"
            self.advance(self._random.choice(able))

    def drain(self) -> None:
        """Let all that is queued happen, in some order."""
        while any(stream.queue for stream in self.streams):
            able = [stream for stream in self.streams if self._can_run(stream)]
            assert able, "streams wait for each other"
            self.advance(self._random.choice(able))

    def enqueue(
        self,
        stream: FakeStream,
        name: str,
        *,
        run: Callable[[], object] = lambda: None,
        waits_for: FakeEvent | None = None,
        reads: Tensor | None = None,
        writes: Tensor | None = None,
    ) -> None:
        """Queue a piece of work, and look whether it is in order with all that touches the same bytes."""
        _merge(stream.clock, self.host)
        work = Work(f"{name} {stream.length} of {stream}", stream, stream.length, run, waits_for)
        for tensor, is_write in ((reads, False), (writes, True)):
            if tensor is not None:
                self._touch(work, tensor, is_write)
        stream.clock[stream.number] = stream.length
        stream.length += 1
        stream.queue.append(work)

    # ------------------------------------------------------------------ memory and order

    def _can_run(self, stream: FakeStream) -> bool:
        if not stream.queue:
            return False
        event = stream.queue[0].waits_for
        return event is None or event.time is not None

    def _touch(self, work: Work, tensor: Tensor, writes: bool) -> None:
        block, start = self._block(tensor)
        end = start + tensor.numel()
        for other in block.accesses:
            conflict = (writes or other.writes) and other.start < end and start < other.end
            if conflict and not self._is_before(other, work.stream.clock):
                self.hazards.append(
                    f"{work.name} {'writes' if writes else 'reads'} what {other.work.name} may still be "
                    f"{'writing' if other.writes else 'reading'}"
                )
        block.accesses.append(Access(work, start, end, writes))

    def _is_before(self, access: Access, clock: Clock) -> bool:
        return access.work.index <= clock.get(access.work.stream.number, -1)

    def _hand_out(self, block: Block) -> Tensor:
        """The memory as a tensor whose end is the end of its use."""
        if block not in self._blocks:
            self._blocks.append(block)  # for ever, so that no address is used twice
        tensor = torch.frombuffer(block.base.numpy(), dtype=torch.uint8)
        weakref.finalize(tensor.untyped_storage(), self._freed, block).atexit = False
        return tensor

    def _freed(self, block: Block) -> None:
        if block.stream is None:
            self._pinned_alive -= block.base.numel()
            return
        clock = dict(block.stream.clock)
        _merge(clock, self.host)
        for stream in block.held_for:
            _merge(clock, stream.clock)
        for access in block.accesses:
            if not self._is_before(access, clock):
                self.hazards.append(
                    f"memory was freed that {access.work.name} may still be {'writing' if access.writes else 'reading'}"
                )
        if block.held_for:
            self._not_yet_free.append((block, [self.mark(stream) for stream in block.held_for]))
            block.held_for = set()
        else:
            self._make_free(block)

    def _make_free(self, block: Block) -> None:
        assert block.stream is not None
        self._free.setdefault((block.stream, block.base.numel()), []).append(block)

    def _block(self, tensor: Tensor) -> tuple[Block, int]:
        for block in self._blocks:
            start = tensor.data_ptr() - block.base.data_ptr()
            if start >= 0 and start + tensor.numel() <= block.base.numel():
                return block, start
        raise AssertionError("memory that this device does not know")

    def _memory(self, tensor: Tensor) -> Tensor:
        """The same bytes, without keeping the tensor alive."""
        block, start = self._block(tensor)
        return block.base[start : start + tensor.numel()]
