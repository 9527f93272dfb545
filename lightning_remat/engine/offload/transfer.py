"""One content on its way to a file or back, as steps that threads do."""

from __future__ import annotations

import threading
from typing import NamedTuple

from torch import Tensor

from lightning_remat.engine.offload.buffers import moment
from lightning_remat.engine.offload.extents import Extent


class Step(NamedTuple):
    """What one thread moves in one go, in bytes: from where in the tensor, where in the file, how much."""

    begin: int
    offset: int
    nbytes: int


def steps_of(extents: list[Extent], nbytes: int, chunk: int) -> list[Step]:
    """How a tensor of ``nbytes`` moves to or from its extents, in steps of at most ``chunk`` bytes."""
    steps = []
    begin = 0
    for offset, size in extents:
        last = min(size, nbytes - begin)
        steps += [Step(begin + at, offset + at, min(chunk, last - at)) for at in range(0, last, chunk)]
        begin += last
    return steps


class Transfer:
    """One content on its way, in either direction. All but ``done`` is guarded by the depot's lock.

    Attributes:
        outward: to the disk.
        tensor: what is read or filled; held until no thread uses it any more, and no longer.
        ready: from when on it may be used (:func:`buffers.moment`).
        left: steps that have not ended.
        running: steps that a thread is at.
        moved: steps that have ended well.
        cancelled: steps that nobody has begun are not wanted any more.
        error: the first that a step met, or why it was given up.
        done: set when no thread uses the tensor any more.
    """

    def __init__(self, tensor: Tensor, steps: int, outward: bool) -> None:
        self.outward = outward
        self.tensor: Tensor | None = tensor
        self.nbytes = tensor.nbytes
        self.ready = moment(tensor)
        self.left = steps
        self.running = 0
        self.moved = 0
        self.cancelled = False
        self.error: BaseException | None = None
        self.done = threading.Event()


class Room:
    """The part of a file that a content has, and the transfers that use it.

    Attributes:
        extents: where.
        transfers: those that have not ended; as long as there is one, the extents are not given back.
        unwanted: to be given back as soon as that is so.
    """

    def __init__(self, extents: list[Extent]) -> None:
        self.extents = extents
        self.transfers: list[Transfer] = []
        self.unwanted = False
