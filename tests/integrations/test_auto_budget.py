"""A budget under Lightning: one step is traced, the others follow plans, and every bit is that of plain training."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.profilers import PyTorchProfiler
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_remat import RematCallback, RematStrategy
from lightning_remat.planning.planfile import PlanFile
from lightning_remat.runtime.tuning.pilot import Pilot
from tests.helpers import seed_everything
from tests.helpers.bits import difference_in_bits
from tests.helpers.training import Lit, Net, Result, regression, train, trainer_for
from tests.integrations.test_training import Adversaries, Manual, Scheduled, Searching, Skipping

PLENTY = "1GiB"
SCARCE = 95_000
NOTHING = 1

pytestmark = [
    pytest.mark.filterwarnings("ignore:policy='auto'. budget=.* is not feasible"),  # asked for on purpose
    pytest.mark.filterwarnings("ignore:`training_step` returned `None`"),  # a skipped batch is a case
]
BUDGETS = pytest.mark.parametrize("budget", [PLENTY, SCARCE, NOTHING])
WAYS = pytest.mark.parametrize("way", ["strategy", "callback"])


class Validated(Lit):
    """Evaluation in between, with and without gradients."""

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("val_loss", regression(self.net, batch))
        with torch.inference_mode(False), torch.enable_grad():
            x = batch[0].clone().requires_grad_()
            regression(self.net, (x, batch[1].clone())).backward()
            assert x.grad is not None
            self.log("slope", x.grad.abs().sum())
        self.zero_grad()


class Alternating(Lit):
    """Two sequences of ops in turn."""

    def training_step(self, batch: Any, index: int) -> Tensor:
        if index % 2:
            batch = (batch[0].sin(), batch[1])
            self.steps_run += 1
            loss = self.loss(self.net, batch) + self.net(batch[0].cos()).mean()
            self.losses.append(loss.detach())
            return loss
        return super().training_step(batch, index)


def data(*rows: int) -> DataLoader[Any]:
    """One batch for each number of rows."""
    generator = torch.Generator().manual_seed(5)
    batches = [(torch.randn(n, 8, generator=generator), torch.randn(n, 1, generator=generator)) for n in rows]
    return DataLoader(batches, batch_size=None)


def lit(kind: type[Lit] = Lit) -> Callable[[], Lit]:
    return lambda: kind(Net(), regression)


def trained(make: Callable[[], Any], loader: Any, budget: Any, way: str = "strategy", **options: Any) -> Result:
    if way == "strategy":
        return train(make, loader, strategy=RematStrategy(budget=budget), **options)
    callback = RematCallback(budget=budget)
    result = train(make, loader, callbacks=lambda: [callback], **options)
    result.trainer.strategy.remat = callback.remat
    return result


def pilot_of(result: Result) -> Pilot:
    pilot = result.trainer.strategy.remat._pilot
    assert isinstance(pilot, Pilot)
    return pilot


SCENARIOS: dict[str, tuple[Callable[[], Any], Any, dict[str, Any]]] = {
    "as usual": (lit(Scheduled), data(*[32] * 6), {}),
    "a shorter last batch": (lit(), data(32, 32, 32, 12), {"max_epochs": 2}),
    "a longer batch later": (lit(), data(16, 16, 48, 16, 48), {}),
    "accumulated": (lit(), data(*[32] * 7), {"accumulate_grad_batches": 2}),
    "clipped": (lit(), data(*[32] * 5), {"gradient_clip_val": 0.1}),
    "bf16-mixed": (lit(), data(*[32] * 5), {"precision": "bf16-mixed"}),
    "bf16-true": (lit(), data(*[32] * 5), {"precision": "bf16-true"}),
    "manual optimization": (lit(Manual), data(*[32] * 5), {}),
    "two optimizers": (lit(Adversaries), data(*[32] * 5), {}),
    "an optimizer that runs the step several times": (lit(Searching), data(*[32] * 4), {}),
    "steps without a loss": (lit(Skipping), data(*[32] * 7), {}),
    "two sequences in turn": (lit(Alternating), data(*[32] * 8), {}),
    "validation": (
        lit(Validated), data(*[32] * 4), {"max_epochs": 2, "fit_options": {"val_dataloaders": data(32, 8)},
                                          "val_check_interval": 2, "inference_mode": False},
    ),
    "one step": (lit(), data(*[32] * 4), {"fast_dev_run": True}),
    "three steps": (lit(), data(*[32] * 4), {"fast_dev_run": 3}),
    "anomalies": (lit(), data(*[32] * 4), {"detect_anomaly": True}),
}  # fmt: skip


@BUDGETS
@pytest.mark.parametrize("name", SCENARIOS)
def test_every_bit_is_that_of_plain_training(name: str, budget: Any) -> None:
    """Losses, gradients, weights, buffers, optimizer state, metrics and random streams; the step runs once."""
    make, loader, options = SCENARIOS[name]
    plain = train(make, loader, **options)
    ours = trained(make, loader, budget, **options)
    assert ours.difference(plain) == []
    assert not torch.autograd._profiler_enabled()
    pilot = pilot_of(ours)
    assert not pilot.given_up
    if name != "one step":
        assert pilot.result is not None
        assert (ours.replayed_ops > 0) or budget == PLENTY
        assert not pilot.tape.lost


@WAYS
def test_strategy_and_callback_are_the_same(way: str) -> None:
    plain = train(lit(), data(*[32] * 5))
    ours = trained(lit(), data(*[32] * 5), SCARCE, way)
    assert ours.difference(plain) == []
    plan = pilot_of(ours).result
    assert plan is not None
    assert plan.peak_bytes <= SCARCE < plan.static_bytes + plan.plain.peak_bytes
    assert {op.module for op in plan.trace.ops} >= {"net.stem", "net.layers.0.up"}


@WAYS
def test_the_report_of_a_training(way: str) -> None:
    """Predicted and measured."""
    remat = trained(lit(), data(*[32] * 6), SCARCE, way).trainer.strategy.remat
    facts = remat.report().facts
    assert facts.measured_peak_bytes is not None
    assert abs(facts.measured_peak_bytes - facts.predicted_peak_bytes) <= 0.02 * facts.predicted_peak_bytes
    assert dict(facts.static_parts)["optimizer state"] > 0
    assert "net.layers" in str(remat.report())


@pytest.mark.filterwarnings("ignore:policy='auto'. a profiler is running")  # that is the case
@pytest.mark.parametrize("scheduled", [False, True])
def test_lightnings_own_profiler(scheduled: bool, tmp_path: Path) -> None:
    """It sees what it would see, whatever we measure."""

    def profiler() -> PyTorchProfiler:
        schedule = torch.profiler.schedule(wait=1, warmup=1, active=2) if scheduled else None
        return PyTorchProfiler(tmp_path, "seen", schedule=schedule, export_to_chrome=False)

    plain = train(lit(), data(*[32] * 8), profiler=profiler())
    first = profiler()
    ours = trained(lit(), data(*[32] * 8), SCARCE, profiler=first)
    assert ours.difference(plain) == []
    assert first.function_events is not None
    assert any(event.name == "aten::addmm" for event in first.function_events)
    assert not torch.autograd._profiler_enabled()


def test_training_is_resumed_in_every_bit(tmp_path: Path) -> None:
    """Plans go into the checkpoint, beside what is there plainly."""

    def whole(budget: Any) -> Any:
        module, path = None, None
        for epochs in (1, 2):
            seed_everything(1)
            module = Lit(Net(), regression)
            trainer = trainer_for(RematStrategy(budget=budget) if budget else "auto", max_epochs=epochs)
            seed_everything(epochs)
            options = {"ckpt_path": path, "weights_only": False} if path else {}
            trainer.fit(module, data(*[32] * 4), **options)
            path = str(tmp_path / f"{budget}-{epochs}.ckpt")
            trainer.save_checkpoint(path)
        assert trainer.global_step == 8
        return torch.load(path, weights_only=True)

    plain, ours = whole(None), whole(SCARCE)
    for key in ("state_dict", "optimizer_states", "global_step"):
        assert difference_in_bits(plain[key], ours[key], key) == []
    assert set(plain) == set(ours) - {"lightning_remat"}


def test_fit_again_with_the_same_trainer() -> None:
    """The model is met anew, traced anew, and goes on as in plain training."""

    def twice(budget: Any) -> Any:
        strategy = RematStrategy(budget=budget) if budget else "auto"
        result = train(lit(), data(*[32] * 4), strategy=strategy)
        result.trainer.fit_loop.max_epochs = 2
        seed_everything(9)
        result.trainer.fit(result.module, data(*[32] * 4))
        return result

    plain, ours = twice(None), twice(NOTHING)
    assert difference_in_bits(plain.module.state_dict(), ours.module.state_dict()) == []
    assert difference_in_bits(plain.module.losses, ours.module.losses) == []
    assert ours.trainer.strategy.remat.plan is not None


def test_a_plan_saved_in_one_training_is_followed_in_the_next(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    first = trained(lit(), data(*[32] * 4), NOTHING)
    first.trainer.strategy.remat.save_plan(path)
    plain = train(lit(), data(*[32] * 4))
    again = train(lit(), data(*[32] * 4), str(path))
    assert again.difference(plain) == []
    assert 0 < again.replayed_ops <= 4 * sum(PlanFile.load(path).drop)


@WAYS
@pytest.mark.parametrize("at", [0, 1])
def test_an_exception_in_a_training_step(way: str, at: int) -> None:
    """No profiler and no hook is left, and the next training is a new one."""
    from torch.optim import optimizer as optimizers

    class Fails(Lit):
        def training_step(self, batch: Any, index: int) -> Tensor:
            loss = super().training_step(batch, index)
            if index == at:
                raise ArithmeticError
            return loss

    before = dict(optimizers._global_optimizer_pre_hooks)
    with pytest.raises(ArithmeticError):
        trained(lit(Fails), data(*[32] * 4), SCARCE, way)
    assert not torch.autograd._profiler_enabled()
    assert optimizers._global_optimizer_pre_hooks == before
    assert trained(lit(), data(*[32] * 4), SCARCE, way).difference(train(lit(), data(*[32] * 4))) == []
