"""What Lightning does around a training step, each thing against plain training: equal in every bit."""

import copy
import pickle
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import (
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.plugins import Precision
from torch import Tensor, nn

from lightning_remat import RematCallback, RematStrategy
from tests.helpers.bits import difference_in_bits
from tests.helpers.exact import recompute_all
from tests.helpers.training import Lit, Net, Result, regression, regression_data, train


class Scheduled(Lit):
    """With a learning rate that changes from step to step."""

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Manual(Lit):
    """Manual optimization: backward runs inside the training step, and so inside the tape."""

    def __init__(self, net: nn.Module, loss: Any) -> None:
        super().__init__(net, loss)
        self.automatic_optimization = False

    def training_step(self, batch: Any, index: int) -> Tensor:
        loss = super().training_step(batch, index)
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
        optimizer.step()
        return loss


class Adversaries(Lit):
    """Two optimizers in turn, the second on what the first has just changed; toggled, so that one side is frozen."""

    def __init__(self, net: nn.Module, loss: Any) -> None:
        super().__init__(net, loss)
        self.automatic_optimization = False
        self.judge = Net(width=8, depth=2)

    def training_step(self, batch: Any, index: int) -> None:
        self.steps_run += 1
        x, y = batch
        maker, judge = self.optimizers()
        self.toggle_optimizer(maker)
        made = torch.cat([self.net(x), x[:, 1:]], dim=1)
        loss = self.judge(made).mean() + self.loss(self.net, batch)
        self.manual_backward(loss)
        maker.step()
        maker.zero_grad()
        self.untoggle_optimizer(maker)
        self.toggle_optimizer(judge)
        with torch.no_grad():
            made = torch.cat([self.net(x), x[:, 1:]], dim=1)
        verdict = self.judge(made).square().mean() + (self.judge(x) - y).square().mean()
        self.manual_backward(verdict)
        judge.step()
        judge.zero_grad()
        self.untoggle_optimizer(judge)
        self.losses += [loss.detach(), verdict.detach()]
        self.log_dict({"loss": loss, "verdict": verdict})

    def configure_optimizers(self) -> Any:
        return [torch.optim.Adam(part.parameters(), lr=1e-2) for part in (self.net, self.judge)]


class Searching(Lit):
    """An optimizer that evaluates its closure, and with it the training step, several times per step."""

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)


class Skipping(Lit):
    """Every second step gives None: its forward never gets a backward."""

    def training_step(self, batch: Any, index: int) -> Any:
        loss = super().training_step(batch, index)
        return loss if index % 2 == 0 else None


class Copying(Lit):
    """Looks at itself in mid-step, as meta-learning and teachers do: a deep copy of the running model is trained on."""

    def training_step(self, batch: Any, index: int) -> Tensor:
        loss = super().training_step(batch, index)
        clone = copy.deepcopy(pickle.loads(pickle.dumps(self.net)))
        return loss + 0.1 * self.loss(clone, batch) + 0.1 * self.loss(self.net, batch)


class Forces(Lit):
    """The gradient with respect to the input is part of the loss."""

    def training_step(self, batch: Any, index: int) -> Tensor:
        self.steps_run += 1
        x, y = batch
        x = x.clone().requires_grad_()
        energy = self.net(x)
        (force,) = torch.autograd.grad(energy.sum(), x, create_graph=True)
        loss = (energy - y).square().mean() + force.square().mean()
        self.losses.append(loss.detach())
        self.log("loss", loss)
        return loss


@dataclass(frozen=True, kw_only=True)
class Case:
    make: Callable[..., Any] = Lit
    batches: int = 4
    options: dict[str, Any] = field(default_factory=dict)
    callbacks: Callable[[], Iterable[Callback]] = tuple


