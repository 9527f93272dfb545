"""Memory that is there between steps: parameters, buffers, gradients that stay, optimizer state."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any
from weakref import WeakMethod, WeakSet
from weakref import ref as weakref

import torch
from torch import Tensor, nn
from torch.optim import optimizer as optimizer_module
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from lightning_remat.engine.sharded import local_part

LASTING = ("parameters", "buffers", "optimizer state")
"""Parts of the memory between steps that are the same between any two."""

_LONG_ENOUGH = 50
"""Steps of optimizers after which we no longer wait for parameters that none of them steps."""


class Optimizers:
    """The optimizers that step a model's parameters, met when they step: a plain loop never tells us of them.

    Args:
        about_to_step: method to be told, while its object lives, of any optimizer that begins a step.

    Attributes:
        steps: how many steps have been seen; what is known of their state is new whenever this has changed.
    """

    def __init__(self, about_to_step: WeakMethod[Callable[[Optimizer], None]] | None = None) -> None:
        self.steps = 0
        self.found: WeakSet[Optimizer] = WeakSet()
        self._about_to_step = about_to_step
        self._since = 0
        self._handle: Any = None

    @property
    def watching(self) -> bool:
        """Whether the hook is in place."""
        return self._handle is not None

    def watch(self) -> None:
        """Look out for them, by a hook on all optimizers, until :meth:`stop`; safe to repeat."""
        if self._handle is None:
            self.stop()
            self._since = self.steps
            # Not a bound method: the hook, which is global, must not keep us alive.
            me = weakref(self)

            def stepping(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
                optimizers = me()
                if optimizers is not None:
                    optimizers.steps += 1
                    optimizers.found.add(optimizer)
                    tell = optimizers._about_to_step() if optimizers._about_to_step is not None else None
                    if tell is not None:
                        tell(optimizer)

            self._handle = register_optimizer_step_pre_hook(stepping)

    def stop(self) -> None:
        """Look no longer; those that were found are remembered."""
        while _LEFT_OVER:
            _LEFT_OVER.pop().remove()
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def __del__(self) -> None:
        # The garbage collector may come while PyTorch goes through the hooks, and then none may go; ours is inert.
        if self._handle is not None and _within_optimizer():
            _LEFT_OVER.append(self._handle)
        else:
            self.stop()

    def of(self, roots: Iterable[nn.Module]) -> list[Optimizer]:
        """Those that step parameters of these models."""
        ours = {id(p) for root in roots for p in root.parameters()}
        return [o for o in self.found if any(id(p) in ours for p in _stepped_by(o))]

    def settled(self, roots: Iterable[nn.Module]) -> bool:
        """Whether no more state is to be expected: every parameter that is trained has been stepped, more than once."""
        seen = self.steps - self._since
        if seen < 3:
            return False
        stepped = {id(p) for o in self.found for p in _stepped_by(o)}
        return seen > _LONG_ENOUGH or all(
            id(p) in stepped for root in roots for p in root.parameters() if p.requires_grad
        )


_LEFT_OVER: list[Any] = []
"""Handles of hooks that are to be removed once that can be done."""


def _within_optimizer() -> bool:
    """Whether an optimizer's step has begun on this thread."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename == optimizer_module.__file__:
            return True
        frame = frame.f_back
    return False


def _stepped_by(optimizer: Optimizer) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


def static_parts(roots: Iterable[nn.Module], optimizers: Iterable[Optimizer], device: torch.device) -> dict[str, int]:
    """Bytes on ``device`` by what they are: parameters, buffers, gradients, optimizer state; other, on CUDA.

    On CUDA "other" is what the allocator has handed out beyond those (batches, caches, the user's own tensors).
    """
    parameters = [p for root in roots for p in root.parameters()]
    parts = {
        "parameters": _bytes(parameters, device),
        "buffers": _bytes([b for root in roots for b in root.buffers()], device),
        "gradients": _bytes([p.grad for p in parameters if p.grad is not None], device),
        "optimizer state": _bytes(
            [t for o in optimizers for state in o.state.values() for t in _tensors(state)], device
        ),
    }
    if device.type == "cuda":
        parts["other"] = max(0, torch.cuda.memory_allocated(device) - sum(parts.values()))
    return parts


def at_least(parts: Mapping[str, int], before: Mapping[str, int]) -> dict[str, int]:
    """Parts of static memory of which none that lasts is less than ``before``; on CUDA the sum is what was counted."""
    found = {name: max(size, before.get(name, 0)) if name in LASTING else size for name, size in parts.items()}
    if "other" in found:
        found["other"] = max(0, found["other"] + sum(parts.values()) - sum(found.values()))
    return found


def has_gradients(roots: Iterable[nn.Module]) -> bool:
    """Whether gradients of an earlier backward are still there, as in gradient accumulation."""
    return any(p.grad is not None for root in roots for p in root.parameters())


def gradients_of(roots: Iterable[nn.Module]) -> list[Tensor]:
    """All gradients that are there."""
    return [p.grad for root in roots for p in root.parameters() if p.grad is not None]


def device_of(roots: Iterable[nn.Module]) -> torch.device:
    """Where the first parameter lives; without any, the CUDA device in use, or the CPU."""
    for root in roots:
        for p in root.parameters():
            return p.device
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch's
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _bytes(tensors: Sequence[Tensor], device: torch.device) -> int:
    """Each storage once."""
    seen: dict[int, int] = {}
    for t in map(local_part, tensors):
        if t.device == device and t.layout is torch.strided:
            try:
                storage = t.untyped_storage()
            except (NotImplementedError, RuntimeError):
                continue
            seen[storage.data_ptr() or id(t)] = storage.nbytes()
    return sum(seen.values())


def _tensors(state: Any) -> Iterator[Tensor]:
    if isinstance(state, Tensor):
        yield state
    elif isinstance(state, dict):
        for value in state.values():
            yield from _tensors(value)
    elif isinstance(state, (list, tuple)):
        for value in state:
            yield from _tensors(value)
