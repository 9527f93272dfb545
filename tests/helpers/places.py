"""A place in memory that does what it is told: for tests of what is moved, when, and what happens if it fails."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lightning_remat.engine.offload.place import Traffic
from lightning_remat.errors import OffloadError

_NoModes = torch._C._DisableTorchDispatch  # a real place copies where nobody sees it

Fails = Callable[[int], bool]
"""Whether the content of this number (counted from 0 over all) fails."""


def _never(number: int) -> bool:
    return False


class MemoryContent:
    """A content that is copied when it must be: the source is read as late as that may happen."""

    def __init__(self, place: MemoryPlace, source: Tensor) -> None:
        self.place = place
        self.number = place.taken
        self.nbytes = source.numel()
        self._source: Tensor | None = source
        self._bytes: Tensor | None = None
        self._into: Tensor | None = None
        self.released = False
        place.taken += 1
        place.used_bytes += self.nbytes
        place.peak_bytes = max(place.peak_bytes, place.used_bytes)

    def is_out(self) -> bool:
        return self._source is None

    def finish_out(self) -> None:
        if self._source is not None:
            if self.place.write_fails(self.number):
                self.place.traffic.failures += 1
                self.release()
                raise OffloadError(f"content {self.number} cannot be written")
            with _NoModes():
                self._bytes = self._source.clone()
            self._source = None
            self.place.traffic.bytes_out += self.nbytes
            self.place.log.append(("out", self.number))

    def begin_back(self, into: Tensor) -> None:
        assert self._bytes is not None
        assert self._into is None
        assert into.numel() == self.nbytes
        self._into = into
        self.place.log.append(("ahead", self.number))

    def finish_back(self) -> None:
        into, self._into = self._into, None
        assert into is not None
        if self.place.read_fails(self.number):
            self.place.traffic.failures += 1
            raise OffloadError(f"content {self.number} cannot be read")
        with _NoModes():
            into.copy_(self._bytes)
        self.place.traffic.bytes_in += self.nbytes
        self.place.log.append(("back", self.number))

    def release(self) -> None:
        if not self.released:
            self.released = True
            self.place.used_bytes -= self.nbytes
            self._source = self._bytes = self._into = None


class MemoryPlace:
    """A place that copies to memory of its own.

    Args:
        most: bytes that it takes; None: any number.
    """

    name = "memory"

    def __init__(self, most: int | None = None) -> None:
        self.traffic = Traffic()
        self.used_bytes = 0
        self.peak_bytes = 0
        self.taken = 0
        self.most = most
        self.write_fails: Fails = _never
        self.read_fails: Fails = _never
        self.log: list[tuple[str, int]] = []
        self.closed = False

    def take(self, source: Tensor) -> MemoryContent:
        if self.most is not None and self.used_bytes + source.numel() > self.most:
            self.traffic.refused += 1
            raise OffloadError("there is no room")
        return MemoryContent(self, source)

    def close(self) -> None:
        self.closed = True


class OutsideContent(MemoryContent):
    """A content that is copied out of what PyTorch allocates."""

    place: OutsidePlace

    def finish_out(self) -> None:
        if self._source is not None:
            self._outside = self._source.numpy().copy()
            self._source = None
            self.place.traffic.bytes_out += self.nbytes

    def begin_back(self, into: Tensor) -> None:
        self.place.comes(into)
        self._into = into

    def finish_back(self) -> None:
        into, self._into = self._into, None
        assert into is not None
        into.numpy()[:] = self._outside
        self.place.traffic.bytes_in += self.nbytes


class OutsidePlace(MemoryPlace):
    """A place whose copies no allocator of PyTorch's knows of: for those who count memory.

    Args:
        most: bytes that it takes; None: any number.
        comes: is shown the memory that a content is about to come back into.

    Attributes:
        sizes: of all contents, in the order in which they left.
    """

    def __init__(self, most: int | None = None, comes: Callable[[Tensor], object] = lambda into: None) -> None:
        super().__init__(most)
        self.comes = comes
        self.sizes: list[int] = []

    def take(self, source: Tensor) -> OutsideContent:
        if self.most is not None and self.used_bytes + source.numel() > self.most:
            self.traffic.refused += 1
            raise OffloadError("there is no room")
        self.sizes.append(source.numel())
        return OutsideContent(self, source)
