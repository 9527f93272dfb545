"""Contents for disk places, and ways to hold or break the I/O under them."""

from __future__ import annotations

import errno
import os
import random
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_remat.engine.offload.disk import DiskPlace
from lightning_remat.engine.offload.place import Content

THREADS = "lightning-remat-offload"


def some_bytes(count: int, seed: int = 0) -> Tensor:
    """Bytes that differ from those of another seed, and from zeros."""
    return torch.frombuffer(bytearray(random.Random(seed).randbytes(count)) or bytearray(1), dtype=torch.uint8)[:count]


def fetched(content: Content) -> Tensor:
    """What comes back."""
    into = torch.full((content.nbytes,), 0xAA, dtype=torch.uint8)
    content.begin_back(into)
    content.finish_back()
    return into


def scratch(place: DiskPlace) -> Any:
    """The file of a place that has taken something."""
    assert place._depot is not None
    return place._depot.file


def threads() -> list[threading.Thread]:
    """Those of all places."""
    return [thread for thread in threading.enumerate() if thread.name.startswith(THREADS)]


def settle(place: DiskPlace) -> None:
    """Wait until all transfers that were asked for are over, whatever became of them, and nobody holds their bytes."""
    depot = place._depot
    if depot is None:
        return
    idle = threading.Barrier(place.workers + 1)
    for _ in range(place.workers):  # what runs has ended when all threads are here
        depot._crew.put(idle.wait)
    idle.wait(60)


def wait_for_threads() -> None:
    """Until those that have been told to end have ended; called when all have."""
    for thread in threads():
        thread.join(10)
        assert not thread.is_alive()


class Held:
    """Calls of one of ``os``'s functions for files, stopped until they are let go.

    Args:
        monkeypatch: pytest's.
        name: ``"pwritev"`` or ``"preadv"``.

    Attributes:
        arrived: released once for each call that has come.
        open: set it to let all go on.
        fail: what they raise then, if anything.
        offsets: of the calls that went on, in order.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        self.arrived = threading.Semaphore(0)
        self.open = threading.Event()
        self.fail: OSError | None = None
        self.offsets: list[int] = []
        real = getattr(os, name)

        def held(fd: int, buffers: list[memoryview], offset: int) -> int:
            self.arrived.release()
            assert self.open.wait(60)
            if self.fail is not None:
                raise self.fail
            self.offsets.append(offset)
            return int(real(fd, buffers, offset))

        monkeypatch.setattr(os, name, held)

    def wait_for_calls(self, count: int) -> None:
        """Until so many more have come."""
        for _ in range(count):
            assert self.arrived.acquire(timeout=60)


def broken(monkeypatch: pytest.MonkeyPatch, name: str, fails: Callable[[int], int]) -> None:
    """Let calls of one of ``os``'s functions for files fail.

    Args:
        monkeypatch: pytest's.
        name: ``"pwritev"`` or ``"preadv"``.
        fails: from the number of the call to the error number that it fails with, or 0.
    """
    real = getattr(os, name)
    lock = threading.Lock()
    calls = 0

    def call(fd: int, buffers: list[memoryview], offset: int) -> int:
        nonlocal calls
        with lock:
            calls += 1
            number = fails(calls)
        if number:
            raise OSError(number, os.strerror(number))
        return int(real(fd, buffers, offset))

    monkeypatch.setattr(os, name, call)


FULL = errno.ENOSPC
BROKEN = errno.EIO


def damage_all(place: DiskPlace) -> None:
    """Change every byte of a place's file, as far as it is written."""
    with open(f"/proc/self/fd/{scratch(place).fileno()}", "r+b", buffering=0) as file:
        begin, size = 0, os.fstat(file.fileno()).st_size
        while begin < size:
            part = bytearray(os.pread(file.fileno(), 1 << 20, begin))
            begin += os.pwrite(file.fileno(), bytes(part).translate(_OTHER), begin)
        os.fsync(file.fileno())


_OTHER = bytes(byte ^ 0x40 for byte in range(256))


@contextmanager
def small_disk(monkeypatch: pytest.MonkeyPatch, directory: Path, size: int) -> Iterator[None]:
    """A file system of so many bytes: a real one where mounting is allowed, else the same answers from ``os``."""
    options = ["-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(directory)]
    if subprocess.run(["mount", *options], capture_output=True).returncode == 0:
        try:
            yield
        finally:
            subprocess.run(["umount", "-l", directory], check=True)
        return
    real_room, real_write = os.fstatvfs, os.pwritev

    def free(fd: int) -> int:
        others = sum(path.stat().st_blocks for path in directory.iterdir()) * 512
        return size - others - os.fstat(fd).st_blocks * 512

    def room(fd: int) -> os.statvfs_result:
        fields = list(real_room(fd))
        fields[2], fields[4] = size // fields[1], max(0, free(fd)) // fields[1]
        return os.statvfs_result(fields)

    def write(fd: int, buffers: list[memoryview], offset: int) -> int:
        if free(fd) < sum(map(len, buffers)):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return int(real_write(fd, buffers, offset))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fstatvfs", room)
        patch.setattr(os, "pwritev", write)
        yield
