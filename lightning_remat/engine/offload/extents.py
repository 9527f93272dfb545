"""Room in a file: which bytes are taken, which are free.

Best fit over holes that are kept sorted and merged. What fits into no hole grows the file; what may not grow it is cut
into pieces over the holes, largest first, so that something is refused only if the holes together are too small for it.

Knows nothing of files, and nothing of threads: the caller has a lock.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable

BLOCK = 4096
"""Bytes; everything begins and ends at a multiple, which direct I/O asks for (blocks of devices are no larger)."""

Extent = tuple[int, int]
"""Where it begins in the file, and how long it is; both in bytes, multiples of :data:`BLOCK`."""


def rounded(nbytes: int) -> int:
    """What these bytes take of a file."""
    return -(-nbytes // BLOCK) * BLOCK


class Extents:
    """What is taken of a file.

    Args:
        budget: the most that may be taken, in bytes; None: whatever ``limit`` lets.

    Attributes:
        used: bytes that are taken.
        end: bytes from the file's beginning to the end of the last extent that is taken.
    """

    def __init__(self, budget: int | None = None) -> None:
        self.budget = budget
        self.used = 0
        self.end = 0
        self._holes: list[Extent] = []  # sorted, none touches another or the end

    def take(self, nbytes: int, limit: Callable[[int], int | None] = lambda end: None) -> list[Extent] | None:
        """Find room.

        Args:
            nbytes: how much; 0 takes nothing.
            limit: asked if the file would have to grow, with the end that it would have: the largest that it may have;
                None: any.

        Returns:
            Extents that hold them in this order, nearly always one; None: there is no room, and nothing was taken.
        """
        wanted = rounded(nbytes)
        if wanted == 0:
            return []
        if self.budget is not None and self.used + wanted > self.budget:
            return None
        found = self._best_hole(wanted)
        if found is not None:
            taken = [self._cut(found, wanted)]
        else:
            most = limit(self.end + wanted)
            if self.budget is not None:
                # The file itself stays within the budget, too, however the holes lie.
                most = self.budget if most is None else min(most, self.budget)
            if most is None or self.end + wanted <= most:
                taken = [(self.end, wanted)]
                self.end += wanted
            else:
                pieces = self._pieces(wanted, most // BLOCK * BLOCK)
                if pieces is None:
                    return None
                taken = pieces
        self.used += wanted
        return taken

    def give_back(self, extents: list[Extent]) -> None:
        """Free what :meth:`take` returned."""
        for begin, size in extents:
            self.used -= size
            self._free(begin, size)

    def _best_hole(self, wanted: int) -> int | None:
        best = None
        for index, (_, size) in enumerate(self._holes):
            if size >= wanted and (best is None or size < self._holes[best][1]):
                best = index
                if size == wanted:
                    break
        return best

    def _cut(self, index: int, wanted: int) -> Extent:
        begin, size = self._holes[index]
        if size == wanted:
            del self._holes[index]
        else:
            self._holes[index] = (begin + wanted, size - wanted)
        return begin, wanted

    def _pieces(self, wanted: int, most: int) -> list[Extent] | None:
        behind = max(0, most - self.end)
        if sum(size for _, size in self._holes) + behind < wanted:
            return None
        taken = []
        while wanted and self._holes:
            largest = max(range(len(self._holes)), key=lambda index: self._holes[index][1])
            taken.append(self._cut(largest, min(wanted, self._holes[largest][1])))
            wanted -= taken[-1][1]
        if wanted:
            taken.append((self.end, wanted))
            self.end += wanted
        return taken

    def _free(self, begin: int, size: int) -> None:
        index = bisect_left(self._holes, (begin, size))
        if index < len(self._holes) and begin + size == self._holes[index][0]:
            size += self._holes.pop(index)[1]
        if index > 0 and sum(self._holes[index - 1]) == begin:
            before = self._holes.pop(index - 1)
            begin, size = before[0], before[1] + size
            index -= 1
        if begin + size == self.end:
            self.end = begin
        else:
            self._holes.insert(index, (begin, size))
