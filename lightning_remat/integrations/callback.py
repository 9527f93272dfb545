"""The engine as a callback, for strategies that users build themselves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning.pytorch import Callback

from lightning_remat.errors import ConfigurationError
from lightning_remat.integrations.bases import SUPPORTED, is_known_not_to_work
from lightning_remat.integrations.checkpoints import is_fitting, load_state, with_state
from lightning_remat.integrations.deepspeed import check_deepspeed, is_deepspeed
from lightning_remat.integrations.guard import Guard
from lightning_remat.integrations.monitor import Monitor
from lightning_remat.integrations.precision import refuse_precision
from lightning_remat.integrations.sharing import Agreement
from lightning_remat.integrations.strategy import RematStrategy
from lightning_remat.offload_option import Offload
from lightning_remat.runtime.session import Remat


class RematCallback(Callback):
    """Recomputation around the training step of whatever strategy the trainer has.

    Use it with a strategy instance of your own; where the strategy is given by name,
    :class:`~lightning_remat.RematStrategy` says more at setup. The strategy's ``training_step`` is wrapped for the
    length of ``fit``.

    Args:
        policy: see :class:`~lightning_remat.Remat`, as for the others.
        budget: for ``policy="auto"``.
        blocks: what the model's blocks are.
        offload: where what is kept goes until backward asks for it.
        verify: compare what is computed again with what was there.
        margin: what is left free of the device where no budget is given.
        retries: how often a batch is run again when memory runs out.
        verify_every_n_steps: how often to verify.
        compiled: whether compiled regions are held to the budget.
        share_plan: the processes follow one plan, see :class:`~lightning_remat.RematStrategy`.

    Raises:
        ConfigurationError: an option that cannot work, a strategy that recomputes already, or one of Lightning's that
            is not supported.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> from lightning.pytorch.strategies import SingleDeviceStrategy
        >>> from lightning_remat import RematCallback
        >>> callback = RematCallback(policy="full")
        >>> trainer = Trainer(strategy=SingleDeviceStrategy("cpu"), callbacks=[callback], logger=False)
    """

    def __init__(
        self,
        *,
        policy: Any = "auto",
        budget: int | str | None = None,
        blocks: Any = None,
        offload: str | Path | Offload | None = None,
        verify: bool = False,
        margin: int | str = "5%",
        retries: int = 3,
        verify_every_n_steps: int | None = None,
        compiled: str = "leave",
        share_plan: bool = False,
    ) -> None:
        self.remat = Remat(
            policy,
            budget=budget,
            blocks=blocks,
            offload=offload,
            verify=verify,
            margin=margin,
            retries=retries,
            verify_every_n_steps=verify_every_n_steps,
            compiled=compiled,
        )
        self._guard = Guard(self.remat)
        self._agreement = Agreement(self.remat) if share_plan else None
        self._strategy: Any = None
        self._monitor: Monitor | None = None

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Check that the strategy is one that can be wrapped, and the options against the model; wrap it."""
        if stage != "fit":
            return
        strategy = trainer.strategy
        if isinstance(strategy, RematStrategy) or isinstance(strategy.__dict__.get("training_step"), _Recorded):
            raise ConfigurationError(
                "RematCallback: the trainer's strategy recomputes already; give either strategy='remat' (or a "
                "RematStrategy) or one RematCallback, not both."
            )
        if is_known_not_to_work(type(strategy)):
            raise ConfigurationError(
                f"RematCallback: strategy={type(strategy).__name__} is not supported (yet): recomputation under it is "
                f"not known to be exact. Supported are {SUPPORTED}; leave the callback out, or use one of these."
            )
        if is_deepspeed(strategy):
            check_deepspeed(strategy.config)
        refuse_precision(trainer, self.remat)
        if not _is_completed_later(pl_module):
            self.remat.bind(pl_module)  # here already, where nothing has been moved to a device yet
        # From now on, so that a second callback meets it.
        self._strategy = strategy
        strategy.training_step = _Recorded(self._guard, strategy.training_step)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Find the model's blocks in what it has become: complete, and with the modules that plugins have replaced."""
        self.remat.bind(pl_module)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Everything is set up: from here on training is followed, and out-of-memory got over."""
        self._guard.install(trainer)
        self._monitor = Monitor(self.remat)
        self._monitor.start(trainer)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """A batch begins, and the one before is over."""
        if self._agreement is not None:
            self._agreement.batch_starts()
        if self._monitor is not None:
            self._monitor.batch_starts(trainer)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """The last batch is over."""
        if self._monitor is not None:
            self._monitor.end(trainer)

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Add what recomputation has learned.

        Not by ``state_dict()``: Lightning asks for the callback when such a checkpoint is loaded without it.
        """
        if trainer.is_global_zero:
            checkpoint.update(with_state(checkpoint, self.remat))

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Go on with it."""
        if is_fitting(trainer):
            load_state(checkpoint, self.remat)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Give the strategy its own training step back."""
        self._restore(trainer)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """The same; Lightning does not call ``teardown`` then."""
        self._guard.explain(exception)
        self._restore(trainer)

    def _restore(self, trainer: Any) -> None:
        self._guard.remove()
        monitor, self._monitor = self._monitor, None
        if monitor is not None:
            monitor.close(speak=trainer.is_global_zero)
        self.remat.close()
        strategy, self._strategy = self._strategy, None
        if strategy is not None:
            del strategy.training_step


class _Recorded:
    """A training step inside the tape."""

    def __init__(self, guard: Guard, training_step: Any) -> None:
        self.guard = guard
        self.training_step = training_step

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.guard.training_step(self.training_step, *args, **kwargs)


def _is_completed_later(pl_module: Any) -> bool:
    """Whether the module builds a part of itself in ``configure_model``, which runs after ``setup``."""
    return not type(pl_module).configure_model.__module__.endswith(".core.hooks")
