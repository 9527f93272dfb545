"""Values, the ops that make them, and references to them.

A *value* is the content of one storage at one point in time. Views are not values: a *reference* is a value plus the
geometry (size, stride, offset, dtype) under which it was used. Nothing here points back, so that everything is freed
by reference count alone::

    packed reference (held by autograd) ──> Value ──> Op ──> references to its inputs ──> Value ...
                                            Value <┄┄ Op     (weak)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import ref as weakref

import torch
from torch import Tensor

from lightning_remat.engine.generators import RecordedState
from lightning_remat.engine.rules import Rule
from lightning_remat.errors import MODIFIED, ReplayError

Geometry = tuple[Any, ...]
"""(size, stride, storage offset, dtype) as a tensor reports them; (conjugate, negative) as a fifth if a bit is set."""


Ref = tuple["Value", "Geometry | None"]
"""A tensor argument, or what autograd holds in place of a saved tensor. A plain tuple: making one is most of what
recording costs, and arguments of ops contain no other tuples."""


class Value:
    """The content of one storage at one time.

    ``tensor`` is set while the content is there: always for a leaf (a value that the tape did not compute, or was told
    to keep), and from its replay on for a dropped one. ``op`` is set while the content is absent and can be made.
    """

    __slots__ = ("__weakref__", "anchor", "flags", "geometry", "op", "seen", "source", "tensor", "version")

    tensor: Tensor | None
    op: Op | None
    geometry: Geometry | None  # of ``tensor``, or of what the op returned; None: not looked up yet
    version: int | None  # of a leaf: its version counter when it was first referenced; None: do not check
    flags: int  # PACKED, STALE, OWNED, HELD
    anchor: Any  # of a leaf: identity of the storage it had when it was referenced, or a Counter
    seen: int  # of a dropped one: the version counter of its storage, as far as we see what is written there
    source: Any  # where its content comes from (sources.Source), while an eviction looks after the tape; else unset


class Counter:
    """A version counter other than that of a leaf's own tensor that moves when the leaf is written to.

    Attributes:
        tensor: has it, and nothing else.
        version: what it was when the leaf was referenced.
    """

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: Tensor, version: int) -> None:
        self.tensor = tensor
        self.version = version

    @property
    def moved(self) -> bool:
        """Whether there was a write since."""
        return bool(self.tensor._version != self.version)


PACKED = 1  # autograd has saved it
STALE = 2  # it was written to after autograd had saved it
OWNED = 4  # its tensor was made by a replay, and a replay may write into it
SPLIT = 16  # its storage was split into views that count their versions apart (unsafe_split, in GRU cells)
HELD = 8  # its tensor is the user's own object (a parameter, a batch), not an alias

SIDE = 32
"""A further output with at most this part of the first one's elements is a side output, which stays where it is."""


def least_output(outs: Sequence[Any]) -> int:
    """Elements of the largest further output that would be a side output."""
    return outs[0].numel() // SIDE if outs and isinstance(outs[0], Tensor) else 0


class Op:
    """One recorded op: what to call, and on what."""

    __slots__ = ("__weakref__", "args", "extra", "func", "index", "label", "needs", "outs")

    func: Any
    args: list[Any]  # tensors are replaced by references, which are the only tuples here (or by Blank)
    needs: list[Value]  # the dropped values among them, keywords included
    extra: Extra | None  # for ops that need more than positional arguments
    outs: tuple[tuple[int, weakref[Value]], ...]  # (position among the outputs, value)
    index: int  # order of execution
    label: Any  # (module, op name) while a ledger is kept, else unset


Extra = tuple[dict[str, Any], "Rule | None", "RecordedState | None"]
"""What only some ops need for their replay: keyword arguments, the op's rule, a generator's state."""


class Blank(tuple[Any, ...]):
    """(size, stride, dtype, device) of an uninitialised tensor that the recorded op fills."""

    __slots__ = ()

    def allocate(self) -> Tensor:
        """A new tensor of that geometry, content undefined."""
        size, stride, dtype, device = self
        return torch.empty_strided(size, stride, dtype=dtype, device=device)


def geometry_of(tensor: Tensor) -> Geometry:
    """The geometry under which ``tensor`` shows its storage; a conjugate or negative bit is a fifth entry."""
    flags = (tensor.is_conj(), tensor.is_neg())
    geometry = (tensor.size(), tensor.stride(), tensor.storage_offset(), tensor.dtype)
    return geometry if flags == (False, False) else (*geometry, flags)