CASES = {
    "automatic": Case(),
    "accumulate": Case(options={"accumulate_grad_batches": 2}),
    "accumulation scheduler": Case(
        options={"max_epochs": 2}, callbacks=lambda: [GradientAccumulationScheduler(scheduling={1: 2})]
    ),
    "clip by norm": Case(options={"gradient_clip_val": 0.1}),
    "clip by value": Case(options={"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}),
    "bf16-mixed": Case(options={"precision": "bf16-mixed", "accumulate_grad_batches": 2}),
    "bf16-true": Case(options={"precision": "bf16-true"}),
    "64-true": Case(options={"precision": "64-true"}),
    "scheduler": Case(make=Scheduled),
    "manual": Case(make=Manual),
    "two optimizers": Case(make=Adversaries),
    "two optimizers, bf16-mixed": Case(make=Adversaries, options={"precision": "bf16-mixed"}),
    "closure several times": Case(make=Searching),
    "steps without a loss": Case(make=Skipping),
    "a copy in mid-step": Case(make=Copying),
    "forces": Case(make=Forces),
    "several epochs": Case(options={"max_epochs": 2}),
    "anomaly detection": Case(batches=2, options={"detect_anomaly": True}),
    "SWA": Case(
        options={"max_epochs": 4}, callbacks=lambda: [StochasticWeightAveraging(swa_lrs=1e-3, swa_epoch_start=1)]
    ),
    "weight averaging": Case(options={"max_epochs": 2}, callbacks=lambda: [WeightAveraging()]),
    "EMA": Case(options={"max_epochs": 2}, callbacks=lambda: [EMAWeightAveraging(decay=0.9)]),
}

WAYS: dict[str, Callable[[], dict[str, Any]]] = {
    "remat": lambda: {"strategy": "remat"},
    "full": lambda: {"policy": "full"},
    "recompute all": lambda: {"policy": recompute_all},
    "callback": lambda: {"callback": RematCallback(policy="every:2")},
}


def run(case: Case, *, callback: Callback | None = None, **given: Any) -> Result:
    return train(
        lambda: case.make(Net(), regression),
        regression_data(case.batches),
        callbacks=lambda: [*case.callbacks(), *([callback] if callback else [])],
        **given,
        **case.options,
    )


PLAIN: dict[str, Result] = {}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", CASES)
# Both are cases: anomaly detection, and a batch that is skipped.
@pytest.mark.filterwarnings(
    "ignore:You have turned on `Trainer\\(detect_anomaly=True\\)`", "ignore:`training_step` returned `None`"
)
def test_training_is_the_same_in_every_bit(name: str, way: str) -> None:
    """Losses, gradients, weights, buffers, optimizer state, logged metrics and random streams; user code ran once."""
    if name not in PLAIN:
        PLAIN[name] = run(CASES[name])
    expected = PLAIN[name]
    result = run(CASES[name], **WAYS[way]())
    assert result.difference(expected) == []
    assert result.gradients
    assert all(not module._forward_hooks and not module._forward_pre_hooks for module in result.module.modules())


@pytest.mark.allow_leak("deterministic algorithms", "cudnn flags")  # the trainer's: it sets them for good
def test_deterministic_training_is_the_same_in_every_bit() -> None:
    case = Case(options={"deterministic": True})
    assert run(case, policy="full").difference(run(case)) == []


@pytest.mark.parametrize("name", ["automatic", "manual", "bf16-mixed", "a copy in mid-step"])
def test_something_was_recomputed(name: str) -> None:
    """So that the comparisons above are not of plain training with itself."""
    for policy in ("full", recompute_all):
        assert run(CASES[name], policy=policy).replayed_ops > 0


class Replacing(Precision):
    """A plugin that puts other modules in place of some, as those for low precision and SyncBatchNorm do."""

    def convert_module(self, module: nn.Module) -> nn.Module:
        for block in module.net.layers:
            block.norm = nn.BatchNorm1d(block.norm.num_features)
        return module


@pytest.mark.parametrize("where", ["strategy", "callback"])
def test_a_pattern_holds_for_the_modules_that_a_plugin_has_put_in(where: str) -> None:
    """Lightning replaces modules after it has set up the callbacks; those that run count."""
    policy = {"*.norm": "full"}
    if where == "strategy":
        strategy = RematStrategy(policy=policy)
        run(CASES["automatic"], strategy=strategy, plugins=[Replacing()])
        remat = strategy.remat
    else:
        callback = RematCallback(policy=policy)
        run(CASES["automatic"], callback=callback, plugins=[Replacing()])
        remat = callback.remat
    assert remat.stats.recorded_ops > 0


class Copies(Callback):
    """Copies the module at every point of a step."""

    def __init__(self) -> None:
        self.copies: list[Any] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        self.copies.append(copy.deepcopy(pl_module.net))

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
        self.copies.append(copy.deepcopy(pl_module.net))

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        self.copies.append(copy.deepcopy(pl_module.net))


def test_copies_made_during_training_are_ordinary_modules() -> None:
    """They carry nothing of ours, compute what the original computes, and can be trained."""
    copies = Copies()
    result = run(CASES["automatic"], policy="full", callback=copies)
    assert len(copies.copies) == 12
    for clone in copies.copies:
        assert not any(module._forward_hooks or module._forward_pre_hooks for module in clone.modules())
    last, original = copies.copies[-1].eval(), result.module.net.eval()
    x = torch.randn(4, 8)
    assert difference_in_bits(last(x), original(x)) == []
    last(x).sum().backward()
