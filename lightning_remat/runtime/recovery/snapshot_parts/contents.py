"""What a Python value holds that can be changed without replacing it: lists, dictionaries, tensors, generators."""

from __future__ import annotations

import random
import sys
from collections import deque
from collections.abc import Callable
from enum import Enum
from typing import Any
from weakref import ref as weakref

import torch
from torch import Tensor

from lightning_remat.runtime.recovery.snapshot_parts.tensors import SMALL, bytes_of, place_of, version_of, write_back

SHORT = 256
"""Entries up to which a container and what is in it is copied. Longer lists are cut to their old length."""
LONG = 4096
"""Entries up to which other containers are copied, without what is in them. Longer ones must keep their length."""
_DEPTH = 4
_FIELDS = 32
_NOT_OURS = (
    "torch",
    "lightning",
    "pytorch_lightning",
    "lightning_remat",
    "transformers",
    "numpy",
    "builtins",
    "logging",
)

Undo = Callable[[], None]


class Lost(Exception):
    """A value cannot be put back; says why."""


class Held:
    """A tensor that must be there again after a failure, without keeping large memory or a graph alive for it.

    Small ones without history are held; a small one with history is held without it, with an error in the place of its
    gradient; a large one is there as long as somebody else holds it.
    """

    __slots__ = ("_bare", "_strong", "_weak", "_where")

    def __init__(self, tensor: Tensor, where: str) -> None:
        self._where = where
        self._weak = weakref(tensor)
        self._strong: Tensor | None = None
        self._bare: Tensor | None = None
        if _own_bytes(tensor) <= SMALL:
            if tensor.grad_fn is None:
                self._strong = tensor
            else:
                self._bare = tensor.detach()

    def get(self) -> Tensor:
        """The tensor.

        Raises:
            Lost: it was large, and nobody holds it any more.
        """
        if self._strong is not None:
            return self._strong
        tensor = self._weak()
        if tensor is not None:
            fix = getattr(tensor, "_fix_weakref", None)  # as torch.utils.weak does with what a weak reference gave
            if fix is not None:
                fix()
            return tensor
        if self._bare is None:
            raise Lost(f"{self._where} was replaced in the step, and the tensor that it was is gone")
        bare = self._bare.detach().requires_grad_(True)
        bare.register_hook(_no_history(self._where))  # type: ignore[no-untyped-call]  # torch's
        return bare


def _no_history(where: str) -> Callable[[Tensor], None]:
    def refuse(grad: Tensor) -> None:
        raise RuntimeError(
            f"{where} is from an earlier step, and its history was let go of when the step was run again after it had "
            "run out of memory; detach it when it is stored, or do not backpropagate into earlier steps."
        )

    return refuse


def _own_bytes(tensor: Tensor) -> int:
    """What holding it keeps alive: its whole storage."""
    if tensor.layout is not torch.strided:
        return bytes_of(tensor)
    try:
        return tensor.untyped_storage().nbytes()
    except (NotImplementedError, RuntimeError):  # no storage: a subclass, a functional tensor
        return bytes_of(tensor)


