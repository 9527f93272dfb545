"""Memory of a traced step that no value stands for: results of ops without gradient mode.

Inside of an ``autograd.Function``, for one, which is also where layers that are spread over processes do their
collectives. No plan decides about such results, but what reads them can be dropped, and then its record holds them. In
a traced step borders of blocks are kept, so that ops there have no records; what these would hold is noted here.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any
from weakref import ref as weakref

from torch import Tensor


class Nobodys:
    """Storages of such results while they live, who reads them, and which of them autograd saves, so that they stay."""

    def __init__(self) -> None:
        self._there: dict[Any, int] = {}
        self._count = 0
        self._read: dict[int, dict[int, int]] = {}
        self._saved: set[int] = set()

    def made(self, given: Iterable[Tensor], outs: Iterable[Tensor], values: Container[Any]) -> None:
        """An op without gradient mode has run.

        Args:
            given: what it was called on.
            outs: what it returned.
            values: storages that values stand for.
        """
        old = {weakref(t.untyped_storage()) for t in given if _has_storage(t)}
        for t in outs:
            if _has_storage(t):
                key = weakref(t.untyped_storage(), self._gone)
                if key not in old and key not in values:
                    self._there[key] = self._count = self._count + 1

    def read(self, o: int, tensors: Iterable[Tensor]) -> None:
        """An op that is counted reads these."""
        if self._there:
            found = {n: t.untyped_storage().nbytes() for t in tensors if (n := self._number(t)) is not None}
            if found:
                self._read[o] = found

    def saved(self, tensor: Tensor) -> None:
        """Autograd holds this one, and would under any plan."""
        if self._there and (number := self._number(tensor)) is not None:
            self._saved.add(number)

    def adopt(self, o: int, tensor: Tensor) -> None:
        """A value stands for this one from now on, made by an op that only handed it on."""
        self._there.pop(weakref(tensor.untyped_storage()), None)
        self._read.pop(o, None)

    def held_by(self, o: int) -> int:
        """Bytes that a record of an op would hold by itself."""
        return sum(nbytes for number, nbytes in self._read.get(o, {}).items() if number not in self._saved)

    def close(self) -> None:
        """The step is over: nothing that was made is watched any more."""
        self._there.clear()

    def _gone(self, key: Any) -> None:
        self._there.pop(key, None)

    def _number(self, tensor: Tensor) -> int | None:
        return self._there.get(weakref(tensor.untyped_storage())) if _has_storage(tensor) else None


def _has_storage(tensor: Tensor) -> bool:
    try:
        tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):  # a sparse tensor, or one without memory
        return False
    return True
