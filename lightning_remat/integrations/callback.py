"""The engine as a callback, for strategies that users build themselves."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback

from lightning_remat.errors import ConfigurationError
from lightning_remat.integrations.strategy import RematStrategy
from lightning_remat.runtime.session import Remat


class RematCallback(Callback):
    """Recomputation around the training step of whatever strategy the trainer has.

    Use it with a strategy instance of your own; where the strategy is given by name,
    :class:`~lightning_remat.RematStrategy` says more at setup. The strategy's ``training_step`` is wrapped for the
    length of ``fit``.

    Args:
        **options: see :class:`~lightning_remat.Remat`.

    Raises:
        ConfigurationError: an option that cannot work, or a strategy that recomputes already.
    """

    def __init__(self, **options: Any) -> None:
        self.remat = Remat(**options)

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Check the options against the model and wrap the strategy's training step."""
        if stage != "fit":
            return
        strategy = trainer.strategy
        if isinstance(strategy, RematStrategy) or "training_step" in strategy.__dict__:
            raise ConfigurationError(
                "RematCallback: the trainer's strategy recomputes already; give either strategy='remat' (or a "
                "RematStrategy) or one RematCallback, not both."
            )
        self.remat.bind(pl_module)
        training_step = strategy.training_step

        def recorded(*args: Any, **kwargs: Any) -> Any:
            with self.remat:
                return training_step(*args, **kwargs)

        strategy.training_step = recorded

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Give the strategy its own training step back."""
        if stage == "fit":
            trainer.strategy.__dict__.pop("training_step", None)
