"""DTensor: a tensor that is spread over several processes, of which each holds a local part.

It is a subclass whose own ``__torch_dispatch__`` calls plain ops on local parts, and collectives between them. A mode
comes before it. The tape lets it pass (``NotImplemented``), and what is recorded are the plain ops, which come back to
the tape; collectives are kept as ever. Autograd stands above all this and saves whole DTensors: what the tape hands it
for one holds the local part as it would hold a plain tensor, and what it takes to put a DTensor together again.

A write to a DTensor moves its own version counter and not that of its local part, so both are looked at.

Known weakness: the list forms of writes (``_foreach_add_``), which optimizers use, move neither counter; PyTorch does
not notice either if weights are changed that way between forward and backward.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from weakref import ref as weakref

import torch
from torch import Tensor

from lightning_remat.engine.aliases import alias
from lightning_remat.engine.values import Counter
from lightning_remat.errors import MODIFIED

OURS = 0  # the tape's, as ever
THEIRS = 1  # the subclass takes the op apart first
SHAPES = 2  # it works on fake tensors, to find out about shapes

_classes: dict[type, int] = {}
_found: dict[Any, int] = {}
_DTENSOR = ("torch.distributed.tensor", "DTensor")
_ASYNC = ("torch.distributed._functional_collectives", "AsyncCollectiveTensor")
_FAKE = ("torch._subclasses.fake_tensor", "FakeTensor")


def whose(types: Any) -> int:
    """Whose an op is that has arguments of these subclasses: OURS, THEIRS or SHAPES."""
    found = _found.get(types)
    if found is None:
        kinds = [_kind(t) for t in types]
        found = _found[types] = max(kinds, default=OURS)
    return found


def _kind(subclass: type) -> int:
    # By name: to import DTensor takes long, and where there is one somebody has done that.
    name = (subclass.__module__, subclass.__name__)
    if name == _FAKE:
        return SHAPES
    return THEIRS if name in (_DTENSOR, _ASYNC) else OURS


def is_spread(subclass: type) -> bool:
    """Whether this is DTensor, and none of its subclasses, of which nobody knows what they carry."""
    found = _classes.get(subclass)
    if found is None:
        found = _classes[subclass] = (subclass.__module__, subclass.__name__) == _DTENSOR
    return bool(found)


def local_of(tensor: Tensor) -> Tensor:
    """What there is of a tensor in this process: a DTensor's local part, any other tensor itself."""
    if is_spread(tensor.__class__):
        local: Tensor = tensor._local_tensor  # type: ignore[attr-defined]  # a DTensor has one
        return local
    return tensor


def counter_of(tensor: Tensor) -> Counter:
    """Its version counter, without its memory: an alias of the shell, which holds no local part and no history."""
    with torch._C._DisableTorchDispatch():
        shell = alias(tensor)
    return Counter(shell, shell._version)


class Shells:
    """The DTensors that the present op was called on, whose local parts it reads."""

    __slots__ = ("_last",)

    def __init__(self) -> None:
        self._last: list[weakref[Tensor]] = []

    @property
    def any(self) -> bool:
        """Whether there were any."""
        return bool(self._last)

    def see(self, args: Any, kwargs: Any) -> None:
        """An op is called on these."""
        found = _spread_among([*args, *kwargs.values()] if kwargs else args)
        self._last = [weakref(t) for t in found]

    def of(self, storage: Any) -> Tensor | None:
        """The one whose local part lies in a storage."""
        for reference in self._last:
            tensor = reference()
            if tensor is not None:
                local = local_of(tensor)
                if local.__class__ is Tensor and local.untyped_storage() is storage:
                    return tensor
        return None


def _spread_among(items: Any) -> Iterator[Tensor]:
    for item in items:
        if isinstance(item, (list, tuple)):
            yield from _spread_among(item)
        elif is_spread(item.__class__):
            yield item


class Spread:
    """What autograd holds in place of a DTensor.

    Attributes:
        packed: what it would hold in place of the local part.
    """

    __slots__ = ("_class", "_counter", "_spec", "packed")

    def __init__(self, tensor: Any, packed: Any) -> None:
        self._class = tensor.__class__
        self._spec = tensor._spec
        self._counter = counter_of(tensor)
        self.packed = packed

    def check(self) -> None:
        """Raise if it was changed in place after it was saved.

        Raises:
            RuntimeError: with PyTorch's own words; plain PyTorch raises here too.
        """
        if self._counter.moved:
            raise RuntimeError(MODIFIED)

    def around(self, local: Tensor) -> Tensor:
        """A DTensor as it was, around its local part."""
        if local.requires_grad:  # the input of a layer, say, which a DTensor was made of; autograd gives it its history
            with torch._C._DisableTorchDispatch():
                local = alias(local)
        tensor: Tensor = self._class(local, self._spec, requires_grad=False)
        return tensor
