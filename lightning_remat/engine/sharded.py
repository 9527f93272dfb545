"""Sharded parameters (FSDP): which unit's are gathered, and so what may be recomputed from what.

A *unit* is a module, or a few, whose parameters are gathered together: around its forward, and again around its
backward. In between they are gone, their storage has no memory, while the Parameter object stays the same. So

- a parameter is referred to by a :class:`Gathered`: the object, never its content, and a replay that meets it while it
  is not gathered raises;
- a dropped value whose recipe reads parameters belongs to the unit that reads them. What another unit reads, or has
  autograd save, is kept (:meth:`~lightning_remat.engine.store.Store.settle`), so that a replay in a unit's backward
  reads parameters of that unit only;
- what FSDP does itself to gather and to free is neither recorded nor counted.

Hooks and methods come with a step and go with it, as those on blocks do. Nothing is collective here: each process may
keep and recompute what it likes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, cast
from weakref import ref as weakref

import torch
from torch import Tensor, nn

from lightning_remat.engine.spread import local_of
from lightning_remat.engine.values import Gathered

if TYPE_CHECKING:
    from collections import OrderedDict

    from lightning_remat.engine.tape import Tape


Owner = tuple[Any, tuple[str, ...]]
"""An object, and its methods that fill or free parameters."""


class Unit(Protocol):
    """What is gathered together."""

    modules: tuple[nn.Module, ...]
    owners: list[Owner]

    @property
    def name(self) -> str:
        """For an error."""

    def gathered(self) -> bool:
        """Whether the parameters are there, and whoever computes now may read them."""

    def comes_back(self) -> bool:
        """Whether they are gathered again in backward."""

    def parameters(self) -> Iterator[tuple[Tensor, Any, int]]:
        """Of each that is there: a tensor that shows it, where its content comes from, and its version."""

    def source_of(self, origin: Any) -> int:
        """What changes when what a parameter is gathered from is changed, as by an optimizer."""


class Fsdp2Unit:
    """One ``fully_shard`` call.

    Args:
        state: FSDP's state of the module, or modules.
    """

    def __init__(self, state: Any) -> None:
        self.state = state
        self.modules: tuple[nn.Module, ...] = tuple(state._modules)
        self.groups: list[Any] = list(state._fsdp_param_groups)
        self.owners: list[Owner] = [(group, ("unshard", "wait_for_unshard", "reshard")) for group in self.groups]

    @property
    def name(self) -> str:
        """The module's name in the root of FSDP, or its class."""
        names = [group._module_fqn for group in self.groups if group._module_fqn]
        return names[0] if names else type(self.modules[0]).__name__

    def gathered(self) -> bool:
        """After the copy out of the gathered buffer, which the computation waits for."""
        return all(group.is_unsharded for group in self.groups)

    def comes_back(self) -> bool:
        """Unless the user has said that backward does without."""
        return all(group.unshard_in_backward for group in self.groups)

    def parameters(self) -> Iterator[tuple[Tensor, Any, int]]:
        """Unsharded parameters; FSDP leaves their version alone when it fills them."""
        for group in self.groups:
            if group.is_unsharded:
                for p in group.fsdp_params:
                    shown = local_of(p.unsharded_param)
                    yield shown, p, shown._version

    def source_of(self, origin: Any) -> int:
        """The versions of the shard: some ops count a change of it as a whole, others one of what this process has."""
        whole: int = origin.sharded_param._version
        part: int = origin._sharded_local_tensor._version
        return whole + part


class Fsdp1Unit:
    """One ``FullyShardedDataParallel`` module.

    Args:
        module: the wrapper.
        handle: what looks after its flat parameter.
    """

    def __init__(self, module: nn.Module, handle: Any) -> None:
        self.modules: tuple[nn.Module, ...] = (module,)
        self.handle = handle
        names = ("pre_unshard", "unshard", "post_unshard", "reshard", "post_reshard")
        self.owners: list[Owner] = [(handle, names)]

    @property
    def name(self) -> str:
        """The class of what is wrapped."""
        return type(getattr(self.modules[0], "_fsdp_wrapped_module", self.modules[0])).__name__

    def gathered(self) -> bool:
        """A prefetched parameter may still be on its way until its own hook has waited for it."""
        return not (self.handle._prefetched and self.handle._training_state.name == "IDLE")

    def comes_back(self) -> bool:
        """Always."""
        return True

    def parameters(self) -> Iterator[tuple[Tensor, Any, int]]:
        """The flat parameter, of which all others are views."""
        flat = self.handle.flat_param
        yield flat.detach(), flat, flat._version

    def source_of(self, origin: Any) -> int:
        """The versions of the parameters that the optimizer knows, which are views of the shard."""
        version: int = origin._local_shard._version + sum(p._version for p in origin._params or ())
        return version


