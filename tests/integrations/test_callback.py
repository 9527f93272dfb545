"""The engine as a callback: beside a strategy of the user's own, which it leaves as it was."""

from types import SimpleNamespace
from typing import Any

import lightning.pytorch as lp
import pytest
import pytorch_lightning as pl
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import nn

from lightning_remat import ConfigurationError, RematCallback, RematStrategy
from tests.helpers.training import Lit, Net, regression, regression_data, trainer_for


def test_strategy_and_callback_at_once_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="not both"):
        trainer_for("remat", [RematCallback()]).fit(Lit(Net(), regression), regression_data())


class Mine(SingleDeviceStrategy):
    """A strategy of the user's own."""


class Other(lp.strategies.XLAStrategy):
    """One that stands on a strategy that is not supported."""


def test_two_callbacks_at_once_are_refused() -> None:
    trainer = trainer_for("auto", [RematCallback(), RematCallback()])
    with pytest.raises(ConfigurationError, match="not both"):
        trainer.fit(Lit(Net(), regression), regression_data())
    assert "training_step" not in vars(trainer.strategy)


def test_the_callback_refuses_a_strategy_that_is_known_not_to_work() -> None:
    callback = RematCallback()
    with pytest.raises(ConfigurationError, match="strategy=Other is not supported"):
        callback.setup(SimpleNamespace(strategy=object.__new__(Other)), Lit(Net(), regression), "fit")


def test_the_callback_leaves_the_strategy_as_it_was() -> None:
    """After fit, and after an exception as well; the strategy can be used again, with the callback or without."""
    strategy = Mine()
    before = set(vars(strategy))
    module = Lit(Net(), regression)
    callback = RematCallback(policy="full")
    trainer = trainer_for(strategy, [callback])
    trainer.fit(module, regression_data())
    assert callback.remat.stats.replayed_ops > 0
    assert "training_step" not in set(vars(strategy)) - before
    with pytest.raises(TypeError):
        trainer_for(strategy, [callback], accelerator="auto").fit(
            Lit(Net(), lambda net, batch: net(None)), regression_data()
        )
    assert "training_step" not in vars(strategy)
    trainer_for(strategy, [RematCallback()], accelerator="auto").fit(module, regression_data())
    assert module.steps_run == 6


def test_the_callback_waits_for_a_model_that_is_built_late() -> None:
    """What `configure_model` makes is there when blocks are looked for."""

    class Late(Lit):
        def configure_model(self) -> None:
            if isinstance(self.net, nn.Identity):
                self.net = Net()

    callback = RematCallback(policy={"net.layers.*": "full"})
    trainer_for("auto", [callback]).fit(Late(nn.Identity(), regression), regression_data())
    assert callback.remat.blocks[:1] == ["net.layers.0"]
    strategy = RematStrategy(policy="full")
    trainer_for(strategy).fit(Late(nn.Identity(), regression), regression_data())
    assert strategy.remat.blocks == ["net.layers.0", "net.layers.1", "net.layers.2"]


def test_the_callback_serves_both_packages() -> None:
    class OtherLit(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            return regression(self.net, batch)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    options = {"accelerator": "cpu", "devices": 1, "max_epochs": 1, "logger": False, "enable_checkpointing": False}
    callback = RematCallback(policy="full")
    trainer = pl.Trainer(**options, callbacks=[callback], enable_progress_bar=False, enable_model_summary=False)
    trainer.fit(OtherLit(), regression_data())
    assert callback.remat.stats.replayed_ops > 0
    trainer = pl.Trainer(**options, strategy="remat", enable_progress_bar=False, enable_model_summary=False)
    trainer.fit(OtherLit(), regression_data())
    assert trainer.strategy.remat.plan is not None
