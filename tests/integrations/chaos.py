"""Trainings in which memory runs out again and again, and that must not show it: all they leave behind is compared, in
every bit, with what the same training without a failure leaves behind.

    python -m tests.integrations.chaos --steps 500 --seed 1

Under Lightning with everything that a step touches: dropout, BatchNorm, metrics, logged values, accumulation, clipping,
schedulers, mixed precision, two optimizers. Only training steps fail, their forward and backward: not the optimizer,
not validation. The exit status is 1 if anything differs.
"""

from __future__ import annotations

import inspect
import random
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any

import numpy as np
import torch
import torch.nn.functional as F
import torchmetrics
import typer
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.loggers.logger import Logger
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_remat import RematStrategy
from tests.helpers.bits import difference_in_bits, random_streams
from tests.helpers.seed import seed_everything
from tests.helpers.training import Net, trainer_for
from tests.integrations.faults import FaultMode, Faults, Tripping, faults_now

EPOCH = 10
"""Batches in an epoch: not a multiple of 4, so that accumulation meets the end of one half-way."""


class Chaotic(LightningModule):
    """Automatic optimization of a net with dropout and BatchNorm, with metrics, logged values and random numbers."""

    def __init__(self, optimizer: str = "adam") -> None:
        super().__init__()
        self.optimizer = optimizer
        self.net = tripping_net()
        self.error = torchmetrics.MeanSquaredError()
        self.largest = torchmetrics.MaxMetric()
        self.seen = torchmetrics.MeanMetric()

    def training_step(self, batch: Any, index: int) -> Tensor:
        """A loss; memory may run out anywhere in here, also in the middle of a metric's update."""
        with faults_now().armed("forward"):
            x, y = batch
            x = x + 0.01 * random.random() + 0.01 * float(np.random.rand())
            out = self.net(x)
            loss = F.mse_loss(out, y)
            self.log("loss", loss, on_step=True, on_epoch=True)
            self.error(out, y)
            self.largest(out.detach().abs().max())
            self.seen.update(loss.detach())
            self.log("error", self.error, on_step=True, on_epoch=True)
            self.log("largest", self.largest, on_step=False, on_epoch=True)
            self.log_dict({"seen": self.seen, "noise": torch.rand(())}, on_step=True, on_epoch=False)
            return loss

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """The usual one; memory may run out."""
        with faults_now().armed("backward"):
            super().backward(loss, *args, **kwargs)

    def validation_step(self, batch: Any, index: int) -> None:
        """Never fails."""
        x, y = batch
        self.log("val_loss", F.mse_loss(self.net(x), y))

    def configure_optimizers(self) -> Any:
        """With a learning rate that changes at every step."""
        if self.optimizer == "sgd":
            optimizer: torch.optim.Optimizer = torch.optim.SGD(self.parameters(), lr=1e-2, momentum=0.9)
        else:
            optimizer = torch.optim.Adam(self.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 7)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Adversaries(Chaotic):
    """Manual optimization, two optimizers in turn, the second on what the first has just changed."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.judge = tripping_net()

    def training_step(self, batch: Any, index: int) -> None:
        """Both players' turns. If the second fails, the first has moved already, which must be taken back or kept."""
        with faults_now().armed("forward"):
            x, y = batch
            maker, judge = self.optimizers()
            self.toggle_optimizer(maker)
            made = torch.cat([self.net(x), x[:, 1:]], dim=1)
            loss = self.judge(made).mean() + F.mse_loss(self.net(x), y)
            self.log("loss", loss, on_step=True, on_epoch=True)
            self.manual_backward(loss)
            self._move(maker)
            self.toggle_optimizer(judge)
            made = torch.cat([self.net(x).detach(), x[:, 1:]], dim=1)
            verdict = self.judge(made).square().mean() + F.mse_loss(self.judge(x), y)
            self.error(made[:, :1], y)
            self.log("error", self.error, on_step=True, on_epoch=True)
            self.log("verdict", verdict, on_step=True, on_epoch=True)
            self.manual_backward(verdict)
            self._move(judge)

    def _move(self, optimizer: Any) -> None:
        with faults_now().armed(None):
            self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
            optimizer.step()
            optimizer.zero_grad()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> Any:
        """One for each player."""
        return [
            torch.optim.Adam(self.net.parameters(), lr=1e-2),
            torch.optim.SGD(self.judge.parameters(), lr=1e-2, momentum=0.9),
        ]


