"""The scratch file of a place: no name, nobody else's, past the page cache where that can be."""

from __future__ import annotations

import contextlib
import mmap
import os
import tempfile
import weakref
from collections.abc import Callable
from errno import EIO

from lightning_remat.engine.offload.extents import BLOCK

_OPEN: weakref.WeakSet[ScratchFile] = weakref.WeakSet()


class ScratchFile:
    """A file that only this process can reach.

    On Linux it never has a name (``O_TMPFILE``), so nothing is left whatever ends the process, and what becomes of the
    directory does not matter any more. Where a file system cannot do that, its name is removed right after creation.

    Bytes go past the page cache (``O_DIRECT``) if a block written so at creation could be read again: offloaded bytes
    would otherwise fill the memory that they left. Else through it, and the kernel is told that they are not wanted.

    May be used from several threads at once; positions are in bytes.

    Args:
        directory: where.

    Attributes:
        direct: whether offsets, lengths and addresses must be multiples of :data:`BLOCK`.

    Raises:
        OSError: it cannot be created.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        # No `with` (SIM115): it stays open for as long as the place is in use.
        self._file = tempfile.TemporaryFile(dir=directory, prefix="lightning-remat-", buffering=0)  # noqa: SIM115
        try:
            self.direct = self._go_direct()
        except BaseException:
            self._file.close()
            raise
        _OPEN.add(self)

    def fileno(self) -> int:
        """The descriptor.

        Raises:
            ValueError: the file is closed. Asked for each transfer anew, so a number that somebody else has since been
                given is never written to.
        """
        return self._file.fileno()

    def write(self, offset: int, data: memoryview) -> None:
        """Write all of it.

        Raises:
            OSError: it could not be written; some of it may have been.
        """
        self._whole(os.pwritev, offset, data, "the file could not be written to any further")
        self._forget(offset, len(data))

    def read(self, offset: int, into: memoryview) -> None:
        """Fill all of it.

        Raises:
            OSError: it could not be read, or the file ends before.
        """
        self._whole(os.preadv, offset, into, "the file ends before what was written to it")
        self._forget(offset, len(into))

    def allocated(self) -> int:
        """Bytes of the disk that the file has now."""
        return os.fstat(self.fileno()).st_blocks * 512  # of 512 bytes, whatever the file system's own are

    def longest(self) -> int:
        """The end that the file may have if it is to leave some of the file system free (5%, or 1 GiB if less)."""
        room = os.fstatvfs(self.fileno())
        reserve = min(room.f_blocks * room.f_frsize // 20, 1 << 30)
        return self.allocated() + max(0, room.f_bavail * room.f_frsize - reserve)

    def close(self) -> None:
        """Let go of the file, and with it of all that is in it; safe to repeat."""
        self._file.close()

    def _whole(self, move: Callable[[int, list[memoryview], int], int], at: int, data: memoryview, end: str) -> None:
        begun = 0
        while begun < len(data):
            # EINTR is repeated by Python (PEP 475).
            moved = move(self.fileno(), [data[begun:]], at + begun)
            if self.direct and begun + moved < len(data):
                moved = (begun + moved) // BLOCK * BLOCK - begun  # go on at a block, at the price of some bytes twice
            if moved <= 0:
                raise OSError(EIO, end)
            begun += moved

    def _forget(self, offset: int, nbytes: int) -> None:
        """Tell the kernel not to keep it in memory; what is not yet on the disk, it begins to write."""
        if not self.direct and hasattr(os, "posix_fadvise"):
            with contextlib.suppress(OSError):  # advice
                os.posix_fadvise(self.fileno(), offset, nbytes, os.POSIX_FADV_DONTNEED)

    def _go_direct(self) -> bool:
        """Try a real block: some file systems take the flag and refuse every transfer, or the other way round.

        Raises:
            OSError: not even an ordinary write works, as on a full disk.
        """
        self.direct = False
        flag = getattr(os, "O_DIRECT", 0)
        if not flag:
            return False
        import fcntl  # not there on Windows, which has no O_DIRECT either

        flags = fcntl.fcntl(self.fileno(), fcntl.F_GETFL)
        with (
            mmap.mmap(-1, 2 * BLOCK, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as room,
            memoryview(room) as view,
            view[:BLOCK] as written,
            view[BLOCK:] as read,
        ):
            written[:] = os.urandom(BLOCK)
            try:
                fcntl.fcntl(self.fileno(), fcntl.F_SETFL, flags | flag)
                self.direct = True
                self.write(0, written)
                self.read(0, read)
                if read == written:
                    return True
            except OSError:
                pass
        self.direct = False
        fcntl.fcntl(self.fileno(), fcntl.F_SETFL, flags)
        return False


def _close_after_fork() -> None:
    """A child has no use for its copies of the descriptors, and they would keep the parent's disk space."""
    for file in list(_OPEN):
        file.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_after_fork)
