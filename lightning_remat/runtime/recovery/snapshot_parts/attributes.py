"""What modules have as attributes: which objects, and what those hold.

Of the modules of a model, nearly all have plain constants and nothing else: of these, the values are noted by one call
each. A module that has anything that can change without being replaced (a list, a tensor, a generator) is looked at
attribute by attribute.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from operator import itemgetter
from types import BuiltinFunctionType, FunctionType, NoneType
from typing import Any

from torch import nn

from lightning_remat.runtime.recovery.snapshot_parts.contents import Contents, again

# What every module has, and is looked after elsewhere (parameters, buffers, modules) or not ours (hooks).
_STANDARD = frozenset(nn.Module().__dict__) - {"training"}
_CONSTANT = frozenset((int, float, complex, bool, str, bytes, NoneType, tuple, FunctionType, BuiltinFunctionType, type))
_MISSING = object()

Row = tuple[Any, ...]


class Attributes:
    """The attributes of all modules at one time."""

    def __init__(self) -> None:
        self._modules: list[nn.Module] = []
        self._names: dict[int, str] = {}
        self._plain: list[tuple[dict[str, Any], tuple[str, ...]]] = []
        self._getters: list[tuple[Callable[[dict[str, Any]], Row], dict[str, Any]]] = []
        self._kinds: list[type] = []
        self._dicts: list[dict[str, Any]] = []
        self._sizes: list[int] = []
        self._rows: list[Row] = []
        self._rich: list[nn.Module] = []
        self._entries: list[tuple[dict[str, Any], list[tuple[str, Any]]]] = []
        self._contents: Contents | None = None
        self._changing: set[str] = set()

    def take(self, modules: Sequence[nn.Module], names: Sequence[str], *, anew: bool) -> None:
        """Note the attributes of ``modules``, whose ``names`` are for errors.

        Args:
            modules: each once.
            names: one for each.
            anew: whether they are others than the last time.
        """
        if anew:
            self._modules = list(modules)
            self._names = {id(m): name for m, name in zip(modules, names, strict=True)}
            self._rich = []
            self._lay_out()
        try:
            self._rows = [get(d) for get, d in self._getters]
            same = list(map(len, self._dicts)) == self._sizes
            same = same and list(map(type, chain.from_iterable(self._rows))) == self._kinds
        except KeyError:  # an attribute was deleted
            same = False
        if not same:
            self._lay_out()
            self._rows = [get(d) for get, d in self._getters]
        self._contents = contents = Contents(self._changing)
        self._entries = [(m.__dict__, self._keep(m, contents)) for m in self._rich]

    def why_not(self) -> str | None:
        """Why something cannot be put back, or None."""
        return None if self._contents is None else self._contents.why_not()

    def restore(self, *, leave: frozenset[str] = frozenset()) -> None:
        """Put back every attribute that was replaced, remove new ones, then put back what they hold.

        Args:
            leave: names of those that stay as they are, if they were words, switches or None. A step that fails
                whenever it finds one ("the first time, ...") would otherwise fail for ever.
        """
        for (present, names), row, size in zip(self._plain, self._rows, self._sizes, strict=True):
            for name, value in zip(names, row, strict=True):
                if present.get(name, _MISSING) is not value and not (name in leave and _is_flag(value)):
                    present[name] = value
            if len(present) != size:
                for name in [n for n in present if n not in _STANDARD and n not in names]:
                    del present[name]
        for present, entries in self._entries:
            old = {name: again(kept) for name, kept in entries}
            for name in [n for n in present if n not in _STANDARD and n not in old]:
                del present[name]
            for name, value in old.items():
                if present.get(name, _MISSING) is not value and not (name in leave and _is_flag(value)):
                    present[name] = value
        if self._contents is not None:
            self._contents.restore()

    def release(self) -> None:
        """Let go of all values; what is known of the modules stays."""
        if self._contents is not None:
            self._contents.look()
        self._contents = None
        self._rows, self._entries = [], []

    def _lay_out(self) -> None:
        """Divide the modules into those with constants only and the others; once among the others, always."""
        rich = {id(m) for m in self._rich}
        self._plain, self._getters = [], []
        for m in self._modules:
            if id(m) in rich:
                continue
            own = tuple(n for n in m.__dict__ if n not in _STANDARD)
            if all(type(m.__dict__[n]) in _CONSTANT and not _nested(m.__dict__[n]) for n in own):
                self._plain.append((m.__dict__, own))
                self._getters.append((_getter(own), m.__dict__))
            else:
                self._rich.append(m)
        self._dicts = [d for d, _ in self._plain]
        self._sizes = list(map(len, self._dicts))
        self._kinds = [type(v) for get, d in self._getters for v in get(d)]

    def _keep(self, module: nn.Module, contents: Contents) -> list[tuple[str, Any]]:
        prefix = self._names[id(module)]
        states = getattr(module, "_defaults", ()) if hasattr(module, "_update_count") else ()
        entries = []
        for name, value in module.__dict__.items():
            if name in _STANDARD:
                continue
            if name == "_defaults" or (type(value) in _CONSTANT and type(value) is not tuple):
                entries.append((name, value))
            else:
                entries.append((name, contents.keep(value, f"{prefix}.{name}", whole=name in states)))
        return entries


def _is_flag(value: Any) -> bool:
    if type(value) is tuple:
        return any(map(_is_flag, value))
    return isinstance(value, (str, bytes, bool, NoneType))


def _nested(value: Any) -> bool:
    """Whether a tuple holds anything but constants."""
    return type(value) is tuple and any(type(v) not in _CONSTANT or _nested(v) for v in value)


def _getter(names: tuple[str, ...]) -> Callable[[dict[str, Any]], Row]:
    if len(names) == 1:  # itemgetter would not give a tuple
        name = names[0]
        return lambda d: (d[name],)
    return itemgetter(*names)