def view_of(value: Value, geometry: Geometry | None) -> Tensor:
    """The content of a present value under ``geometry`` (None: as it is); the same storage, never a copy."""
    tensor: Tensor = value.tensor  # type: ignore[assignment]  # the value is present
    if geometry is None:
        return tensor
    have = value.geometry
    if have is None:
        have = value.geometry = geometry_of(tensor)
    if have == geometry:
        return tensor
    if len(have) == len(geometry) == 4 and have[3] is geometry[3]:
        return tensor.as_strided(geometry[0], geometry[1], geometry[2])
    return from_storage(tensor.untyped_storage(), geometry, tensor.device)


def from_storage(storage: torch.UntypedStorage, geometry: Geometry, device: torch.device) -> Tensor:
    """A tensor of any dtype over the bytes of ``storage`` (view_as_real, view(dtype), lazy bits included)."""
    out = torch.empty(0, dtype=geometry[3], device=device)
    out.set_(storage, geometry[2], geometry[0], geometry[1])
    if len(geometry) == 5:
        conj, neg = geometry[4]
        out = torch._conj(out) if conj else out
        out = torch._neg_view(out) if neg else out
    return out


def storage_copy(tensor: Tensor) -> Tensor:
    """The same geometry over a copy of the whole storage, whatever part of it ``tensor`` shows."""
    copy = tensor.untyped_storage().clone()  # type: ignore[no-untyped-call]  # torch's has no types
    return from_storage(copy, geometry_of(tensor), tensor.device)


class Gathered(Value):
    """A parameter that is there while its unit is gathered.

    ``anchor`` matches no storage, so that every replay that reads one comes to :meth:`check`.
    """

    __slots__ = ("origin", "source_version", "unit")

    unit: Any  # a sharded.Unit
    origin: Any  # what its content comes from, as the unit knows it
    source_version: int  # of that

    def check(self) -> None:
        """Raise if the content is not there, or not the one of the forward pass.

        Raises:
            ReplayError: which, with the ways out.
        """
        tensor: Tensor = self.tensor  # type: ignore[assignment]  # it never goes
        if not self.unit.gathered() or (tensor.numel() and not tensor.untyped_storage().nbytes()):
            raise ReplayError(
                f"values of {self.unit.name} are to be recomputed while its sharded parameters are not gathered: what "
                "depends on them was used in a way that FSDP does not see (not through the outputs of its forward). "
                "Return it from that module's forward, or keep these values: policy='none' for this module, or a "
                "policy that keeps the ops that make it."
            )
        if tensor._version != self.version or self.unit.source_of(self.origin) != self.source_version:
            raise ReplayError(
                f"sharded parameters of {self.unit.name} were changed between forward and backward (for instance by an "
                "optimizer step between the two), and values that depend on them are to be recomputed. Change them "
                "after backward, or use policy='none' for this step."
            )


def check_leaf(value: Value) -> None:
    """Raise if a leaf that a replay reads was written to, or replaced, where the tape could not see it."""
    tensor = value.tensor
    if tensor is None or value.version is None:
        return
    if isinstance(value, Gathered):
        value.check()
        return
    counter = value.anchor.__class__ is Counter
    if tensor._version != value.version or (counter and value.anchor.moved):
        raise ReplayError(
            f"a tensor of shape {tuple(tensor.shape)} from which dropped values are recomputed was changed in place "
            "between forward and backward, outside the recorded step (for instance by an optimizer step between the "
            "two), or by code that PyTorch does not show us (a kernel in an autograd.Function). Run that change inside "
            "the step (under the same Remat context), as an op, or keep these values: policy='none', or a policy that "
            "keeps the ops that read it."
        )
    if value.flags & HELD and not counter and id(tensor.untyped_storage()) != value.anchor:
        raise ReplayError(
            f"the storage of a tensor of shape {tuple(tensor.shape)} was replaced (tensor.data = ...) between "
            "forward and backward, and values that depend on it are to be recomputed. Replace it after backward, or "
            "use policy='none' for this step."
        )


def check_saved(value: Value) -> None:
    """Raise if a value was changed after autograd saved it.

    Raises:
        RuntimeError: with PyTorch's own words; plain PyTorch raises here too.
    """
    if value.flags & STALE or (
        value.version is not None and value.tensor is not None and value.tensor._version != value.version
    ):
        raise RuntimeError(MODIFIED)
