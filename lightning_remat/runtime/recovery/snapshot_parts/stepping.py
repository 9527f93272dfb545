"""Optimizers, and what steps with them: undone if the training step itself has stepped them (manual optimization)."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any
from weakref import ref as weakref

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from lightning_remat.runtime.recovery.snapshot_parts.contents import Contents
from lightning_remat.runtime.recovery.snapshot_parts.tensors import version_of, versions_of


def stepped_by(optimizer: Optimizer) -> Iterator[Tensor]:
    """The parameters of an optimizer."""
    for group in optimizer.param_groups:
        yield from group["params"]


class _Saved:
    """Parameters and state of one optimizer, in host memory."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        with torch.no_grad():
            self.parameters = [(p, p.detach().to("cpu", copy=True)) for p in stepped_by(optimizer)]
            self._state = {p: _to_host(state) for p, state in optimizer.state.items()}

    def restore(self) -> None:
        state = self._optimizer.state
        with torch.no_grad():
            for p, host in self.parameters:
                p.copy_(host)
            for p in [p for p in state if p not in self._state]:
                del state[p]
            for p, host in self._state.items():
                state[p] = _from_host(host, state.get(p))


class _OnHost:
    """A tensor in host memory, and the one that it is of."""

    __slots__ = ("host", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.host = tensor.detach().to("cpu", copy=True)


def _to_host(value: Any) -> Any:
    if isinstance(value, Tensor):
        return _OnHost(value)
    if isinstance(value, dict):
        return {k: _to_host(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [type(value), [_to_host(v) for v in value]]
    return copy.copy(value)


def _from_host(saved: Any, present: Any) -> Any:
    """The value again, in the containers and tensors that it was in where those are still there."""
    if isinstance(saved, _OnHost):
        saved.tensor.copy_(saved.host)
        return saved.tensor
    if isinstance(saved, dict):
        old = present if isinstance(present, dict) else {}
        entries = {k: _from_host(v, old.get(k)) for k, v in saved.items()}
        if not isinstance(present, dict):
            return entries
        present.clear()
        present.update(entries)
        return present
    if isinstance(saved, list):
        kind, items = saved
        values = [_from_host(v, None) for v in items]
        if isinstance(present, list):
            present[:] = values
            return present
        return kind(values)
    return copy.copy(saved)


class Stepping:
    """Optimizers, gradient scalers and schedulers at one time.

    Args:
        before_step: told of the parameters that an optimizer is about to step inside the step.
    """

    def __init__(
        self,
        optimizers: Iterable[Optimizer],
        scalers: Iterable[Any],
        schedulers: Iterable[Any],
        *,
        manual: bool,
        before_step: Callable[[Iterable[Tensor]], None],
    ) -> None:
        self.optimizers = list(optimizers)
        self._scalers = list(scalers)
        self._schedulers = list(schedulers)
        self._manual = manual
        self._before_step = before_step
        self._usual: tuple[int, ...] = ()
        self._stepped: list[int] = []
        self._saved: dict[int, _Saved] = {}
        self._not_saved: Optimizer | None = None
        self._groups: list[tuple[list[dict[str, Any]], list[dict[str, Any]]]] = []
        self._contents: Contents | None = None
        self._parameters: Sequence[Tensor] = ()
        self._versions: list[int] = []
        self._flags: list[dict[str, Any]] = []
        self._handle: Any = None

    def take(self, parameters: Sequence[Tensor]) -> None:
        """Note hyperparameters, scales, schedules; look out for steps if there can be any.

        Args:
            parameters: what nothing but an optimizer may change in a step.
        """
        self._end()
        self._parameters = parameters
        self._note()
        self._contents = contents = Contents(set())
        for optimizer in self.optimizers:
            # Learning rates may be tensors; the parameters in the groups are nobody's to change.
            groups = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
            self._groups.append((optimizer.param_groups, groups))
            for group in groups:
                for value in group.values():
                    if isinstance(value, Tensor):
                        contents.keep(value, "a hyperparameter")
        for scaler in self._scalers:
            contents.keep(scaler.__dict__, type(scaler).__name__)
        for scheduler in self._schedulers:
            for part in (scheduler, *getattr(scheduler, "_schedulers", ())):  # those that are made of others
                contents.keep(part.__dict__, type(part).__name__)
        if self._manual:
            self._flags = [{k: v for k, v in o.__dict__.items() if type(v) in (int, bool)} for o in self.optimizers]
            me = weakref(self)

            def about_to_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
                if (stepping := me()) is not None:
                    stepping._about_to_step(optimizer)

            self._handle = register_optimizer_step_pre_hook(about_to_step)

    def why_not(self) -> str | None:
        """Why something cannot be put back, or None."""
        if self._not_saved is not None:
            return (
                f"{type(self._not_saved).__name__} had begun the last optimizer step of the batch, before which "
                "nothing is copied, since nothing was expected to fail after it"
            )
        known = {id(p) for saved in self._saved.values() for p, _ in saved.parameters}
        for p, version in zip(self._parameters, self._versions, strict=True):
            if version_of(p) != version and id(p) not in known:
                return (
                    f"a parameter ({tuple(p.shape)}) was changed in the step, not by an optimizer step that was "
                    "expected (an optimizer that runs in backward, or manual optimization that was not announced)"
                )
        return None if self._contents is None else self._contents.why_not()

    def restore(self) -> None:
        """Put everything back; copies are kept for the next try."""
        for saved in self._saved.values():
            saved.restore()
        for groups, before in self._groups:
            for group, old in zip(groups, before, strict=False):
                for name in [n for n in group if n not in old and n != "params"]:
                    del group[name]
                group.update(old)
        if self._manual:
            for optimizer, flags in zip(self.optimizers, self._flags, strict=True):
                optimizer.__dict__.update(flags)
        if self._contents is not None:
            self._contents.restore()
        self._stepped = []
        self._note()

    def release(self) -> None:
        """The step has ended well: what was stepped in it, and in which order, is expected of the next."""
        if self._stepped:
            self._usual = tuple(self._stepped)
        self._end()

    def _end(self) -> None:
        if self._handle is not None:
            self._handle.remove()
            self._handle = None
        self._stepped, self._saved, self._not_saved = [], {}, None
        self._groups, self._contents = [], None
        self._parameters, self._versions = (), []

    def __del__(self) -> None:
        self._end()

    def _note(self) -> None:
        self._versions = versions_of(self._parameters)

    def _about_to_step(self, optimizer: Optimizer) -> None:
        if not any(o is optimizer for o in self.optimizers):
            return
        if self._not_saved is not None:  # it was not the last after all; known from now on
            self._stepped.append(id(optimizer))
            return
        self._stepped.append(id(optimizer))
        if tuple(self._stepped) == self._usual:
            self._not_saved = optimizer
            return
        if id(optimizer) not in self._saved:
            self._before_step(stepped_by(optimizer))
            self._saved[id(optimizer)] = _Saved(optimizer)
