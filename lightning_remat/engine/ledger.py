"""The ledger of a step: which op in which module made what, and what became of it.

Kept for the first step under a policy only, since looking up modules costs host time; bytes are exact, counted once per
storage.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import ref as weakref

import torch
from torch import Tensor, nn

from lightning_remat.engine.offload.moved import moved_of
from lightning_remat.engine.replay import Clock
from lightning_remat.engine.rules import rule_for
from lightning_remat.engine.spread import whose
from lightning_remat.engine.store import forgetter
from lightning_remat.engine.tape import Tape
from lightning_remat.engine.values import PACKED, Op, Value
from lightning_remat.engine.watch import ModuleCalls

OUTSIDE = "input, parameter or buffer"
"""Stands for the op that made a tensor where the step did not make it."""


@dataclass
class Line:
    """What one kind of op in one module did in a step; bytes and seconds are totals over its calls."""

    module: str
    op: str
    kind: str
    calls: int = 0
    kept_bytes: int = 0
    dropped_bytes: int = 0
    replayed_ops: int = 0
    replay_seconds: float = 0.0
    offloaded_bytes: int = 0


@dataclass(frozen=True)
class Saved:
    """One storage that autograd saved: its size in bytes, how it was used, where it comes from, what became of it."""

    nbytes: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    module: str
    op: str
    dropped: bool
    offloaded: bool = False


class ModuleStack:
    """Which module is running, by qualified name; found through global hooks, which cost host time while in place."""

    def __init__(self) -> None:
        self.names: dict[int, str] = {}
        self.stack: list[str] = []
        self._calls = ModuleCalls(self._enter, self._leave)

    def name(self, root: nn.Module) -> None:
        """Learn the names of a root's submodules; several roots are told apart by their class."""
        prefix = f"{type(root).__name__}." if self.names else ""
        for name, module in root.named_modules():
            self.names.setdefault(id(module), f"{prefix}{name}".rstrip("."))

    @property
    def current(self) -> str:
        """Qualified name of the innermost running module, ``""`` outside of any."""
        return self.stack[-1] if self.stack else ""

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Follow every module call."""
        try:
            with self._calls.watching():
                yield
        finally:
            self.stack.clear()

    def _enter(self, module: nn.Module, args: Any) -> None:
        if id(module) not in self.names:
            self.name(module)
        self.stack.append(self.names[id(module)])

    def _leave(self) -> None:
        if self.stack:
            self.stack.pop()


class Ledger:
    """Books of one step: :attr:`lines` by (module, op), and every storage that autograd saved."""

    def __init__(self, modules: ModuleStack) -> None:
        self.modules = modules
        self.lines: dict[tuple[str, str], Line] = {}
        self.saved: list[Saved] = []
        self._made: dict[Any, tuple[str, str]] = {}  # storage -> (module, op) that made it
        self._counted: dict[Any, None] = {}
        self._dropped: dict[Any, None] = {}  # booked as dropped, and neither kept nor moved since
        self._forget_made = forgetter(self._made)
        self._forget_counted = forgetter(self._counted)
        self._forget_dropped = forgetter(self._dropped)

    def line(self, module: str, op: str) -> Line:
        """The books of one kind of op in one module."""
        key = (module, op)
        found = self.lines.get(key)
        if found is None:
            found = self.lines[key] = Line(module, op, "")
        return found

    def made(self, func: Any, out: Any) -> None:
        """An op has run."""
        rule = rule_for(func)
        module = self.modules.current
        line = self.line(module, rule.name)
        line.calls += 1
        line.kind = rule.kind
        if rule.form == "view":
            return
        for o in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(o, Tensor) and o.layout is torch.strided:
                key = weakref(o.untyped_storage(), self._forget_made)
                self._made[key] = (module, rule.name)

    def recorded(self, op: Op, args: Any, kwargs: Any, out: Any) -> None:
        """The tape has dropped what an op made."""
        module, name = self.modules.current, rule_for(op.func).name
        op.label = (module, name)
        line = self.line(module, name)
        for position, reference in op.outs:
            value = reference()
            if value is not None:
                o = out[position] if isinstance(out, (tuple, list)) else out
                storage = o.untyped_storage()
                line.dropped_bytes += storage.nbytes()
                self._dropped[weakref(storage, self._forget_dropped)] = None

    def packed(self, tensor: Tensor, packed: Any) -> None:
        """Autograd has saved a tensor."""
        if tensor.layout is not torch.strided:
            return
        storage = tensor.untyped_storage()
        key = weakref(storage, self._forget_counted)
        if key in self._counted:
            return
        self._counted[key] = None
        module, op = self._made.get(weakref(storage), ("", OUTSIDE))
        absent = packed[0].__class__ is Value
        moved = absent and moved_of(packed[0]) is not None
        nbytes = storage.nbytes()
        self.saved.append(Saved(nbytes, tuple(tensor.shape), tensor.dtype, module, op, absent and not moved, moved))
        if not absent and weakref(storage) in self._made:
            self.line(module, op).kept_bytes += nbytes

    def kept(self, tensor: Tensor, value: Value) -> None:
        """A dropped value is kept after all: a boundary."""
        storage = tensor.untyped_storage()
        made = self._made.get(weakref(storage))
        if made is not None:
            line = self.line(*made)
            line.dropped_bytes -= storage.nbytes()
            self._dropped.pop(weakref(storage), None)
            if value.flags & PACKED:  # otherwise it counts when somebody saves or reads it, if anybody does
                line.kept_bytes += storage.nbytes()
                self._counted[weakref(storage, self._forget_counted)] = None

    def left(self, tensor: Tensor, value: Value) -> None:
        """A content leaves the device: one that would be kept, or one that was dropped before (at a border)."""
        storage = tensor.untyped_storage()
        made = self._made.get(weakref(storage))
        if made is not None:
            line = self.line(*made)
            line.offloaded_bytes += storage.nbytes()
            if weakref(storage) in self._dropped:
                del self._dropped[weakref(storage)]
                line.dropped_bytes -= storage.nbytes()

    def still_read(self, values: Iterable[Value]) -> None:
        """The step is over, and recorded ops that backward may need go on reading these values."""
        for value in values:
            if value.tensor is None:
                continue
            storage = value.tensor.untyped_storage()
            made = self._made.get(weakref(storage))
            if made is not None and weakref(storage) not in self._counted:
                self._counted[weakref(storage, self._forget_counted)] = None
                self.line(*made).kept_bytes += storage.nbytes()

    def replayed(self, op: Op, seconds: float) -> None:
        """A recorded op was run again."""
        label = getattr(op, "label", None)
        if label is not None:
            line = self.line(*label)
            line.replayed_ops += 1
            line.replay_seconds += seconds

    def close(self) -> None:
        """Forget storages; the figures stay."""
        self._made.clear()
        self._counted.clear()
        self._dropped.clear()


class LedgerTape(Tape):  # type: ignore[no-untyped-call]  # torch's __init_subclass__ has no types
    """A tape that keeps a ledger of everything it sees."""

    def __init__(self, clock: Clock, ledger: Ledger) -> None:
        super().__init__(clock)
        self.ledger = ledger
        self.observers.append(ledger)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run and record the op as the plain tape does, and book it."""
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if not self.paused and not (types and whose(types)):
            self.ledger.made(func, out)
        return out

    def clear(self) -> None:
        """Forget the step, after a last look at what is read by ops that live on."""
        self.dropped.clear()
        self.ledger.still_read([value for found in self.leaves.values() if (value := found()) is not None])
        super().clear()
