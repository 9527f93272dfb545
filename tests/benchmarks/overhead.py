"""Where everything fits anyway: what a step under ``strategy="remat"`` costs, compared with ``strategy="auto"``.

    python tests/benchmarks/overhead.py --json overhead.json

One trainer, whose strategy is a plain one for a few batches and a remat strategy for the next few, in turns: so both
have the same thread, the same memory and the same disturbances, which differ by more between two trainers than what is
measured here. The figures are processor times of batches, from Lightning's first hook around a batch to its last,
medians over all batches from the fifth on that are not the first of a turn.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.nn.functional as F
import typer
from fits import Batches, Lit, loader, trainer
from lightning.pytorch.strategies import SingleDeviceStrategy
from models import GPT, Shape, environment, tokens_for
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from lightning_remat.integrations.strategy import strategy_class

SETTLED = 5
"""The first step that counts; those before may be traced and measured."""


class Residual(nn.Module):
    """Two convolutions with BatchNorm and in-place ReLU around a shortcut."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv_1, self.norm_1 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.conv_2, self.norm_2 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.act = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        """``(B, width, H, W)`` to the same."""
        y = self.act(self.norm_1(self.conv_1(x)))
        return self.act(x + self.norm_2(self.conv_2(y)))


class ResNet(nn.Module):
    """A small one; gives its loss."""

    def __init__(self, width: int, blocks: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.blocks = nn.Sequential(*(Residual(width) for _ in range(blocks)))
        self.head = nn.Linear(width, 10)

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Cross entropy of ``(B, 3, H, W)`` and labels ``(B,)``."""
        pictures, labels = batch
        return F.cross_entropy(self.head(self.blocks(self.stem(pictures)).mean((2, 3))), labels)


class Alternating(strategy_class(SingleDeviceStrategy)):  # type: ignore[misc]  # made at run time
    """A remat strategy that can be switched off, hook by hook."""

    plain = False

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """One of the two."""
        return (
            SingleDeviceStrategy.training_step(self, *args, **kwargs)
            if self.plain
            else super().training_step(*args, **kwargs)
        )

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """One of the two."""
        if self.plain:
            SingleDeviceStrategy.on_train_batch_start(self, batch, batch_idx)
        else:
            super().on_train_batch_start(batch, batch_idx)

    def switch(self, plain: bool) -> None:
        """Be a plain strategy, or a remat strategy again."""
        trainer, self.plain = self.lightning_module.trainer, plain
        if plain:
            self._guard.remove()
        elif "_make_closure" not in vars(trainer.fit_loop.epoch_loop.automatic_optimization):
            self._guard.install(trainer)


class Turns(Batches):
    """Switches the strategy after every few batches.

    Args:
        batches: in a turn.
    """

    def __init__(self, batches: int) -> None:
        super().__init__()
        self.batches = batches
        self.plain: list[bool] = []

    def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
        """Before the first batch of a turn, and of the first ones, which count for nobody."""
        at = len(self.seconds)
        trainer.strategy.switch(at >= SETTLED and (at - SETTLED) // self.batches % 2 == 1)
        self.plain.append(trainer.strategy.plain)
        super().on_train_batch_start(trainer, *args)

    def counted(self, plain: bool) -> list[float]:
        """Seconds of the batches of one kind that count."""
        return [
            s
            for i, s in enumerate(self.seconds)
            if i >= SETTLED and (i - SETTLED) % self.batches and self.plain[i] is plain
        ]


def compare(make: Callable[[], nn.Module], batch: Any, steps: int, in_a_row: int, budget: str | None) -> dict[str, Any]:
    """Median seconds of a batch of each kind, and their ratio."""
    turns = Turns(in_a_row)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    strategy = Alternating(SingleDeviceStrategy, budget=budget, device="cpu")
    trainer(strategy, [turns], max_epochs=1).fit(Lit(make()), loader([batch] * steps))
    ours, plain = turns.counted(False), turns.counted(True)
    halves = statistics.median(plain[::2]) / statistics.median(plain[1::2])
    return {
        "seconds": {"plain": statistics.median(plain), "ours": statistics.median(ours)},
        "steps": min(len(ours), len(plain)),
        "ratio": statistics.median(ours) / statistics.median(plain),
        "chance": halves,
        "at_rest": bool(strategy.remat.pilot.off),
    }


def table(results: dict[str, dict[str, Any]]) -> Table:
    """One row for each model."""
    out = Table(
        title='A step where everything fits, strategy="remat" and strategy="auto"',
        title_justify="left",
        caption=f"processor time of a batch from the {SETTLED}th on, medians, in turns",
        caption_justify="left",
    )
    for header in ("model", "batches", "auto,\nms", "remat,\nms", "remat\nof auto", "auto, odd batches\nof even"):
        out.add_column(header, justify="left" if header == "model" else "right")
    for name, row in results.items():
        seconds = row["seconds"]
        out.add_row(
            name,
            str(row["steps"]),
            f"{seconds['plain'] * 1e3:.2f}",
            f"{seconds['ours'] * 1e3:.2f}",
            f"{row['ratio']:.4f}",
            f"{row['chance']:.4f}",
        )
    return out


def main(
    steps: Annotated[int, typer.Option(min=SETTLED + 2, help="Batches of each training.")] = 100,
    in_a_row: Annotated[int, typer.Option(min=2, help="Batches in a turn; the first does not count.")] = 4,
    budget: Annotated[str | None, typer.Option(help="For ours, instead of none.")] = None,
    blocks: Annotated[int, typer.Option(min=1)] = 4,
    width: Annotated[int, typer.Option(min=8, help="A multiple of 8, the number of heads.")] = 128,
    context: Annotated[int, typer.Option(min=1)] = 256,
    batch: Annotated[int, typer.Option(min=1)] = 4,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures here as well.")] = None,
) -> None:
    """Compare the time of steps that need no recomputation."""
    torch.manual_seed(0)
    shape = Shape(blocks=blocks, width=width, context=context, batch=batch)
    pictures = (torch.randn(4 * batch, 3, 32, 32), torch.randint(10, (4 * batch,)))
    results = {
        "GPT": compare(lambda: GPT(shape), tokens_for(shape), steps, in_a_row, budget),
        "ResNet": compare(lambda: ResNet(width // 4, blocks), pictures, steps, in_a_row, budget),
    }
    Console().print(table(results))
    if json_file:
        json_file.write_text(json.dumps({"environment": environment(), "results": results}, indent=2) + "\n")


if __name__ == "__main__":
    typer.run(main)
