"""A pool of pinned host memory in size classes, so that one step uses again what the one before has used.

Other names: slab allocator, segregated free lists. Pinning takes the driver milliseconds, so nothing is given back
before its room is needed. PyTorch's own host allocator keeps free memory as well, but rounds each request up to a power
of two, which is up to twice what was asked for, and has no cap. So the pool asks it for slabs whose size is a power of
two and cuts them into equal buffers: of a slab that is full, at least three quarters are contents.

Known weaknesses: a slab serves one class until all its buffers are free; classes that hold one buffer each waste the
rest of their slabs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from lightning_remat.engine.offload.streams import Event
from lightning_remat.errors import OffloadError

_SMALLEST = 4096
"""A class of less would not be aligned to pages."""
_SLAB = 1 << 20
"""Small buffers come in slabs of this size: each call of the driver costs about as much."""


def class_bytes(nbytes: int) -> int:
    """The size of the buffers that hold ``nbytes``: the next of 4, 5, 6, 7 times a power of two; at most 1/4 more.

    >>> [class_bytes(n << 20) for n in (4, 5, 9, 11)] == [n << 20 for n in (4, 5, 10, 12)]
    True
    """
    if nbytes <= _SMALLEST:
        return _SMALLEST
    unit = 1 << ((nbytes - 1).bit_length() - 3)
    return -(-nbytes // unit) * unit


def slab_bytes(buffer_bytes: int) -> int:
    """The smallest power of two, of at least a MiB, of which equal buffers leave at most an eighth.

    >>> [slab_bytes(n << 20) >> 20 for n in (4, 5, 6, 7)]
    [4, 16, 32, 8]
    """
    size = max(_SLAB, single_bytes(buffer_bytes))
    while size % buffer_bytes > size // 8:
        size *= 2
    return size


def single_bytes(buffer_bytes: int) -> int:
    """The smallest power of two that holds one buffer."""
    return 1 << (buffer_bytes - 1).bit_length()


@dataclass(eq=False)
class Slab:
    """A piece of pinned memory.

    Attributes:
        memory: all of it.
        out: how many of its buffers are in use.
        last_used: when one of them was last given back, counted in such events.
    """

    memory: Tensor
    out: int = 0
    last_used: int = 0


@dataclass(eq=False)
class Buffer:
    """A part of a slab.

    Attributes:
        memory: flat bytes, as many as its class has.
        last: behind the last copy into it or out of it; what is copied into it next must wait for that.
    """

    memory: Tensor
    slab: Slab = field(repr=False)
    last: Event | None = None

    @property
    def nbytes(self) -> int:
        """Its size."""
        return self.memory.numel()


class PinnedPool:
    """Buffers, up to a cap; not for several threads at once.

    Args:
        allocate: makes a slab; RuntimeError: it cannot.
        trim: called after slabs were let go of, since whoever made them may have kept their memory.
        budget: the most bytes that slabs take.

    Attributes:
        held_bytes: what slabs take, used or not.
        used_bytes: what buffers take that are in use.
        peak_bytes: the most of ``used_bytes`` so far.
    """

    def __init__(self, allocate: Callable[[int], Tensor], trim: Callable[[], None], budget: int) -> None:
        self.budget = budget
        self.held_bytes = 0
        self.used_bytes = 0
        self.peak_bytes = 0
        self._allocate = allocate
        self._trim = trim
        self._slabs: list[Slab] = []
        self._free: dict[int, deque[Buffer]] = {}
        self._clock = 0

    def take(self, nbytes: int) -> Buffer:
        """A buffer of at least ``nbytes``; its ``last`` may not have been passed.

        Which one depends on what was taken and given back before, never on how far the device is: so what the pool
        takes is the same in every run. The one that has been free for longest comes first.

        Raises:
            OffloadError: the cap is reached, or the driver refuses to pin more. No buffer was lost by that.
        """
        size = class_bytes(nbytes)
        buffer = self._pop(size)
        if buffer is None:
            try:
                self._grow(size)
            except OffloadError:
                # One that is too large is better than none.
                larger = min((s for s, free in self._free.items() if s > size and free), default=None)
                if larger is None:
                    raise
                size = larger
            buffer = self._pop(size)
        assert buffer is not None
        buffer.slab.out += 1
        self.used_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)
        return buffer

    def give_back(self, buffer: Buffer) -> None:
        """Nobody wants the buffer's contents any more; copies that concern it may still be queued."""
        self._clock += 1
        buffer.slab.out -= 1
        buffer.slab.last_used = self._clock
        self.used_bytes -= buffer.nbytes
        self._free[buffer.nbytes].append(buffer)

    def clear(self) -> None:
        """Let go of all slabs; buffers that are in use keep theirs alive, and must not be given back any more."""
        self._slabs.clear()
        self._free.clear()
        self.held_bytes = self.used_bytes = 0
        self._trim()

    def _pop(self, size: int) -> Buffer | None:
        free = self._free.get(size)
        return free.popleft() if free else None

    def _grow(self, buffer_bytes: int) -> None:
        """One more slab of a class, in place of idle ones of other classes where there is no room otherwise."""
        single = single_bytes(buffer_bytes)
        for size in (slab_bytes(buffer_bytes), single):
            if self.held_bytes + size <= self.budget:
                break
        else:
            idle = sum(slab.memory.numel() for slab in self._slabs if not slab.out)
            if self.held_bytes - idle + single > self.budget:
                raise OffloadError(
                    f"no room for {buffer_bytes:,} bytes in pinned host memory: {self.held_bytes:,} of "
                    f"{self.budget:,} bytes are taken, {self.used_bytes:,} by contents"
                )
            size = single
            self._drop_idle(self.held_bytes + size - self.budget)
        try:
            memory = self._allocate(size)
        except RuntimeError as error:
            self._drop_idle(self.held_bytes)
            size = single
            try:
                memory = self._allocate(size)
            except RuntimeError:
                first = (str(error).splitlines() or [""])[0]
                raise OffloadError(f"the driver cannot pin {size:,} bytes of host memory: {first}") from error
        slab = Slab(memory)
        self._slabs.append(slab)
        self.held_bytes += size
        free = self._free.setdefault(buffer_bytes, deque())
        free.extend(
            Buffer(memory[start : start + buffer_bytes], slab)
            for start in range(0, size - buffer_bytes + 1, buffer_bytes)
        )

    def _drop_idle(self, at_least: int) -> None:
        """Let go of slabs of which no buffer is in use, those first that have been so for longest."""
        oldest = sorted((slab for slab in self._slabs if not slab.out), key=lambda slab: slab.last_used)
        while oldest and at_least > 0:
            at_least -= self._forget(oldest.pop(0))
        self._trim()

    def _forget(self, slab: Slab) -> int:
        """Let go of one slab; returns its size."""
        self._slabs.remove(slab)
        for size, free in self._free.items():
            self._free[size] = deque(buffer for buffer in free if buffer.slab is not slab)
        self.held_bytes -= slab.memory.numel()
        return slab.memory.numel()
