"""One content that has left the device, or is about to: where it is, and how to have it back.

A value whose content has left is like a dropped one whose op takes no inputs; in place of an overload that op has a
:class:`Moved`, which replay asks for the content. When nobody can ask any more, the op dies by reference count, and
everything here with it::

    what autograd holds ──> value ──> op ──> Moved ──> Content (at its place)
                                             Moved <┄┄ Mover   (weak)
"""

from __future__ import annotations

from typing import Protocol
from weakref import ref as weakref

import torch
from torch import Tensor

from lightning_remat.engine.offload.place import Content
from lightning_remat.engine.values import OWNED, PACKED, Op, Value, from_storage, geometry_of
from lightning_remat.errors import MODIFIED, OffloadError, ReplayError

_LOST = (
    "Nor can it be computed again: what random and in-place operations have made cannot, nor what was made from what "
    "is gone. The gradients of this step are incomplete, so clear them and run the batch again; Remat.attempt, "
    "RematStrategy and RematCallback undo such a step and run it again without offload."
)


class Minder(Protocol):
    """Who looks after contents: a :class:`~lightning_remat.engine.offload.mover.Mover`."""

    def is_out(self, moved: Moved) -> None:
        """It is no longer resident."""

    def stays(self, moved: Moved, error: OffloadError) -> None:
        """It could not be written, and is kept as it is."""

    def fetched(self, moved: Moved) -> None:
        """It is being asked for."""

    def asked_for(self, moved: Moved) -> None:
        """What was read ahead is no longer ahead."""

    def recompute(self, value: Value, error: OffloadError) -> bool:
        """It cannot be had back: compute it again, if that is possible."""


class Moved:
    """One content.

    Attributes:
        mover: who looks after it.
        number: the how manieth of its step.
        step: which step that was, by the mover's count.
        nbytes: size of its storage.
        geometry: under which the content is seen.
        device: where it was, and comes back to.
        resident: the content itself, for as long as it has not been let go of; without history.
        version: version counter of the content.
        content: at its place; None: it could not leave, and stays.
        coming: what it is being read into.
        spoiled: it was changed while it was on its way out.
    """

    __slots__ = (
        "__weakref__",
        "coming",
        "content",
        "device",
        "geometry",
        "mover",
        "nbytes",
        "number",
        "resident",
        "spoiled",
        "step",
        "version",
    )

    def __init__(self, mover: Minder, number: int, step: int, resident: Tensor, content: Content) -> None:
        self.resident: Tensor | None = None
        self.content: Content | None = content
        self.coming: Tensor | None = None
        self.mover = mover
        self.number = number
        self.step = step
        self.nbytes = content.nbytes
        self.geometry = geometry_of(resident)
        self.device = resident.device
        self.version = resident._version
        self.spoiled = False
        self.resident = resident

    def let_out(self) -> bool:
        """Wait until the content is at its place, and let go of it here; False: it could not be moved, and stays."""
        if self.resident is None or self.content is None:
            return self.resident is None
        try:
            self.content.finish_out()
        except OffloadError as error:
            self.content = None
            self.mover.stays(self, error)
            return False
        self.spoiled = self.resident._version != self.version
        self.resident = None
        self.mover.is_out(self)
        return True

    def seal(self) -> None:
        """The storage is about to be written to: from now on the content is elsewhere."""
        if not self.let_out() and self.resident is not None:
            storage = self.resident.untyped_storage().clone()  # type: ignore[no-untyped-call]  # torch's has no types
            self.resident = from_storage(storage, self.geometry, self.device)
            self.version = self.resident._version

    def begin_back(self) -> None:
        """Begin to read it; it must have been let out."""
        assert self.content is not None
        into = torch.empty(self.nbytes, dtype=torch.uint8, device=self.device)
        self.content.begin_back(into)
        self.coming = into

    def was_changed(self) -> bool:
        """Whether it was changed in place before it had left, where the tape could not see it."""
        return self.spoiled or (self.resident is not None and self.resident._version != self.version)

    def fetch(self) -> tuple[Tensor, bool]:
        """The content, and whether its memory belongs to whoever asked; may be asked again.

        Raises:
            RuntimeError: it was changed in place before it had left, in PyTorch's words; or out of memory, and then
                nothing has changed.
            OffloadError: it cannot be had back.
        """
        if self.was_changed():
            raise RuntimeError(MODIFIED)
        if self.resident is not None:
            return self.resident, False
        if self.coming is None:
            self.begin_back()
        else:
            self.mover.asked_for(self)
        into, self.coming = self.coming, None
        assert into is not None
        assert self.content is not None
        self.content.finish_back()
        return from_storage(into.untyped_storage(), self.geometry, self.device), True

    def __del__(self) -> None:
        if self.resident is not None and self.content is not None:
            self.mover.is_out(self)
        if self.coming is not None:
            self.mover.asked_for(self)
        if self.content is not None:
            self.content.release()


def bring_back(op: Op) -> None:
    """Replay for a value whose content has left.

    Raises:
        RuntimeError, OffloadError: see :meth:`Moved.fetch`; where its recipe is known, it is computed again instead.
        ReplayError: it was changed where plain PyTorch may do that, since autograd has not saved it.
    """
    try:
        fetch(op)
    except OffloadError as error:
        value: Value | None = op.outs[0][1]()
        if value is not None and not op.func.mover.recompute(value, error):
            raise OffloadError(f"{error} {_LOST}") from error


def fetch(op: Op) -> None:
    """The same, and nothing is computed again.

    Raises:
        RuntimeError, OffloadError, ReplayError: as :func:`bring_back` does.
    """
    moved: Moved = op.func
    value: Value | None = op.outs[0][1]()
    if value is None or value.tensor is not None:
        return
    moved.mover.fetched(moved)
    if not value.flags & PACKED and moved.was_changed():
        raise ReplayError(
            f"a tensor of shape {tuple(moved.geometry[0])} from which dropped values are recomputed was changed in "
            "place between forward and backward, outside the recorded step, while it was leaving the device. Run that "
            "change inside the step (under the same Remat context), or keep these values: policy='offload_only'."
        )
    tensor, owned = moved.fetch()
    value.tensor = tensor
    value.geometry = moved.geometry
    if owned:
        value.flags |= OWNED
    else:
        value.version, value.anchor = moved.version, id(tensor.untyped_storage())
    value.op = None


def fetch_op(moved: Moved, value: Value, index: int) -> Op:
    """The op of a value whose content has left."""
    op = Op()
    op.func = moved
    op.args = []
    op.needs = []
    op.extra = None
    op.outs = ((0, weakref(value)),)
    op.index = index
    return op


def moved_of(value: Value | None) -> Moved | None:
    """Where the content of a value is, if it has left."""
    if value is None or value.op is None:
        return None
    return value.op.func if value.op.func.__class__ is Moved else None