def tripping_net() -> Net:
    """`Net` with a point that may fail behind every block."""
    net = Net(width=16, depth=3)
    for i, layer in enumerate(net.layers):
        net.layers[i] = Tripping(layer)
    return net


class Recorded(Logger):
    """A logger that remembers all it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[tuple[int | None, dict[str, Any]]] = []

    @property
    def name(self) -> str:
        """Of the logger."""
        return "recorded"

    @property
    def version(self) -> int:
        """There is one."""
        return 0

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        """Remember, except what we log ourselves."""
        own = {key: value for key, value in metrics.items() if not key.startswith("remat/")}
        if own:
            self.lines.append((step, own))

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """There are none."""


IN_A_TRY = ("on_before_zero_grad", "on_before_backward")
"""Called on the way to a failure in backward, hence once for every try of a batch."""
IN_A_MANUAL_TRY = (*IN_A_TRY, "on_after_backward", "on_before_optimizer_step")
_NOT_COUNTED = ("on_exception", "on_save_checkpoint", "on_load_checkpoint")


def _counting(name: str) -> Callable[..., None]:
    def hook(self: Counting, *args: Any, **kwargs: Any) -> None:
        self.counts[name] += 1
        if name == "on_train_batch_start":
            faults_now().new_batch()

    return hook


class Counting(Callback):
    """Counts every call of every hook, and tells the faults of a new batch."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    for _name, _ in inspect.getmembers(Callback, inspect.isfunction):
        if _name.startswith("on_") and _name not in _NOT_COUNTED:
            locals()[_name] = _counting(_name)


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A way to train."""

    make: Callable[[], Chaotic]
    options: dict[str, Any] = field(default_factory=dict)
    manual: bool = False


SCENARIOS = {
    "Adam, clipped": Scenario(make=Chaotic, options={"gradient_clip_val": 0.5}),
    "Adam, accumulated": Scenario(make=Chaotic, options={"accumulate_grad_batches": 4, "gradient_clip_val": 0.5}),
    "SGD, accumulated": Scenario(make=lambda: Chaotic("sgd"), options={"accumulate_grad_batches": 4}),
    "SGD, bf16-mixed": Scenario(make=lambda: Chaotic("sgd"), options={"precision": "bf16-mixed"}),
    "Adam, bf16-mixed, accumulated": Scenario(
        make=Chaotic, options={"precision": "bf16-mixed", "accumulate_grad_batches": 4, "gradient_clip_val": 0.5}
    ),
    "two optimizers": Scenario(make=Adversaries, manual=True),
}


@dataclass(kw_only=True)
class Outcome:
    """What a training leaves behind, by kind, and what happened on the way."""

    left: dict[str, Any]
    tries: dict[str, int]
    """Calls of hooks that a batch makes once for every try."""
    faults: Faults
    trainer: Any

    @property
    def counters(self) -> Any:
        """The engine's; None where there is none."""
        return getattr(getattr(self.trainer.strategy, "remat", None), "counters", None)


