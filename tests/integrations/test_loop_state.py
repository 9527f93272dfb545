"""Trainings under Lightning in which batches fail half-way and run again, against trainings that never fail."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import pytest
import torch
from torch import Tensor
from torchmetrics import MeanMetric
from torchmetrics.regression import MeanSquaredError

from lightning_remat.errors import RestoreError
from lightning_remat.integrations.loop_state import LoopState
from lightning_remat.runtime.recovery.snapshot import Snapshot
from tests.helpers.bits import difference_in_bits, random_streams
from tests.helpers.seed import seed_everything
from tests.helpers.training import Net, regression_data


class Stop(Exception):
    """Stands for out of memory."""


def module_for(pl: Any, manual: bool) -> Any:
    """A module of one of the two namespaces that logs in every way."""

    class Lit(pl.LightningModule):  # type: ignore[misc, name-defined]  # a base known only at run time
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = not manual
            self.net, self.other = Net(), Net(depth=1)
            self.mse, self.mean = MeanSquaredError(), MeanMetric()
            self.away = [MeanMetric()]
            self.fail: str | None = None
            self.calls = 0

        def loss_of(self, net: Any, batch: Any) -> Tensor:
            x, y = batch
            out = net(x)
            loss = (out - y).square().mean()
            self.mse(out.detach(), y)
            self.mean.update(loss.detach())
            self.away[0].update(loss.detach())
            self.log("mse", self.mse, on_step=True, on_epoch=True)
            self.log("away", self.away[0], metric_attribute="away")
            self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
            self.log("largest", loss, reduce_fx="max")
            self.log(f"calls {self.calls}", float(self.calls), add_dataloader_idx=False)
            return loss

        def training_step(self, batch: Any, index: int) -> Any:
            self.calls += 1
            if not manual:
                loss = self.loss_of(self.net, batch)
                if self.fail == "forward":
                    raise Stop
                return loss
            first, second = self.optimizers()
            schedule = self.lr_schedulers()
            for place, net, optimizer in (("first", self.net, first), ("second", self.other, second)):
                self.toggle_optimizer(optimizer)
                if index % 2 == 0:
                    optimizer.zero_grad()
                self.manual_backward(self.loss_of(net, batch))
                if self.fail == f"{place} backward":
                    raise Stop
                if index % 2 == 1:
                    optimizer.step()
                    schedule.step()
                if self.fail == f"{place} step":
                    raise Stop
                self.untoggle_optimizer(optimizer)
            return None

        def configure_optimizers(self) -> Any:
            if not manual:
                return torch.optim.AdamW(self.parameters(), lr=1e-2)
            first = torch.optim.AdamW(self.net.parameters(), lr=1e-2)
            second = torch.optim.SGD(self.other.parameters(), lr=1e-2, momentum=0.9)
            return [first, second], [torch.optim.lr_scheduler.StepLR(first, 2)]

    return Lit()


def arrange(trainer: Any, module: Any, fails: list[str], manual: bool, looks: list[Any]) -> None:
    """Make every batch fail in these ways before it runs to its end."""
    parts: list[Any] = []

    def attempt(step: Callable[[], Any]) -> Any:
        if not parts:
            schedulers = [c.scheduler for c in trainer.strategy.lr_scheduler_configs]
            snapshot = Snapshot([module], trainer.optimizers, manual=manual, told=True, schedulers=schedulers)
            parts.extend((snapshot, LoopState(trainer)))
        snapshot, loops = parts
        before = visible(trainer, module)
        snapshot.take()
        loops.take()
        for fail in fails:
            module.fail = fail
            try:
                step()
            except Stop:
                pass
            else:
                assert fail == "end"
            module.fail = None
            reason = snapshot.why_not() or loops.why_not()
            if reason is not None and "last optimizer step" in reason and fail == "second step":
                raise RestoreError(reason)
            snapshot.restore()
            loops.restore()
            looks.append(difference_in_bits(before, visible(trainer, module)))
        result = step()
        snapshot.release()
        loops.release()
        return result

    epoch_loop = trainer.fit_loop.epoch_loop
    make, advance, backward = (
        epoch_loop.automatic_optimization._make_closure,
        epoch_loop.manual_optimization.advance,
        trainer.strategy.backward,
    )

    def make_closure(*args: Any) -> Any:
        closure = make(*args)
        inner = closure.closure
        closure.closure = lambda *a, **k: attempt(lambda: inner(*a, **k))
        return closure

    def before_backward(loss: Tensor, *args: Any, **kwargs: Any) -> Any:
        if parts:
            parts[0].backward_begins()
        return backward(loss, *args, **kwargs)

    def fail_half_way(grad: Tensor) -> None:
        if module.fail == "backward":
            raise Stop

    if fails:
        epoch_loop.automatic_optimization._make_closure = make_closure
        epoch_loop.manual_optimization.advance = lambda kwargs: attempt(lambda: advance(kwargs))
        trainer.strategy.backward = before_backward
        module.net.layers[1].up.weight.register_hook(fail_half_way)


def visible(trainer: Any, module: Any) -> dict[str, Any]:
    """Everything that a step changes in Lightning, in comparable form."""
    loop = trainer.fit_loop.epoch_loop
    connector = trainer._logger_connector
    results = {}
    for key, metric in loop._results.items():
        names = ("cumulated_batch_size", "_update_count", "_computed", "_forward_cache", "has_reset", "value")
        values = {n: metric.__dict__.get(n) for n in names}
        value = values["value"]
        if isinstance(value, torch.nn.Module):
            values["value"] = [value.metric_state, value._update_count]
        results[key] = values
    found = {
        "results": results,
        "batch size": loop._results.batch_size,
        "connector": {k: v for k, v in connector.__dict__.items() if k != "trainer"},
        "automatic": asdict(loop.automatic_optimization.optim_progress),
        "manual": asdict(loop.manual_optimization.optim_step_progress),
        "batches": asdict(loop.batch_progress),
        "fx": module._current_fx_name,
        "toggled": len(module._param_requires_grad_state),
        "requires_grad": [p.requires_grad for p in module.parameters()],
        "calls": module.calls,
        "metrics": [[m.metric_state, m._update_count] for m in (module.mse, module.mean, module.away[0])],
        "state": dict(module.state_dict()),
        "optimizers": [o.state_dict() for o in trainer.optimizers],
        "schedules": [c.scheduler.state_dict() for c in trainer.strategy.lr_scheduler_configs],
        "streams": random_streams(),
    }
    return copied(found)


def copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {k: copied(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [copied(v) for v in value]
    return value


def train(name: str, fails: list[str], *, manual: bool = False, accumulate: int = 1) -> Any:
    pl = importlib.import_module(name)
    seed_everything(3)
    module = module_for(pl, manual)
    options = {} if manual else {"accumulate_grad_batches": accumulate, "gradient_clip_val": 0.5}
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        profiler="simple",
        **options,
    )
    looks: list[Any] = []
    arrange(trainer, module, fails, manual, looks)
    gradients: list[Any] = []

    class Watch(pl.Callback):  # type: ignore[misc, name-defined]  # as above
        def on_train_batch_end(self, *args: Any) -> None:
            gradients.append([None if p.grad is None else p.grad.clone() for p in module.parameters()])

    trainer.callbacks.append(Watch())
    seed_everything(4)
    trainer.fit(module, regression_data(4))
    assert [d for d in looks if d] == []
    assert not any(p._post_accumulate_grad_hooks for p in module.parameters())
    return [gradients, visible(trainer, module), dict(trainer.callback_metrics)]


@pytest.mark.parametrize("name", ["lightning.pytorch", "pytorch_lightning"])
@pytest.mark.parametrize("accumulate", [1, 2, 4])
@pytest.mark.parametrize("fails", [["forward"], ["backward"], ["end"], ["backward", "forward", "end", "backward"]])
def test_automatic_optimization(name: str, fails: list[str], accumulate: int) -> None:
    assert difference_in_bits(train(name, [], accumulate=accumulate), train(name, fails, accumulate=accumulate)) == []


@pytest.mark.parametrize(
    "fails",
    [
        ["first backward"],
        ["first step"],
        ["second backward"],
        ["second backward", "first step", "first backward", "second backward"],
    ],
)
def test_manual_optimization(fails: list[str]) -> None:
    """Two optimizers that step on every other batch, toggled, one with a schedule."""
    name = "lightning.pytorch"
    assert difference_in_bits(train(name, [], manual=True), train(name, fails, manual=True)) == []


def test_a_failure_after_the_last_step_of_a_batch_is_refused_once_the_pattern_is_known() -> None:
    with pytest.raises(RestoreError, match="last optimizer step"):
        train("lightning.pytorch", ["second step"], manual=True)
