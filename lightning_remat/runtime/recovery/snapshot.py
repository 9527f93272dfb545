"""What a training step changes, taken before it and put back when it is to be run again.

Taken at every step, so it must cost next to nothing: small buffers are copied, the rest is noted by reference, version
counter or length. What is put back is exact; what cannot be put back exactly is refused (`RestoreError`), and then
nothing has been put back.

Not covered, because nothing shows it: writes through ``.data`` into parameters; what is inside large NumPy arrays and
large objects of the user's own; hooks that the step added; anything outside the process (files, loggers).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from itertools import chain
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import Optimizer

from lightning_remat.errors import RestoreError
from lightning_remat.runtime.recovery.snapshot_parts.attributes import Attributes
from lightning_remat.runtime.recovery.snapshot_parts.gradients import Gradients
from lightning_remat.runtime.recovery.snapshot_parts.stepping import Stepping, stepped_by
from lightning_remat.runtime.recovery.snapshot_parts.streams import Streams
from lightning_remat.runtime.recovery.snapshot_parts.tensors import Guard

_TABLES = ("_modules", "_parameters", "_buffers")


class Snapshot:
    """State of models, optimizers and random streams before a step.

    >>> import torch
    >>> model = nn.BatchNorm1d(2)
    >>> snapshot = Snapshot([model])
    >>> snapshot.take()
    >>> _ = model(torch.randn(3, 2))  # and here memory runs out
    >>> snapshot.restore()
    >>> model.running_mean
    tensor([0., 0.])
    >>> snapshot.release()

    Args:
        roots: the models that take part.
        optimizers: those that step them.
        manual: the step itself steps the optimizers. Before each such step but the last, its parameters, their state
            and gradients of earlier batches are copied to host memory.
        told: :meth:`backward_begins` will be called before every backward of the step. Without, parameters that have
            a gradient when the snapshot is taken get hooks.
        scalers: gradient scalers (``torch.amp.GradScaler``) that the step may change.
        schedulers: learning-rate schedulers that the step may step.
    """

    def __init__(
        self,
        roots: Iterable[nn.Module],
        optimizers: Iterable[Optimizer] = (),
        *,
        manual: bool = False,
        told: bool = False,
        scalers: Iterable[Any] = (),
        schedulers: Iterable[Any] = (),
    ) -> None:
        self._roots = list(roots)
        self._manual = manual
        self._tree = _Tree()
        self._streams = Streams()
        self._attributes = Attributes()
        name_of = partial(_name_of, self._roots)
        self._guard = Guard(name_of)
        self._gradients = Gradients(name_of, told=told)
        self._stepping = Stepping(
            optimizers, scalers, schedulers, manual=manual, before_step=self._gradients.before_step
        )
        self._flags: list[bool] = []
        self._parameters: list[Tensor] = []
        self._trained: list[Tensor] = []
        self._taken = False

    def take(self) -> None:
        """Note the present state. To be called outside of any dispatch mode."""
        anew = self._tree.look(self._roots)
        if anew:
            self._lay_out()
        self._taken = True
        try:
            self._attributes.take(self._tree.modules, self._tree.names, anew=anew)
            self._guard.take(self._buffers, self._buffer_names, self._frozen())
            self._gradients.take(self._parameters)
            self._stepping.take(self._trained)
            self._streams.take(self._devices)
        except BaseException:  # out of memory, say: no hook stays
            self._gradients.release()
            self._stepping.release()
            self._taken = False
            raise

    def backward_begins(self) -> None:
        """To be called before every backward of a step, by who said ``told=True``; harmless otherwise."""
        if self._taken:
            self._gradients.backward_begins()

    def why_not(self) -> str | None:
        """Why :meth:`restore` would refuse, or None."""
        if not self._taken:
            return "no snapshot has been taken"
        if self._tree.lazy:
            return "the model has parameters that get their shape in the first step"
        for part in (self._stepping, self._gradients, self._attributes, self._guard):
            if (reason := part.why_not()) is not None:
                return reason
        return None

    def restore(self, *, leave: frozenset[str] = frozenset()) -> None:
        """Put everything back; can be repeated after each try.

        Args:
            leave: names of attributes of modules that stay as the failed try has set them, if they were words, switches
                or None: a failure that comes whenever a flag is there ends with it.

        The failed try must have been let go of: its exception and its loss.

        Raises:
            RestoreError: something cannot be put back. Nothing was.
        """
        if (reason := self.why_not()) is not None:
            raise RestoreError(f"The step cannot be run again: {reason}.")
        self._tree.restore()
        self._attributes.restore(leave=leave)
        for p, flag in zip(self._parameters, self._flags, strict=True):
            if p.requires_grad is not flag:
                p.requires_grad_(flag)
        self._guard.restore()
        self._stepping.restore()
        self._gradients.restore()
        self._streams.restore()

    def release(self) -> None:
        """The step has ended well, or will not be tried again: let go of everything but the memory for copies.

        To be called before the optimizer step that follows, unless the step itself makes it.
        """
        if self._taken:
            self._taken = False
            self._guard.look()
            self._attributes.release()
            self._gradients.release()
            self._stepping.release()
            self._streams.release()
            self._flags = []

    def __del__(self) -> None:
        if getattr(self, "_taken", False):
            self._gradients.release()
            self._stepping.release()

    def _lay_out(self) -> None:
        tree = self._tree
        optimizers = self._stepping.optimizers
        stepped = {id(p): p for o in optimizers for p in stepped_by(o)}
        self._stepped = frozenset(stepped)
        self._parameters = list({**{id(p): p for p in tree.tensors("_parameters")}, **stepped}.values())
        named = {id(b): (b, name) for name, b in tree.named_tensors("_buffers")}
        self._buffers = [b for b, _ in named.values()]
        self._buffer_names = [name for _, name in named.values()]
        self._devices = {t.device for t in (*self._parameters, *self._buffers)}

    def _frozen(self) -> list[Tensor]:
        """Parameters that are not trained; the others are set aside in passing, with all their flags."""
        self._flags = [p.requires_grad for p in self._parameters]
        frozen: list[Tensor] = []
        self._trained = []
        for p, flag in zip(self._parameters, self._flags, strict=True):
            # In a step that steps optimizers, a toggle may hide for now what will be trained in it.
            (self._trained if flag or (self._manual and id(p) in self._stepped) else frozen).append(p)
        return frozen


def _name_of(roots: Iterable[nn.Module], tensor: Tensor) -> str:
    for root in roots:
        for name, t in chain(root.named_parameters(), root.named_buffers()):
            if t is tensor:
                return name
    return "a tensor"


class _Tree:
    """Which modules, parameters and buffers there are; an unchanged tree is recognised without walking it."""

    def __init__(self) -> None:
        self.modules: list[nn.Module] = []
        self.names: list[str] = []
        self.lazy = False
        self._full: list[dict[str, Any]] = []
        self._empty: list[dict[str, Any]] = []
        self._entries: list[Any] = []
        self._ids: list[int] = []
        self._before: list[tuple[dict[str, Any], dict[str, Any]]] = []

    def look(self, roots: Iterable[nn.Module]) -> bool:
        """Whether anything is another object than the last time; always true at the first."""
        if self._before and not any(self._empty):
            entries = chain.from_iterable(map(dict.values, self._full))
            if list(map(id, entries)) == self._ids:
                return False
        self._walk(roots)
        return True

    def tensors(self, table: str) -> Iterator[Tensor]:
        """All parameters or all buffers."""
        return (t for _, t in self.named_tensors(table))

    def named_tensors(self, table: str) -> Iterator[tuple[str, Tensor]]:
        """The same, with their names in their own modules."""
        for m in self.modules:
            for name, t in m.__dict__[table].items():
                if t is not None:
                    yield name, t

    def restore(self) -> None:
        """Put back every module, parameter and buffer that was replaced, and remove new ones."""
        for present, before in self._before:
            if len(present) != len(before) or any(present.get(k) is not v for k, v in before.items()):
                present.clear()
                present.update(before)

    def _walk(self, roots: Iterable[nn.Module]) -> None:
        found: dict[int, tuple[nn.Module, str]] = {}
        for root in roots:
            for name, module in root.named_modules():
                found.setdefault(id(module), (module, name or type(root).__name__))
        for module, name in list(found.values()):
            # Modules that hide from the tree, in a list or behind __dict__ (a teacher that is not to be saved).
            for attribute, value in module.__dict__.items():
                values = value if type(value) in (list, tuple) else (value,)
                for hidden in values if attribute not in _TABLES else ():
                    if isinstance(hidden, nn.Module) and id(hidden) not in found:
                        for inner, m in hidden.named_modules():
                            found.setdefault(id(m), (m, f"{name}.{attribute}.{inner}".rstrip(".")))
        self.modules = [m for m, _ in found.values()]
        self.names = [name for _, name in found.values()]
        tables = [m.__dict__[t] for m in self.modules for t in _TABLES]
        self._full = [t for t in tables if t]
        self._empty = [t for t in tables if not t]
        self._before = [(t, dict(t)) for t in tables]
        self._ids = list(map(id, chain.from_iterable(map(dict.values, self._full))))
        self.lazy = any(is_lazy(t) for table in ("_parameters", "_buffers") for t in self.tensors(table))
