"""What ops do that their registration does not tell: held against what is seen.

*Writes.* The schema of an op of another library may be silent on what it writes to: one that was inferred from a C++
signature always is. So when such an op is called for the first time (once for each combination of its flags), its
arguments are compared with what they were. From then on it is an op that writes to what it wrote to.

*Replaced kernels.* ``torch.library`` can put a kernel written in Python in place of PyTorch's own. That is user code,
which is not run twice, so such ops are kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import Parameter

from lightning_remat.engine.out_of_memory import is_out_of_memory
from lightning_remat.engine.rules import rule_for, set_rule
from lightning_remat.engine.values import from_storage, storage_copy

_STRIDED = torch.strided
_NoModes = torch._C._DisableTorchDispatch
_FLAGS = (bool, str)
_checked: set[tuple[Any, ...]] = set()  # overloads (which live for ever) and flags

Where = int | str
"""Position of an argument, or its keyword."""


class Witness:
    """The arguments of one call, as they were before it.

    Parameters are left out: a copy of them could be large, and who trains them does not write to them in forward.
    """

    def __init__(self, args: Any, kwargs: dict[str, Any]) -> None:
        self.copies: list[tuple[Where, Tensor, Tensor]] = []
        seen = set()
        for where, tensor in _tensors(args, kwargs):
            storage = tensor.untyped_storage()
            if id(storage) not in seen:
                seen.add(id(storage))
                with _NoModes():
                    self.copies.append((where, tensor, storage_copy(tensor.detach())))

    def written(self) -> Iterator[tuple[Where, Tensor, Tensor]]:
        """Where it was written to: (argument, tensor, what it was, over a storage of its own)."""
        for where, tensor, before in self.copies:
            with _NoModes():
                same = torch.equal(_bytes_of(tensor), _bytes_of(before))
            if not same:
                yield where, tensor, before


def witness(func: Any, args: Any, kwargs: dict[str, Any]) -> Witness | None:
    """A witness of the coming call, if it is the first of its kind; None where there is no memory for one."""
    key = (id(func), *[a for a in (*args, *kwargs.values()) if isinstance(a, _FLAGS)])
    if key in _checked:
        return None
    try:
        found = Witness(args, kwargs)
    except RuntimeError as error:
        if is_out_of_memory(error):
            return None
        raise
    if not found.copies:
        return None  # while it is traced, or called on nothing
    _checked.add(key)
    return found


def learn(func: Any, written: list[Where]) -> None:
    """From now on an op is one that writes to these arguments, too."""
    rule = rule_for(func)
    set_rule(func, replace(rule, form="write", writes=tuple(dict.fromkeys([*rule.writes, *written]))))


def _tensors(args: Any, kwargs: dict[str, Any]) -> Iterator[tuple[Where, Tensor]]:
    places: list[tuple[Where, Any]] = [*enumerate(args), *kwargs.items()]
    for where, a in places:
        for t in a if isinstance(a, (list, tuple)) else (a,):
            if t.__class__ is Tensor and t.layout is _STRIDED and not t.is_meta and not isinstance(t._base, Parameter):
                yield where, t


def _bytes_of(tensor: Tensor) -> Tensor:
    storage = tensor.untyped_storage()
    return from_storage(storage, ((storage.nbytes(),), (1,), 0, torch.uint8), tensor.device)


# Keys of kernels that run above us, or compute nothing.
_ABOVE = (
    "ADInplace",
    "Autocast",
    "Autograd",
    "BackendSelect",
    "CompositeImplicit",
    "FuncTorch",
    "Functionalize",
    "Meta",
    "Python",
    "Tracer",
)
# Registered by PyTorch itself when it is imported: pure, so that they may be repeated like those in C++.
_BY_TORCH_ITSELF = frozenset({"aten._foreach_mm.default", "aten.linalg_lu_solve.out"})
_known: tuple[frozenset[str], frozenset[str]] = (frozenset(), frozenset())  # all that was registered; what matters


def replaced() -> frozenset[str]:
    """Overloads of PyTorch's whose kernel is now one that was registered from Python."""
    global _known
    registered = torch.library._impls
    if registered != _known[0]:
        names = set()
        for entry in registered:
            library, name, key = entry.split("/", 2)
            if library == "aten" and not key.startswith(_ABOVE):
                names.add(f"aten.{name}" if "." in name else f"aten.{name}.default")
        _known = (frozenset(registered), frozenset(names - _BY_TORCH_ITSELF))
    return _known[1]