class Units:
    """All units of the models that steps have met, for the length of a step watched.

    Attributes:
        here: the unit whose forward is running, the innermost; None: none is.
    """

    def __init__(self) -> None:
        self.here: Unit | None = None
        self._stack: list[Unit] = []
        self._known: dict[int, Any] = {}  # weak: most models have no units
        self._units: list[Unit] = []
        self._tape: Tape | None = None
        self._undo: list[Callable[[], Any]] = []

    def __len__(self) -> int:
        return len(self._units)

    @property
    def on_host(self) -> bool:
        """Whether shards of FSDP1 wait in host memory, which PyTorch does with an accelerator only."""
        return any(isinstance(unit, Fsdp1Unit) and unit.handle._offload_params for unit in self._units)

    def meet(self, root: nn.Module) -> None:
        """Find a model's units; in a step, watch them from now on."""
        known = self._known.get(id(root))
        if known is not None and known() is root:
            return
        self._known[id(root)] = weakref(root)
        found = [u for u in units_of(root) if not any(_same(u, known) for known in self._units)]
        self._units += found
        if self._tape is not None:
            for unit in found:
                self._watch(unit)
                if any(root is module for module in unit.modules):
                    self.enter(unit)  # it is running already, and its own hooks were collected before ours came

    def forget(self) -> None:
        """Begin anew with other models."""
        self._known.clear()
        self._units.clear()

    def install(self, tape: Tape) -> None:
        """Watch all units for one step under ``tape``."""
        self._tape = tape
        for unit in self._units:
            self._watch(unit)

    def remove(self) -> None:
        """Leave everything as it was."""
        tape, self._tape = self._tape, None
        if tape is not None:
            tape.units = None
        while self._undo:
            self._undo.pop()()
        self._stack.clear()
        self.here = None

    def enter(self, unit: Unit, *args: Any) -> None:
        """A module of ``unit`` begins its forward; FSDP's own hooks come next."""
        self._stack.append(unit)
        self.here = unit

    def leave(self, *args: Any) -> None:
        """It has ended, or raised, and FSDP has done its part."""
        if self._stack:
            self._stack.pop()
        self.here = self._stack[-1] if self._stack else None

    def _watch(self, unit: Unit) -> None:
        if self._tape is not None:
            self._tape.units = self
        for owner, names in unit.owners:
            for name in names:
                owner.__dict__[name] = partial(self._quietly, unit, getattr(owner, name))
                self._undo.append(partial(owner.__dict__.pop, name, None))
        key = id(unit)
        for module in unit.modules:
            before = cast("OrderedDict[int, Any]", module._forward_pre_hooks)
            before[key] = partial(self.enter, unit)
            before.move_to_end(key, last=False)
            module._forward_hooks[key] = self.leave
            module._forward_hooks_always_called[key] = True
            for table in (before, module._forward_hooks, module._forward_hooks_always_called):
                self._undo.append(partial(cast("dict[int, Any]", table).pop, key, None))

    def _quietly(self, unit: Unit, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A method of FSDP's that fills or frees parameters: none of the step's business."""
        tape = self._tape
        if tape is None:
            return method(*args, **kwargs)
        paused, tape.paused = tape.paused, True
        try:
            out = method(*args, **kwargs)
            with torch._C._DisableTorchDispatch():
                self._refer(tape, unit)
            return out
        finally:
            tape.paused = paused

    def _refer(self, tape: Tape, unit: Unit) -> None:
        """Have the tape refer to the parameters that are there now as what they are."""
        for tensor, origin, version in unit.parameters():
            key = id(tensor.untyped_storage())
            source = unit.source_of(origin)
            found = tape.parameters.get(key)
            if found is not None:
                known = found[0]
                if isinstance(known, Gathered) and (known.version, known.source_version) == (version, source):
                    continue
            value = Gathered()
            value.op = None
            value.tensor = tensor
            value.geometry = None
            value.version = version
            value.flags = 0
            value.anchor = -1
            value.unit, value.origin, value.source_version = unit, origin, source
            tape.parameters[key] = (value, None)


def units_of(root: nn.Module) -> Iterator[Unit]:
    """Every unit in a model, of FSDP2 or FSDP1."""
    if not torch.distributed.is_available():
        return
    seen: set[int] = set()
    for module in root.modules():
        state = getattr(module, "_get_fsdp_state", None)
        if state is not None:
            found = state()
            if id(found) not in seen and found._fsdp_param_groups:
                seen.add(id(found))
                yield Fsdp2Unit(found)
            continue
        handle = getattr(module, "_handle", None)
        if handle is not None and hasattr(handle, "flat_param"):
            yield Fsdp1Unit(module, handle)


def _same(a: Unit, b: Unit) -> bool:
    return a.owners[0][0] is b.owners[0][0]
