"""What there is of a content, who holds it, and what it takes to make it again.

Asked by whoever wants to drop kept contents, of the sources that are noted meanwhile
(:mod:`~lightning_remat.engine.sources`).
"""

from __future__ import annotations

import sys
from collections.abc import Iterable

import torch
from torch import Tensor

from lightning_remat.engine.sources import Recipe, Source

_use_count = torch._C._storage_Use_Count

# References to a tensor that only its holder has: the holder's slot, the list that we put it into, a loop's variable,
# getrefcount's argument.
_ONLY_HOLDER = 4


class Gone(Exception):
    """A content cannot be made again: what it was computed from is no longer there."""


def missing_for(source: Source) -> list[Source]:
    """What has to be computed before ``source`` can be, in order.

    Raises:
        Gone: it cannot be.
    """
    found: list[Source] = []
    seen: set[int] = set()
    todo = [source]
    while todo:
        recipe: Recipe = todo.pop().recipe  # type: ignore[assignment]  # only sources with one are put there
        for s in inputs_of(recipe):
            if id(s) in seen:
                continue
            seen.add(id(s))
            if is_there(s):
                continue
            if s.recipe is None:
                raise Gone
            found.append(s)
            todo.append(s)
    found.sort(key=lambda s: s.recipe.index)  # type: ignore[union-attr]  # all of these have one
    return found


def inputs_of(recipe: Recipe) -> Iterable[Source]:
    """What an op read, keywords included."""
    stack = [*recipe.args, *(recipe.extra[0].values() if recipe.extra is not None else ())]
    while stack:
        a = stack.pop()
        if a.__class__ is tuple:
            yield a[0]
        elif a.__class__ is list:
            stack += a


def is_there(source: Source) -> bool:
    """Whether a content is held by somebody, or has a record.

    Raises:
        Gone: it was changed where nobody could see it.
    """
    value = source.value() if source.value is not None else None
    if value is None:
        return holder_of(source) is not None
    if value.tensor is None:
        if value.op is None:
            raise Gone
    elif value.version is not None and value.tensor._version != value.version:
        raise Gone
    return True


def holder_of(source: Source) -> Tensor | None:
    """A tensor with the content that somebody other than a value holds."""
    if source.lost:
        return None
    for reference in source.saved:
        saved = reference()
        if saved is not None and saved.tensor is not None and saved.tensor._version == saved.version:
            return saved.tensor
    tensor = source.parameter
    if tensor is None and source.tensor is not None:
        tensor = source.tensor()
    if tensor is None or id(tensor.untyped_storage()) != source.anchor:
        return None
    return tensor if source.version is None or tensor._version == source.version else None


def evictable_bytes(source: Source) -> int:
    """Bytes that would be free without the tape's holders of a content; 0 if others hold it, or it was changed."""
    tensors: list[Tensor] = []
    for reference in source.saved:
        saved = reference()
        if saved is not None and saved.tensor is not None:
            if saved.tensor._version != saved.version:
                return 0
            tensors.append(saved.tensor)
    value = source.value() if source.value is not None else None
    if value is not None and value.tensor is not None:
        if value.version is not None and value.tensor._version != value.version:
            return 0
        tensors.append(value.tensor)
    if not tensors:
        return 0
    storage = tensors[0].untyped_storage()
    # One reference is the storage's Python object's, the others are tensors'.
    if _use_count(storage._cdata) - 1 > len(tensors):
        return 0
    if any(sys.getrefcount(tensor) > _ONLY_HOLDER for tensor in tensors):
        return 0
    return storage.nbytes()
