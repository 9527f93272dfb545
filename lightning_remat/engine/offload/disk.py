"""Contents on a disk: a place that uses one private scratch file."""

from __future__ import annotations

import os
import threading
import weakref
from functools import partial
from pathlib import Path

import xxhash
from torch import Tensor

from lightning_remat.engine.offload import gpu_direct
from lightning_remat.engine.offload.buffers import Chunk
from lightning_remat.engine.offload.depot import Closed, Depot
from lightning_remat.engine.offload.directory import default_directory
from lightning_remat.engine.offload.extents import rounded
from lightning_remat.engine.offload.file import ScratchFile
from lightning_remat.engine.offload.place import Content, Place, Traffic
from lightning_remat.engine.offload.transfer import Room, Step, Transfer, steps_of
from lightning_remat.errors import OffloadError
from lightning_remat.sizes import format_bytes

CHUNK = 4 << 20
"""Bytes that move in one go, a multiple of a block."""

_WAYS_OUT = (
    "Name another directory (offload='/some/directory'), or offload to host memory (offload='cpu') if there is an "
    "accelerator."
)

_WAYS_TO_MORE = "Raise disk_budget= or leave it out, or move less (a larger min_bytes=)."

_PLACES: weakref.WeakSet[DiskPlace] = weakref.WeakSet()