class Contents:
    """What values held at one time.

    Args:
        changing: names of attributes whose tensors were seen to change in place: those are copied. Grows.
    """

    def __init__(self, changing: set[str]) -> None:
        self._changing = changing
        self._undo: list[Undo] = []
        self._watched: list[tuple[str, weakref[Tensor], int, int]] = []
        self._seen: dict[int, Any] = {}
        self._held: list[Held] = []
        self._checks: list[Callable[[], str | None]] = []

    def keep(self, value: Any, where: str, depth: int = 0, *, whole: bool = False) -> Any:
        """Note what a value holds, and return what to put in its place to have it again (see :meth:`again`).

        Args:
            value: anything.
            where: its name, for errors; also the key under which is known whether it changes in place.
            depth: of nesting so far.
            whole: copy lists of any length (a metric's state, which is cleared and filled again).
        """
        if isinstance(value, Tensor):
            return self._tensor(value, where)
        kind = type(value)
        if kind is tuple:
            if any(isinstance(v, (Tensor, list, dict, tuple)) for v in value) and depth < _DEPTH:
                kept = tuple(self.keep(v, where, depth + 1) for v in value)
                # A new tuple takes its place, of whatever class: named ones are not of class tuple and come later.
                return _Tuple(kept) if any(isinstance(k, (Held, _Tuple)) for k in kept) else value
            return value
        if depth >= _DEPTH or id(value) in self._seen:
            return value
        if isinstance(value, (list, dict, set, deque)):
            self._seen[id(value)] = value
            self._container(value, where, depth, whole)
        elif isinstance(value, torch.Generator):
            self._undo.append(_call(value.set_state, value.get_state()))
        elif isinstance(value, random.Random):
            self._undo.append(_call(value.setstate, value.getstate()))
        elif kind.__module__ not in ("builtins",):
            self._other(value, where, depth)
        return value

    def why_not(self) -> str | None:
        """Why something cannot be put back, or None."""
        for where in self._moved():
            self._changing.add(where)
            return (
                f"a tensor in {where} was written to in the step, and no copy of it had been made. "
                "From the next step on one is."
            )
        for check in self._checks:
            if (reason := check()) is not None:
                return reason
        try:
            for held in self._held:
                held.get()
        except Lost as lost:
            return str(lost)
        return None

    def look(self) -> None:
        """At the end of a step, see whose tensors change in place."""
        self._changing.update(self._moved())

    def restore(self) -> None:
        """Put back what the values held. The values themselves are for the caller to put back, first."""
        for undo in self._undo:
            undo()
        again = ((w, r, t) for w, r, _, _ in self._watched if (t := r()) is not None)
        self._watched = [(w, r, version_of(t), place_of(t)) for w, r, t in again]

    def _moved(self) -> list[str]:
        return [
            where
            for where, reference, version, place in self._watched
            if (t := reference()) is not None and (version_of(t) != version or place_of(t) != place)
        ]

    def _tensor(self, tensor: Tensor, where: str) -> Held:
        if tensor.grad_fn is None and (bytes_of(tensor) <= SMALL or where in self._changing):
            copy = tensor.detach().clone()
            reference = weakref(tensor)  # it may be a small part of something large

            def undo() -> None:
                if (t := reference()) is not None:
                    write_back(t, copy)

            self._undo.append(undo)
        else:
            self._watched.append((where, weakref(tensor), version_of(tensor), place_of(tensor)))
        held = Held(tensor, where)
        self._held.append(held)
        return held

    def _container(self, value: Any, where: str, depth: int, whole: bool) -> None:
        size = len(value)
        if isinstance(value, list):
            if whole or size <= SHORT:
                # A metric's list may be long, and its tensors are not written to.
                items = list(value) if whole else [self.keep(v, where, depth + 1) for v in value]
                self._undo.append(lambda: value.__setitem__(slice(None), [again(v) for v in items]))
            else:
                last = weakref(value[-1]) if isinstance(value[-1], Tensor) else None
                self._checks.append(lambda: _grown(value, size, last, where))
                self._undo.append(lambda: value.__delitem__(slice(size, None)))
        elif size > LONG:
            self._checks.append(lambda: None if len(value) == size else f"{where} ({size} entries) is too long to copy")
        elif size > SHORT:
            self._long(value)
        elif isinstance(value, dict):
            entries = [(k, self.keep(v, where, depth + 1)) for k, v in dict.items(value)]
            self._undo.append(lambda: _refill(value, {k: again(v) for k, v in entries}))
        elif isinstance(value, set):
            members = set(value)
            self._undo.append(lambda: _refill(value, members))
        else:
            items = [self.keep(v, where, depth + 1) for v in value]
            self._undo.append(lambda: _refill(value, [again(v) for v in items]))

    def _long(self, value: Any) -> None:
        copy = dict(value) if isinstance(value, dict) else set(value) if isinstance(value, set) else list(value)
        self._undo.append(lambda: _refill(value, copy))

    def _other(self, value: Any, where: str, depth: int) -> None:
        numpy = sys.modules.get("numpy")
        if numpy is not None and isinstance(value, numpy.ndarray):
            if value.nbytes <= SMALL and value.flags.writeable:
                array = value.copy()
                self._undo.append(lambda: value.__setitem__(Ellipsis, array))
            return
        if type(value).__module__.startswith("numpy.random"):
            if hasattr(value, "bit_generator"):  # Generator
                bits = value.bit_generator
                self._undo.append(_call(lambda state: setattr(bits, "state", state), bits.state))
            elif hasattr(value, "get_state"):  # RandomState
                self._undo.append(_call(value.set_state, value.get_state(legacy=False)))
            return
        # A counter, an average meter, a data class: small objects of the user's own.
        fields = getattr(value, "__dict__", None)
        if (
            isinstance(fields, dict)
            and len(fields) <= _FIELDS
            and not isinstance(value, (type, Enum, torch.nn.Module))
            and type(value).__module__.split(".")[0] not in _NOT_OURS
        ):
            self._seen[id(value)] = value
            self._container(fields, where, depth, whole=False)


class _Tuple:
    """A tuple with tensors in it that are not held."""

    __slots__ = ("_items",)

    def __init__(self, items: tuple[Any, ...]) -> None:
        self._items = items

    def get(self) -> tuple[Any, ...]:
        return tuple(again(v) for v in self._items)


def again(kept: Any) -> Any:
    """What :meth:`Contents.keep` returned, as the value that it stands for.

    Raises:
        Lost: it is gone.
    """
    return kept.get() if isinstance(kept, (Held, _Tuple)) else kept


def _grown(value: list[Any], size: int, last: Any, where: str) -> str | None:
    if len(value) >= size and (last is None or value[size - 1] is last()):
        return None
    return f"the list {where} had {size} entries, too many to copy, and was not only appended to"


def _refill(value: Any, old: Any) -> None:
    """Give a container its old entries; by the methods of its base, since a subclass may do more than they say."""
    if isinstance(value, dict):
        dict.clear(value)
        dict.update(value, old)
    elif isinstance(value, set):
        set.clear(value)
        set.update(value, old)
    else:
        value.clear()
        value.extend(old)


def _call(function: Callable[[Any], Any], argument: Any) -> Undo:
    return lambda: function(argument) and None
