"""Short trainings under Lightning, and all that one of them leaves behind, so that two can be compared in every bit."""

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_remat import RematStrategy
from tests.helpers.bits import difference_in_bits, random_streams
from tests.helpers.seed import seed_everything


class Net(nn.Module):
    """A stem, three residual blocks with BatchNorm, dropout and an in-place activation, and a head."""

    def __init__(self, width: int = 16, depth: int = 3) -> None:
        super().__init__()
        self.stem = nn.Linear(8, width)
        self.layers = nn.ModuleList([Block(width) for _ in range(depth)])
        self.head = nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.norm = nn.BatchNorm1d(2 * width)
        self.act = nn.ReLU(inplace=True)
        self.drop = nn.Dropout(0.2)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.drop(self.act(self.norm(self.up(x)))))


class Lit(LightningModule):
    """Automatic optimization of a network; its step also draws from NumPy and Python, and counts its calls.

    Attributes:
        losses: the detached loss of every training step.
        steps_run: how many times `training_step` ran; a recomputation that runs user code again would show here.
    """

    def __init__(self, net: nn.Module, loss: Callable[[nn.Module, Any], Tensor], lr: float = 1e-2) -> None:
        super().__init__()
        self.net = net
        self.loss = loss
        self.lr = lr
        self.losses: list[Tensor] = []
        self.steps_run = 0

    def training_step(self, batch: Any, index: int) -> Tensor:
        self.steps_run += 1
        loss = self.loss(self.net, batch) * (1 + 0.01 * random.random() + 0.01 * float(np.random.rand()))
        self.losses.append(loss.detach())
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


def regression(net: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Mean squared error; the loss that goes with `Net` and `regression_data`."""
    x, y = batch
    return (net(x) - y).square().mean()


def regression_data(batches: int = 3, rows: int = 6) -> DataLoader[Any]:
    """The same batches for every call and every place in a test."""
    generator = torch.Generator().manual_seed(5)
    data = [
        (torch.randn(rows, 8, generator=generator), torch.randn(rows, 1, generator=generator)) for _ in range(batches)
    ]
    return DataLoader(data, batch_size=None)


@dataclass
class Result:
    """What a training leaves behind. `trainer` and `module` are for looking at, the rest is compared."""

    trainer: Trainer
    module: Any
    losses: list[Tensor] = field(default_factory=list)
    gradients: list[dict[str, Tensor | None]] = field(default_factory=list)
    state: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    optimizers: list[Any] = field(default_factory=list)
    metrics: dict[str, Tensor] = field(default_factory=dict)
    streams: dict[str, Any] = field(default_factory=dict)
    steps_run: int = 0
    replayed_ops: int = 0

    def difference(self, other: "Result") -> list[str]:
        """Name everything in which two trainings differ by a bit."""
        names = ("losses", "gradients", "state", "buffers", "optimizers", "metrics", "streams", "steps_run")
        return [text for name in names for text in difference_in_bits(getattr(self, name), getattr(other, name), name)]


class Watch(Callback):
    """Copies every gradient after every backward, and adds up what was replayed."""

    def __init__(self) -> None:
        self.gradients: list[dict[str, Tensor | None]] = []
        self.replayed_ops = 0

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        named = pl_module.named_parameters()
        self.gradients.append({name: None if p.grad is None else p.grad.clone() for name, p in named})

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        remat = getattr(trainer.strategy, "remat", None)
        self.replayed_ops += remat.stats.replayed_ops if remat is not None else 0


def trainer_for(strategy: Any = "auto", callbacks: Iterable[Callback] = (), **options: Any) -> Trainer:
    """A quiet trainer on one CPU device; `options` go before what is set here."""
    quiet: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "max_epochs": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return Trainer(strategy=strategy, callbacks=list(callbacks), **(quiet | options))


def train(
    make: Callable[[], Any],
    data: Any,
    policy: Any = None,
    *,
    strategy: Any = None,
    callbacks: Callable[[], Iterable[Callback]] = tuple,
    fit_options: dict[str, Any] | None = None,
    **options: Any,
) -> Result:
    """Build a module and train it, everything from the same seed.

    Args:
        make: builds the module; called after seeding.
        data: what `fit` takes.
        policy: a policy for a `RematStrategy`; None for plain training.
        strategy: what the trainer gets instead.
        callbacks: builds those to use besides.
        fit_options: more arguments of `fit`.
        **options: more arguments of the `Trainer`.
    """
    seed_everything(3)
    module = make()
    if strategy is None:
        strategy = "auto" if policy is None else RematStrategy(policy=policy)
    watch = Watch()
    trainer = trainer_for(strategy, [watch, *callbacks()], **options)
    seed_everything(4)
    trainer.fit(module, data, **(fit_options or {}))
    return Result(
        trainer=trainer,
        module=module,
        losses=list(module.losses),
        gradients=watch.gradients,
        state={name: t.clone() for name, t in module.state_dict().items()},
        buffers={name: t.clone() for name, t in module.named_buffers()},
        optimizers=[o.state_dict() for o in trainer.optimizers],
        metrics=dict(trainer.callback_metrics),
        streams=random_streams(),
        steps_run=module.steps_run,
        replayed_ops=watch.replayed_ops,
    )