class DiskPlace(Place):
    """Contents in one file of a directory, made when the first one comes, with no name by which others could open it.

    Threads of its own move them, in chunks and past the page cache where that can be: writes in the order in which they
    were given, and reads before writes that wait. Nothing is left in the directory, whatever ends the process. The file
    keeps the disk space that it once had until the place is closed, or nobody has it any more.

    A child made by ``fork`` has the place as it was made, and empty: its contents go to a file of its own, and those of
    its parent cannot be had there.

    Args:
        directory: where; None: :func:`directory.default_directory`. Looked at when the first content comes
            (:func:`directory.check_directory` does so before).
        budget: the most that contents may take, in bytes, rounded up to blocks of 4 KiB each; None: what the disk has,
            less 5% of it, or 1 GiB if that is less.
        checksum: whether what is read is compared with what was written, by 64 bits of XXH3 for each chunk. Without, a
            disk that gives back other bytes goes unnoticed, and gradients are wrong.
        workers: how many threads move chunks.
        patience: for how many seconds to wait for a transfer without any progress, before it counts as failed.

    Attributes:
        traffic: ``seconds_out`` and ``seconds_in`` count the time in which at least one thread moved bytes in that
            direction, checksum and copies included; ``waited_seconds`` that of ``finish_out`` and ``finish_back``.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str] | None = None,
        *,
        budget: int | None = None,
        checksum: bool = True,
        workers: int = 2,
        patience: float = 60.0,
    ) -> None:
        self.name = "disk"
        self.traffic = Traffic()
        self.used_bytes = 0
        self.peak_bytes = 0
        self.directory = None if directory is None else Path(directory)
        self.budget = budget
        self.checksum = checksum
        self.workers = workers
        self.patience = patience
        self._closed = False
        self._opening = threading.Lock()
        self._depot: Depot | None = None
        self._finalizer: weakref.finalize[[], DiskPlace] | None = None
        _PLACES.add(self)

    def take(self, source: Tensor) -> Content:
        """See :class:`Place`."""
        direct = gpu_direct.wanted(source, self.checksum)
        try:
            depot = self._open()
            if depot is None:
                raise self._refusal(source.nbytes, "the place is closed")
            if not direct:
                depot.chunks_for(source.device)
            if depot.stuck:
                raise self._refusal(source.nbytes, f"the disk has not answered for {self.patience:g} s")
            room = depot.take(source.nbytes)
        except OSError as error:
            raise self._refusal(source.nbytes, _reason(error)) from error
        except RuntimeError as error:
            if isinstance(error, OffloadError):
                raise
            raise self._refusal(source.nbytes, f"no host memory for chunks ({error})") from error
        if room is None:
            raise self._refusal(source.nbytes, *self._why_full(source.nbytes))
        return DiskContent(self, depot, room, source, direct)

    def close(self) -> None:
        """See :class:`Place`; what does not answer is left to itself after ``patience`` seconds."""
        with self._opening:
            self._closed = True
            depot, self._depot = self._depot, None
            finalizer, self._finalizer = self._finalizer, None
        if finalizer is not None:
            finalizer.detach()
        if depot is not None:
            depot.close(self.patience)
        self.used_bytes = 0

    def has(self, depot: Depot) -> bool:
        """Whether a depot is still the one in use: the place was not closed, and this is not a fork of its process."""
        return self._depot is depot

    def allocated(self) -> int:
        """Bytes of the disk that its file has now."""
        depot = self._depot
        return depot.file.allocated() if depot is not None else 0

    def where(self) -> str:
        """The directory, for messages."""
        return repr(str(self.directory)) if self.directory is not None else "the directory for temporary files"

    def _open(self) -> Depot | None:
        with self._opening:
            if self._closed:
                return None
            if self._depot is None:
                if self.directory is None:
                    self.directory = default_directory()
                file = ScratchFile(self.directory)
                used = partial(_tell, weakref.ref(self))
                self._depot = Depot(file, self.budget, self.workers, CHUNK, self.traffic, used)
                self._finalizer = weakref.finalize(self, self._depot.end)
                self._finalizer.atexit = False  # the depot has its own way
            return self._depot

    def _refusal(self, nbytes: int, reason: str, ways: str = _WAYS_OUT) -> OffloadError:
        with self._opening:
            self.traffic.refused += 1
        return OffloadError(f"{format_bytes(nbytes)} cannot go to the disk in {self.where()}: {reason}. {ways}")

    def _why_full(self, nbytes: int) -> tuple[str, str]:
        """The reason, and the ways out."""
        if self.budget is not None and self.used_bytes + rounded(nbytes) > self.budget:
            taken = format_bytes(self.used_bytes)
            return f"{taken} of disk_budget={format_bytes(self.budget)} are taken", _WAYS_TO_MORE
        there = format_bytes(self.used_bytes)
        return f"the disk is full, but for what is left to others ({there} are there)", _WAYS_OUT

    def _forget_parent(self) -> None:
        """Begin anew in a child: threads are not inherited, locks may be held by those that are not there."""
        if self._finalizer is not None:
            self._finalizer.detach()
        self._opening = threading.Lock()
        self._depot = self._finalizer = None
        self.used_bytes = 0


class DiskContent(Content):
    """See :class:`Content`.

    Args:
        place: held, so that it lives as long as what is in it.
        depot: of the place.
        room: for the bytes.
        source: see :meth:`Place.take`.
        direct: by GPUDirect Storage.
    """

    def __init__(self, place: DiskPlace, depot: Depot, room: Room, source: Tensor, direct: bool) -> None:
        self.nbytes = source.nbytes
        self._place = place
        self._depot = depot
        self._room = room
        self._direct = direct
        self._steps = steps_of(room.extents, source.nbytes, depot.chunk)
        self._sums: list[int | None] = [None] * len(self._steps)
        self._released = False
        self._arrived = False
        self._failure: tuple[str, BaseException] | None = None
        self._back: Transfer | None = None
        self._out = Transfer(source, len(self._steps), outward=True)
        depot.start(room, self._out, self._write)

    def __del__(self) -> None:
        """Give the room back if the owner did not."""
        self.release()

    def is_out(self) -> bool:
        """See :class:`Content`."""
        return self._arrived or (self._out.done.is_set() and self._out.error is None)

    def finish_out(self) -> None:
        """See :class:`Content`."""
        if self._arrived and self._there():
            return
        if self._failure is None:
            error = self._ended(self._out)
            if error is None and self._there():
                self._arrived = True
                return
            self._failure = self._message("written to", error), error or Closed()
            self.release()
        text, error = self._failure
        raise OffloadError(text) from error

    def begin_back(self, into: Tensor) -> None:
        """See :class:`Content`.

        Raises:
            RuntimeError: ``finish_out`` has not returned, or ``finish_back`` not since the last call.
            ValueError: ``into`` has another size.
        """
        if not self._arrived or self._back is not None:
            raise RuntimeError("begin_back comes after finish_out, and not twice without finish_back")
        if into.nbytes != self.nbytes:
            raise ValueError(f"into has {into.nbytes} bytes, and the content {self.nbytes}")
        self._back = Transfer(into, len(self._steps), outward=False)
        if self._there():
            self._depot.start(self._room, self._back, self._read)

    def finish_back(self) -> None:
        """See :class:`Content`."""
        back, self._back = self._back, None
        if back is None:
            raise RuntimeError("finish_back comes after begin_back")
        error = self._ended(back) if self._there() else Closed()
        if error is not None:
            raise OffloadError(self._message("read from", error)) from error

    def release(self) -> None:
        """See :class:`Content`."""
        if not self._released:
            self._released = True
            self._depot.give_back(self._room)

    def _there(self) -> bool:
        return not self._released and self._place.has(self._depot)

    def _ended(self, transfer: Transfer) -> BaseException | None:
        """Wait for a transfer; returns what it met."""
        if not self._place.has(self._depot):
            return Closed()
        patience = self._place.patience
        if not self._depot.wait(transfer, patience):
            self._depot.give_up(self._room, transfer, TimeoutError(f"the disk has not answered for {patience:g} s"))
        return transfer.error

    def _message(self, verb: str, error: BaseException | None) -> str:
        what = f"{format_bytes(self.nbytes)} could not be {verb} the disk in {self._place.where()}"
        if error is None or isinstance(error, Closed):
            here = self._place.has(self._depot)
            why = "they were released" if here else "the place was closed, or this is a fork of its process"
            return f"{what}: {why}."
        return f"{what}: {_reason(error)}. {_WAYS_OUT}"

    def _write(self, index: int, transfer: Transfer, tensor: Tensor) -> None:
        step = self._steps[index]
        if self._direct:
            part = tensor[step.begin : step.begin + step.nbytes]
            self._depot.direct_file.write(step.offset, part, transfer.ready)
            return
        with _Borrowed(self._depot, tensor) as chunk:
            chunk.fill(tensor, step.begin, step.nbytes, transfer.ready)
            if self._place.checksum:
                self._sums[index] = xxhash.xxh3_64_intdigest(chunk.view[: step.nbytes])
            self._depot.file.write(step.offset, chunk.view[: self._length(step)])

    def _read(self, index: int, transfer: Transfer, tensor: Tensor) -> None:
        step = self._steps[index]
        if self._direct:
            part = tensor[step.begin : step.begin + step.nbytes]
            self._depot.direct_file.read(step.offset, part, transfer.ready)
            return
        with _Borrowed(self._depot, tensor) as chunk:
            self._depot.file.read(step.offset, chunk.view[: self._length(step)])
            if self._sums[index] is not None:
                found = xxhash.xxh3_64_intdigest(chunk.view[: step.nbytes])
                if found != self._sums[index]:
                    raise DamagedError(f"what was read is not what was written (bytes {step.begin} and following)")
            if not transfer.cancelled:  # then `into` is somebody else's by now
                chunk.spill(tensor, step.begin, step.nbytes, transfer.ready)

    def _length(self, step: Step) -> int:
        """Bytes of a step in the file: direct I/O knows whole blocks only, and extents have them."""
        return rounded(step.nbytes) if self._depot.file.direct else step.nbytes


class DamagedError(Exception):
    """The disk has given back other bytes than it was given."""


class _Borrowed:
    """A chunk for as long as one step takes."""

    def __init__(self, depot: Depot, tensor: Tensor) -> None:
        self._chunks = depot.chunks_for(tensor.device)

    def __enter__(self) -> Chunk:
        self._chunk = self._chunks.get()
        return self._chunk

    def __exit__(self, *_: object) -> None:
        self._chunks.put(self._chunk)


def _reason(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror} ({type(error).__name__}, errno {error.errno})"
    return str(error) or type(error).__name__


def _tell(place_reference: weakref.ref[DiskPlace], used: int) -> None:
    place = place_reference()
    if place is not None:
        place.used_bytes = used
        place.peak_bytes = max(place.peak_bytes, used)


def _in_child() -> None:
    for place in list(_PLACES):
        place._forget_parent()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)
