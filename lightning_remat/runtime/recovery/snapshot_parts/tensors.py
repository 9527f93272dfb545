"""Tensors that a step may write into: copies of small ones, version counters of large ones.

Running statistics are written without counting a version, so a version counter proves nothing about a small buffer:
small ones are copied, whatever they are. Nothing writes to a large one that way (a BatchNorm of more than 65536
channels, which is known by the names of its buffers, aside), so for those the counter and the address tell. A large one
that was seen to change is copied from then on; one that changed and was not copied cannot be put back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter

import torch
from torch import Tensor

SMALL = 256 * 1024
"""Bytes up to which a tensor is copied without having been seen to change."""

_RUNNING = ("running_mean", "running_var", "num_batches_tracked")

_version = attrgetter("_version")
_shape = attrgetter("shape")


def bytes_of(tensor: Tensor) -> int:
    """What its elements take, repeated ones of an expanded tensor included."""
    return tensor.numel() * tensor.element_size()


def version_of(tensor: Tensor) -> int:
    """Its version counter; 0 for inference tensors, which have none."""
    return 0 if tensor.is_inference() else int(tensor._version)


def versions_of(tensors: Iterable[Tensor]) -> list[int]:
    """:func:`version_of`, fast for many."""
    tensors = list(tensors)
    try:
        return list(map(_version, tensors))
    except RuntimeError:
        return list(map(version_of, tensors))


def place_of(tensor: Tensor) -> int:
    """Where it lies; an identity for what has no address (sparse)."""
    try:
        return int(tensor.data_ptr())
    except RuntimeError:  # NotImplementedError is one
        return id(tensor)


def write_back(tensor: Tensor, copy: Tensor) -> None:
    """Give a tensor its old content, in place where its geometry is still that of the copy."""
    with torch.no_grad():
        if tensor.shape != copy.shape or tensor.dtype is not copy.dtype or tensor.layout is not copy.layout:
            tensor.data = copy.clone()
            return
        if tensor.layout is torch.strided:
            for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
                if stride == 0 and size > 1:  # expanded: one element stands for all
                    tensor, copy = tensor.narrow(dim, 0, 1), copy.narrow(dim, 0, 1)
        tensor.copy_(copy)


class Copies:
    """Copies of a fixed list of tensors, made into the same memory every time."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        with torch.no_grad():
            self._copies = [t.detach().clone() for t in tensors]
        self._tensors = list(tensors)
        self._shapes = [t.shape for t in tensors]
        # One call for many, for those that it can take; the sparse and the odd ones are cloned.
        plain = [t.layout is torch.strided and not _overlaps(t) for t in tensors]
        groups: dict[tuple[torch.device, torch.dtype], list[int]] = {}
        for i, (t, is_plain) in enumerate(zip(tensors, plain, strict=True)):
            if is_plain:
                groups.setdefault((t.device, t.dtype), []).append(i)
        self._groups = [([self._copies[i] for i in g], [self._tensors[i] for i in g]) for g in groups.values()]
        self._odd = [i for i, is_plain in enumerate(plain) if not is_plain]

    def fit(self) -> bool:
        """Whether the tensors still have the shapes that the copies have."""
        return list(map(_shape, self._tensors)) == self._shapes

    def take(self) -> None:
        """Copy the present content."""
        with torch.no_grad():
            for copies, tensors in self._groups:
                torch._foreach_copy_(copies, tensors)
            for i in self._odd:
                self._copies[i] = self._tensors[i].detach().clone()

    def restore(self) -> None:
        """Write the copies back."""
        for tensor, copy in zip(self._tensors, self._copies, strict=True):
            write_back(tensor, copy)


def _overlaps(tensor: Tensor) -> bool:
    return any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


class Guard:
    """Tensors that may or may not be written to in a step.

    Args:
        name_of: gives the name of a tensor, for errors; called only then.
    """

    def __init__(self, name_of: Callable[[Tensor], str]) -> None:
        self._name_of = name_of
        self._ids: list[int] = []
        self._copied: Copies | None = None
        self._large: list[Tensor] = []
        self._changing: dict[int, Tensor] = {}
        self._known = False  # a step has been seen to its end
        self._first: list[tuple[Tensor, int]] = []  # small parameters that are copied until then, with their versions
        self._versions: list[int] = []
        self._places: list[int] = []

    def take(self, tensors: Sequence[Tensor], names: Sequence[str], parameters: Sequence[Tensor] = ()) -> None:
        """Note the content of buffers, and of parameters that nothing should write to.

        Args:
            tensors: the buffers, each once.
            names: their names in their modules.
            parameters: small ones are copied in the first step, since nobody knows yet which of them it writes to (a
                teacher's); the others are looked at by version counter only.
        """
        ids = [*map(id, tensors), *map(id, parameters)]
        if ids != self._ids or self._copied is None or not self._copied.fit():
            self._plan(tensors, names, parameters)
            self._ids = ids
        else:
            self._copied.take()
        self._note()

    def look(self) -> None:
        """At the end of a step, see which of the large tensors it changed: those are copied from the next time on."""
        for tensor in (*self._moved(), *(t for t, version in self._first if version_of(t) != version)):
            self._changing[id(tensor)] = tensor
            self._ids = []  # plan again
        if self._first:
            self._first, self._ids = [], []
        self._known = True

    def why_not(self) -> str | None:
        """Why the old content cannot be put back, or None."""
        for tensor in self._moved():
            for changed in self._moved():
                self._changing[id(changed)] = changed
            self._ids = []
            return (
                f"{self._name_of(tensor)} ({tuple(tensor.shape)}) was written to in the step, and no copy of it had "
                "been made: tensors of its size are copied only after they were seen to change. From now on it is."
            )
        return None

    def restore(self) -> None:
        """Write the copies back."""
        if self._copied is not None:
            self._copied.restore()
        self._first = [(t, version_of(t)) for t, _ in self._first]  # writing back is not the step's doing
        self._note()

    def _plan(self, tensors: Sequence[Tensor], names: Sequence[str], parameters: Sequence[Tensor]) -> None:
        small: list[Tensor] = []
        large: list[Tensor] = []
        for tensor, name in zip(tensors, names, strict=True):
            known = bytes_of(tensor) <= SMALL or name in _RUNNING or id(tensor) in self._changing
            (small if known else large).append(tensor)
        self._first = []
        for tensor in parameters:
            if not self._known and bytes_of(tensor) <= SMALL:
                self._first.append((tensor, version_of(tensor)))
                small.append(tensor)
            else:
                (small if id(tensor) in self._changing else large).append(tensor)
        here = {id(t) for t in [*tensors, *parameters]}
        self._changing = {i: t for i, t in self._changing.items() if i in here}
        self._large = large
        self._copied = Copies(small)

    def _note(self) -> None:
        self._versions = versions_of(self._large)
        self._places = [place_of(t) for t in self._large]

    def _moved(self) -> list[Tensor]:
        return [
            t
            for t, version, place in zip(self._large, self._versions, self._places, strict=True)
            if version_of(t) != version or place_of(t) != place
        ]
