"""What a disk place has while it is in use, in one process: file, room, threads, and the transfers that run.

Locking. One lock guards the books. ``release`` comes from destructors, so also from the garbage collector, in the
middle of any statement of any thread, maybe of one that has the lock: it never waits for it. It puts the room on a
list, which is worked off at once if the lock is free, and otherwise by whoever has it, right after giving it back
(:meth:`Depot.locked`).
"""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from queue import SimpleQueue
from time import monotonic

import torch
from torch import Tensor

from lightning_remat.engine.offload.buffers import Chunk, DeviceChunk, HostChunk
from lightning_remat.engine.offload.crew import Crew
from lightning_remat.engine.offload.extents import Extents
from lightning_remat.engine.offload.file import ScratchFile
from lightning_remat.engine.offload.gpu_direct import DirectFile
from lightning_remat.engine.offload.place import Traffic
from lightning_remat.engine.offload.transfer import Room, Transfer

_SECONDS_AT_EXIT = 5.0
_DEPOTS: weakref.WeakSet[Depot] = weakref.WeakSet()

Move = Callable[[int, Transfer, Tensor], None]
"""Does the step of a number, on a thread; several at once."""


class Closed(Exception):
    """The place was closed before a transfer was over."""


class Depot:
    """File, room, threads and books; see the top of this file.

    Args:
        file: open; closed when the last thread ends.
        budget: for :class:`Extents`.
        workers: how many threads.
        chunk: bytes of a step at most, a multiple of a block.
        traffic: where to count.
        used: told the bytes that are used whenever that has changed, with the lock held.

    Attributes:
        stuck: somebody has waited in vain for as long as they were ready to, and no step has ended since.
    """

    def __init__(
        self,
        file: ScratchFile,
        budget: int | None,
        workers: int,
        chunk: int,
        traffic: Traffic,
        used: Callable[[int], None],
    ) -> None:
        self.file = file
        self.direct_file = DirectFile(file.fileno())
        self.chunk = chunk
        self.stuck = False
        self._extents = Extents(budget)
        self._grown = 0  # up to here the file has its bytes of the disk already
        self._traffic = traffic
        self._used = used
        self._workers = workers
        self._closing = False
        self._lock = threading.Lock()
        self._unwanted: deque[Room] = deque()
        self._moving: set[Room] = set()
        self._clocks = {True: _Clock(), False: _Clock()}  # outwards, and back
        self._ended = 0  # steps, ever
        self._chunks: dict[torch.device, SimpleQueue[Chunk]] = {}
        self._crew = Crew(workers, partial(_close, self.direct_file, file))
        _DEPOTS.add(self)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """With the books to oneself; nothing that waits for a transfer belongs into it."""
        try:
            with self._lock:
                yield
        finally:
            self._sweep()

    def take(self, nbytes: int) -> Room | None:
        """Room for so many bytes; None: there is none.

        Raises:
            OSError: the file system does not say what is free.
        """
        with self.locked():
            extents = self._extents.take(nbytes, self._longest)
            if extents is None:
                return None
            self._used(self._extents.used)
            return Room(extents)

    def give_back(self, room: Room) -> None:
        """Not wanted any more, from any thread and at any time; never waits."""
        self._unwanted.append(room)
        self._sweep()

    def chunks_for(self, device: torch.device) -> SimpleQueue[Chunk]:
        """Where threads find chunks for tensors of a device: as many as there are threads, made at the first call.

        Raises:
            RuntimeError: there is no memory for them.
        """
        chunks = self._chunks.get(device)
        if chunks is None:
            chunks = SimpleQueue()
            for _ in range(self._workers):
                chunks.put(HostChunk(self.chunk) if device.type == "cpu" else DeviceChunk(self.chunk, device))
            self._chunks[device] = chunks
        return chunks

    def start(self, room: Room, transfer: Transfer, move: Move) -> None:
        """Have all steps of a transfer done; those of a transfer back before any that waits to go out.

        Args:
            room: what it uses; not given back before it has ended.
            transfer: not started before.
            move: does one step.
        """
        steps = transfer.left
        with self.locked():
            room.transfers.append(transfer)
            self._moving.add(room)
            if steps == 0:
                self._settle(room, transfer)
            elif self._closing:
                self._cancel(room, transfer, Closed())
                steps = 0
        for index in range(steps):
            self._crew.put(partial(self._run, room, transfer, move, index), urgent=not transfer.outward)

    def wait(self, transfer: Transfer, patience: float) -> bool:
        """Wait until no thread uses a transfer's tensor any more; adds to ``traffic.waited_seconds``.

        Only time in which this really waited counts: a process that was suspended has missed nothing.

        Args:
            transfer: started before.
            patience: for how many seconds to wait without any progress.

        Returns:
            Whether that is so.
        """
        if transfer.done.is_set():
            return True
        begun = monotonic()
        interval = min(1.0, patience / 4)
        idle, seen = 0.0, self._progress(transfer)
        try:
            while not transfer.done.wait(interval):
                idle += interval
                now = self._progress(transfer)
                if now != seen:
                    idle, seen = 0.0, now
                elif self.stuck or idle >= patience:
                    self.stuck = True
                    return False
            return True
        finally:
            with self.locked():
                self._traffic.waited_seconds += monotonic() - begun

    def give_up(self, room: Room, transfer: Transfer, error: BaseException) -> None:
        """Do not wait for it any longer; a step that runs keeps its references until it ends."""
        with self.locked():
            if not transfer.done.is_set() and transfer.error is None:
                self._traffic.failures += 1
                self._cancel(room, transfer, error)

    def end(self) -> None:
        """Let the threads end, without waiting for them; takes no lock, for finalizers."""
        self._closing = True
        self._crew.end()

    def close(self, patience: float) -> None:
        """Let running steps end, drop all others, end the threads; waits for at most ``patience`` seconds."""
        with self.locked():
            self._closing = True
            self._used = _nobody  # what is still to be given back is no longer the place's
            self._crew.drop()
            for room in list(self._moving):
                for transfer in list(room.transfers):
                    self._cancel(room, transfer, Closed())
        self._crew.end()
        self._crew.join(0.0 if self.stuck else patience)

    def _longest(self, end: int) -> int:
        if end > self._grown:
            # The file keeps what it once had of the disk, so this is asked for in the first steps only.
            self._grown = self.file.allocated()
            if end > self._grown:
                return self.file.longest()
        return self._grown

    def _progress(self, transfer: Transfer) -> tuple[int, int]:
        """Changes as long as there is any: of the transfer itself, and of what it may be waiting for."""
        waits = transfer.left > transfer.running
        return transfer.left, self._ended if waits else 0

    def _run(self, room: Room, transfer: Transfer, move: Move, index: int) -> None:
        tensor = self._begin(room, transfer)
        if tensor is None:
            return
        error: BaseException | None = None
        try:
            move(index, transfer, tensor)
        except BaseException as failure:
            # Whatever it is belongs to whoever waits. Its traceback would hold frames, and they the tensor.
            error = failure.with_traceback(None)
        del tensor  # before anybody is told: memory must be free at a known moment, for peaks that can be relied on
        self._finish(room, transfer, error)

    def _begin(self, room: Room, transfer: Transfer) -> Tensor | None:
        with self.locked():
            if self._closing and not transfer.cancelled:
                self._cancel(room, transfer, Closed())
            if transfer.cancelled:
                return None
            self._clocks[transfer.outward].begin()
            transfer.running += 1
            return transfer.tensor

    def _finish(self, room: Room, transfer: Transfer, error: BaseException | None) -> None:
        with self.locked():
            seconds = self._clocks[transfer.outward].end()
            if transfer.outward:
                self._traffic.seconds_out += seconds
            else:
                self._traffic.seconds_in += seconds
            self._ended += 1
            self.stuck = False
            transfer.running -= 1
            transfer.left -= 1
            if error is not None and not transfer.cancelled:
                self._traffic.failures += 1
                self._cancel(room, transfer, error)
            elif transfer.left == 0 or transfer.cancelled:
                self._settle(room, transfer)

    def _cancel(self, room: Room, transfer: Transfer, error: BaseException) -> None:
        transfer.cancelled = True
        if transfer.error is None:
            transfer.error = error
        self._settle(room, transfer)

    def _settle(self, room: Room, transfer: Transfer) -> None:
        """The transfer is over, if no step of it runs."""
        if transfer.running or transfer.done.is_set():
            return
        if not transfer.cancelled and transfer.outward:
            self._traffic.bytes_out += transfer.nbytes
        elif not transfer.cancelled:
            self._traffic.bytes_in += transfer.nbytes
        transfer.tensor = transfer.ready = None
        room.transfers.remove(transfer)
        if not room.transfers:
            self._moving.discard(room)
            if room.unwanted:
                self._free(room)
        transfer.done.set()

    def _free(self, room: Room) -> None:
        extents, room.extents = room.extents, []
        self._extents.give_back(extents)
        self._used(self._extents.used)

    def _sweep(self) -> None:
        # Whoever has the lock comes here after giving it back, so nothing that was put on the list before is forgotten.
        while self._unwanted and self._lock.acquire(blocking=False):
            try:
                while self._unwanted:
                    room = self._unwanted.popleft()
                    room.unwanted = True
                    for transfer in list(room.transfers):
                        self._cancel(room, transfer, Closed())
                    if not room.transfers:
                        self._free(room)
            finally:
                self._lock.release()


class _Clock:
    """For how long at least one step ran; steps at the same time count once."""

    def __init__(self) -> None:
        self._running = 0
        self._since = 0.0

    def begin(self) -> None:
        """One more runs."""
        if self._running == 0:
            self._since = monotonic()
        self._running += 1

    def end(self) -> float:
        """One less; returns the seconds since there were any if it was the last, and else 0."""
        self._running -= 1
        return monotonic() - self._since if self._running == 0 else 0.0


@atexit.register
def _close_all() -> None:
    """At the end of the interpreter, let running steps end.

    Python then ends daemons wherever they want its lock, by unwinding their stacks; in the middle of PyTorch's C++ that
    aborts the process. A disk that does not answer is not waited for any longer: such a thread is in the kernel.
    """
    for depot in list(_DEPOTS):
        depot.close(_SECONDS_AT_EXIT)


if hasattr(os, "register_at_fork"):
    # Those of the parent have locks that nobody may give back in a child.
    os.register_at_fork(after_in_child=_DEPOTS.clear)


def _nobody(used: int) -> None:
    """Nobody is told."""


def _close(direct_file: DirectFile, file: ScratchFile) -> None:
    direct_file.close()
    file.close()