def train(scenario: Scenario, strategy: Any, faults: Faults, steps: int) -> Outcome:
    """Train for ``steps`` batches from a known seed."""
    seed_everything(3)
    generator = torch.Generator().manual_seed(5)
    # Few rows: what one BatchNorm sees differs from row to row, and the last batch of an epoch is a smaller one.
    rows = 8 * EPOCH - 3
    data = TensorDataset(torch.randn(rows, 8, generator=generator), torch.randn(rows, 1, generator=generator))
    module = scenario.make()
    counting, logger = Counting(), Recorded()
    trainer = trainer_for(
        strategy,
        [counting],
        logger=logger,
        log_every_n_steps=1,
        max_epochs=-(-steps // EPOCH),
        limit_val_batches=2,
        check_val_every_n_epoch=2,
        **scenario.options,
    )
    seed_everything(4)
    with FaultMode(faults):
        trainer.fit(module, DataLoader(data, batch_size=8, shuffle=True), DataLoader(data, batch_size=16))
    in_a_try = IN_A_MANUAL_TRY if scenario.manual else IN_A_TRY
    left = {
        "weights and buffers": dict(module.state_dict()),
        "gradients": [p.grad for p in module.parameters()],
        "optimizers": [o.state_dict() for o in trainer.optimizers],
        "schedulers": [c.scheduler.state_dict() for c in trainer.lr_scheduler_configs],
        "metrics": {n: {**m.metric_state, "updates": m.update_count} for n, m in metrics_of(module).items()},
        "callback metrics": dict(trainer.callback_metrics),
        "logged": logger.lines,
        "hooks": {n: c for n, c in sorted(counting.counts.items()) if n not in in_a_try},
        "step": (trainer.global_step, trainer.current_epoch),
        "progress": trainer.fit_loop.state_dict(),
        "random streams": random_streams(),
    }
    return Outcome(left=left, tries={n: counting.counts[n] for n in in_a_try}, faults=faults, trainer=trainer)


def metrics_of(module: LightningModule) -> dict[str, torchmetrics.Metric]:
    """A module's metrics, by name."""
    return {name: m for name, m in module.named_children() if isinstance(m, torchmetrics.Metric)}


def compared(name: str, steps: int, strategy: Any, faults: Faults) -> tuple[list[str], Outcome]:
    """Train plainly without failures, and with ``strategy`` under ``faults``; returns what differs."""
    plain = train(SCENARIOS[name], "auto", Faults(), steps)
    ours = train(SCENARIOS[name], strategy, faults, steps)
    different = difference_in_bits(plain.left, ours.left)
    different += [f"{n}: {c} calls, {ours.tries[n]} here" for n, c in plain.tries.items() if ours.tries[n] < c]
    return different, ours


def main(
    steps: Annotated[int, typer.Option(min=1, help="Batches of each training.")] = 500,
    seed: Annotated[int, typer.Option(help="Of the failures.")] = 0,
    scenario: Annotated[list[str], typer.Option(help="May be given several times; all by default.")] = list(SCENARIOS),  # noqa: B006 - typer copies it
    policy: Annotated[list[str], typer.Option(help="May be given several times.")] = ["auto"],  # noqa: B006 - typer copies it
    budget: Annotated[str | None, typer.Option(help="For policy auto.")] = None,
    rate: Annotated[float, typer.Option(min=0, max=1, help="Probability that an op fails; 0: none does.")] = 0.004,
    most: Annotated[int | None, typer.Option(min=1, help="Failures of a batch; sets retries, too.")] = None,
) -> None:
    """Train with failures and without, and compare."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")  # thousands of failures are announced
    table = Table(title=f"{steps} batches each, seed {seed}, failure rate {rate:g}", title_justify="left")
    for header in ("training", "policy", "batches\nfailed", "failures", "evictions", "retries", "different"):
        table.add_column(header, no_wrap=header in ("policy",))
    bad = 0
    for name in scenario:
        for one in policy:
            options: dict[str, Any] = {} if most is None else {"retries": most}
            strategy = RematStrategy(policy=one, budget=budget if one == "auto" else None, **options)
            faults = Faults(seed, rate, most or 3)
            evictions = retries = "?"
            try:
                different, ours = compared(name, steps, strategy, faults)
                if ours.counters is not None:
                    evictions, retries = str(ours.counters.evictions), str(ours.counters.retries)
            except torch.OutOfMemoryError as error:
                different = [f"training ended: {error}"]
            bad += bool(different)
            happened = ", ".join(f"{count} {what}" for what, count in sorted(faults.happened.items()))
            shown = "\n".join(different[:5]) or "nothing"
            table.add_row(name, one, str(faults.batches), happened or "none", evictions, retries, shown)
    Console(width=150).print(table)
    raise typer.Exit(bool(bad))


if __name__ == "__main__":
    typer.run(main)
