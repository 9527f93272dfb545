"""Around every batch of ``Trainer.fit``: if memory runs out, the same batch is run again as if nothing had happened.

Lightning hands forward, zero_grad and backward to the optimizer as one *closure*; that is what is run again. There is
no public place where a strategy meets every closure (those of accumulated batches never reach it), so
``automatic_optimization._make_closure`` of the running trainer is replaced for the length of ``fit``; this is the only
place that does so, and a test pins what it relies on. In manual optimization all of ``training_step`` is run again.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from lightning_remat.engine.out_of_memory import is_out_of_memory
from lightning_remat.errors import ConfigurationError, NoMemoryLeft, OffloadError
from lightning_remat.integrations.deepspeed import NOT_TWICE, is_deepspeed
from lightning_remat.integrations.loop_state import LoopState
from lightning_remat.integrations.ranks import Replica
from lightning_remat.runtime.recovery.company import Company, is_distributed
from lightning_remat.runtime.recovery.exhausted import note_outside, with_note
from lightning_remat.runtime.recovery.once import Once
from lightning_remat.runtime.recovery.retry import Undo, comes_through
from lightning_remat.runtime.recovery.snapshot import Snapshot
from lightning_remat.runtime.recovery.word import explain as explain_to_all
from lightning_remat.runtime.recovery.word import listening, tell_others
from lightning_remat.runtime.session import Remat


class Guard:
    """Runs the batches of one trainer.

    Args:
        remat: the engine.
    """

    def __init__(self, remat: Remat) -> None:
        self.remat = remat
        self._trainer: Any = None
        self._undo: list[Undo] = []
        self._replica: Replica | None = None
        self._make_closure: Callable[..., Any] | None = None
        self._redirection: Any = None
        self._listening = ExitStack()  # to what other processes leave word of
        self._explained: int | None = None

    # ------------------------------------------------------------------ for the length of fit

    def install(self, trainer: Any) -> None:
        """Come between the trainer and its closures; the model has been set up."""
        self.remove()
        self.remat.check_place()
        self._listening = ExitStack()
        self._listening.enter_context(listening())
        self._trainer = trainer
        self.remat.guarded = True
        self.remat.meet(trainer.strategy.model)  # around the module, where FSDP wraps it
        loop = trainer.fit_loop.epoch_loop.automatic_optimization
        self._make_closure = loop._make_closure
        loop._make_closure = self._guarded_closure
        strategy = trainer.strategy
        if isinstance(strategy.model, DistributedDataParallel):
            self._replica = Replica(strategy.model)
            self._redirection = strategy._forward_redirection
            strategy._forward_redirection = _Redirection(self, self._redirection)

    def remove(self) -> None:
        """Leave everything as it was; safe to repeat."""
        self._listening.close()
        self._explained = None
        trainer, self._trainer = self._trainer, None
        if trainer is None:
            return
        trainer.fit_loop.epoch_loop.automatic_optimization.__dict__.pop("_make_closure", None)
        if self._redirection is not None:
            trainer.strategy._forward_redirection = self._redirection
        self._make_closure = self._redirection = self._replica = None
        self._undo = []

    # ------------------------------------------------------------------ a batch

    def training_step(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A strategy's training step, recorded; in manual optimization it is the whole batch, and may run again."""
        trainer = self._trainer
        self.remat.look_at((args, kwargs))
        if trainer is None:
            with self.remat:
                return step(*args, **kwargs)
        whole = partial(self._recorded, step, *args, **kwargs)
        if trainer.lightning_module.automatic_optimization:
            return whole()
        return self._run(whole, manual=True)

    def _recorded(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._replica is not None:
            # What the wrapper does before and after is not the step's; inside, the redirection begins it.
            self._replica.before_forward()
            return step(*args, **kwargs)
        with self.remat:
            return step(*args, **kwargs)

    def inside(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The module's own training step, inside its wrapper's forward."""
        self.remat.retry.take()
        with self.remat:
            return step(*args, **kwargs)

    def _guarded_closure(self, *args: Any, **kwargs: Any) -> Any:
        assert self._make_closure is not None
        closure = self._make_closure(*args, **kwargs)
        closure.closure = partial(self._closure, closure.closure)
        return closure

    def _closure(self, closure: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return self._run(partial(closure, *args, **kwargs), manual=False)

    def _run(self, step: Callable[[], Any], manual: bool) -> Any:
        deferred = self._replica is not None
        try:
            return self.remat.run(step, self._parts(manual), deferred=deferred, ours=_is_ours)
        except (NoMemoryLeft, OffloadError) as error:
            if isinstance(error, NoMemoryLeft) and error.irreversible is not None:
                self._help_to_restart(error)
            explain_to_all(error)  # at once: what callbacks do when they see it may talk to the others
            raise

    def explain(self, error: BaseException) -> None:
        """What :func:`explain` does, once for each error."""
        if self._explained != id(error):
            self._explained = id(error)
            explain(error)

    def _help_to_restart(self, error: NoMemoryLeft) -> None:
        """Save the plan that needs least, so that training can go on from its last checkpoint under it."""
        trainer = self._trainer
        path = Path(trainer.default_root_dir) / f"remat-tightest-plan-{trainer.global_rank}.json"
        try:
            self.remat.save_tightened_plan(path)
        except (ConfigurationError, OSError):  # no step has been traced, or there is no place for a file
            return
        with_note(error, f"lightning-remat: the plan that needs least was saved; restart with policy={str(path)!r}.")

    def _parts(self, manual: bool) -> list[Undo]:
        if not self._undo:
            trainer = self._trainer
            optimizers = [getattr(o, "optimizer", o) for o in trainer.strategy.optimizers]
            self._undo = [
                Snapshot(
                    [trainer.lightning_module],
                    optimizers,
                    manual=manual,
                    scalers=[s for s in (getattr(trainer.precision_plugin, "scaler", None),) if s is not None],
                    schedulers=[config.scheduler for config in trainer.lr_scheduler_configs] if manual else (),
                ),
                LoopState(trainer),
            ]
            if is_deepspeed(trainer.strategy):
                self._undo.insert(0, Once(NOT_TWICE))
            elif self._replica is not None:
                self._undo.insert(0, self._replica)
            elif is_distributed():
                self._undo.insert(0, Company())
        return self._undo


def _is_ours(error: BaseException) -> bool:
    """Not what a callback has run out of memory with: it may have done half of what it does."""
    return not comes_through(error, "_call_callback_hooks", "trainer.call")


_PLACES = (
    ("_call_callback_hooks", "trainer.call", "a callback"),
    # In automatic optimization the optimizer runs the training step, in manual optimization it is the other way round.
    ("__call__", "loops.optimization.automatic", "a training step"),
    ("optimizer_step", "strategies.strategy", "the optimizer step"),
    ("training_step", "strategies.strategy", "a training step"),
    ("validation_step", "strategies.strategy", "validation"),
    ("__next__", "loops.fetchers", "data loading"),
)


def explain(error: BaseException) -> None:
    """Add to an error that ends training what is known of it: why it was not got over, or how another process ended."""
    if isinstance(error, (NoMemoryLeft, OffloadError)):
        return  # that was told where it was raised
    if is_out_of_memory(error):
        places = [place for function, module, place in _PLACES if comes_through(error, function, module)]
        place = places[0] if places else "a hook or loop around the training step"
        with_note(error, note_outside(place))
        tell_others(f"since it was out of memory in {place}", error)
    else:
        explain_to_all(error)


class _Redirection:
    """Lightning's way from a wrapper's forward to ``training_step``, where the module's own part is recorded."""

    def __init__(self, guard: Guard, inner: Any) -> None:
        self._guard = guard
        self._inner = inner

    def __call__(self, wrapper: Any, module: Any, method: str, *args: Any, **kwargs: Any) -> Any:
        if method == "training_step":
            module = _Stepping(module, self._guard)
        return self._inner(wrapper, module, method, *args, **kwargs)


class _Stepping:
    """Stands in for a module whose ``training_step`` is looked up; everything else is the module's."""

    def __init__(self, module: torch.nn.Module, guard: Guard) -> None:
        object.__setattr__(self, "_module", module)
        object.__setattr__(self, "_guard", guard)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._module, name)
        return partial(self._guard.inside, found) if name == "training_step" else found

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._module, name, value)
