"""Where everything fits anyway: what a step under ``strategy="remat"`` costs, compared with ``strategy="auto"``.

    python tests/benchmarks/overhead.py --json overhead.json

Trainers run in one process, a thread for each, of which one runs at a time: after a few batches a trainer hands over
to the next, so that what disturbs one disturbs all. The figures are processor times of batches, from Lightning's first
hook around a batch to its last, medians over all batches from the fifth on that are not the first of a turn. Ratios are
medians, too, of batches of the same number, which ran close to each other. A second plain trainer among them says how
much of a difference is chance.
"""

from __future__ import annotations

import json
import statistics
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.nn.functional as F
import typer
from fits import Batches, Lit, loader, trainer
from models import GPT, Shape, environment, tokens_for
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from lightning_remat import RematStrategy

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


class Turns(Batches):
    """Hands over to the next trainer after a few batches, and waits for its turn.

    Args:
        batches: in a turn.
    """

    def __init__(self, batches: int) -> None:
        super().__init__()
        self.batches = batches
        self.mine = threading.Semaphore(0)
        self.next: Turns | None = None
        self.over = False
        self.first_of_turn: set[int] = set()

    def on_train_batch_start(self, *args: Any) -> None:
        """Wait, if a turn is over."""
        at = len(self.seconds)
        if at % self.batches == 0:
            self.first_of_turn.add(at)
            if at:
                self.hand_over()
                self.mine.acquire()
        super().on_train_batch_start(*args)

    def hand_over(self) -> None:
        """To the next one that has not ended; that may be this one."""
        other = self.next
        while other is not None and other.over and other is not self:
            other = other.next
        if other is not None:
            other.mine.release()

    def counted(self) -> list[float]:
        """Seconds of the batches that count."""
        return [s for i, s in enumerate(self.seconds) if i + 1 >= SETTLED and i not in self.first_of_turn]


def in_turns(jobs: dict[str, Callable[[Turns], object]], batches: int) -> dict[str, list[float]]:
    """Run all jobs, one at a time and a turn each; returns the seconds of batches that count.

    The last job gets the main thread, which PyTorch's profiler wants for itself.

    Raises:
        RuntimeError: a job failed.
    """
    turns = {name: Turns(batches) for name in jobs}
    for one, other in zip(turns.values(), [*turns.values()][1:] + [*turns.values()][:1], strict=True):
        one.next = other
    failures: list[BaseException] = []

    def run(name: str) -> None:
        turn = turns[name]
        turn.mine.acquire()
        try:
            torch.set_num_threads(1)  # a setting of each thread
            jobs[name](turn)
        except BaseException as error:
            failures.append(error)
        finally:
            turn.over = True
            turn.hand_over()

    *others, last = jobs
    threads = [threading.Thread(target=run, args=(name,)) for name in others]
    for thread in threads:
        thread.start()
    next(iter(turns.values())).mine.release()
    run(last)
    for thread in threads:
        thread.join()
    if failures:
        raise RuntimeError("a training failed") from failures[0]
    return {name: turn.counted() for name, turn in turns.items()}


def compare(make: Callable[[], nn.Module], batch: Any, steps: int, in_a_row: int, budget: str | None) -> dict[str, Any]:
    """Median seconds of a batch under each strategy, and their ratios."""

    def job(strategy: Callable[[], Any]) -> Callable[[Turns], object]:
        def run(turns: Turns) -> None:
            torch.manual_seed(0)
            trainer(strategy(), [turns], max_epochs=1).fit(Lit(make()), loader([batch] * steps))

        return run

    ours = job(lambda: "remat" if budget is None else RematStrategy(budget=budget))
    jobs = {"plain again": job(lambda: "auto"), "plain": job(lambda: "auto"), "ours": ours}
    found = in_turns(jobs, in_a_row)
    seconds = {name: statistics.median(times) for name, times in found.items()}
    return {
        "seconds": seconds,
        "steps": min(map(len, found.values())),
        "ratio": median_ratio(found["ours"], found["plain"]),
        "chance": median_ratio(found["plain again"], found["plain"]),
    }


def median_ratio(these: list[float], those: list[float]) -> float:
    """Of batches of the same number."""
    return statistics.median(a / b for a, b in zip(these, those, strict=True))


def table(results: dict[str, dict[str, Any]]) -> Table:
    """One row for each model."""
    out = Table(
        title='A step where everything fits, strategy="remat" and strategy="auto"',
        title_justify="left",
        caption=f"processor time of a batch from the {SETTLED}th on, medians, in turns in one process",
        caption_justify="left",
    )
    for header in ("model", "batches", "auto,\nms", "remat,\nms", "remat\nof auto", "auto again\nof auto"):
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
    context: Annotated[int, typer.Option(min=1)] = 128,
    batch: Annotated[int, typer.Option(min=1)] = 4,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures here as well.")] = None,
) -> None:
    """Compare the time of steps that need no recomputation."""
    torch.manual_seed(0)
    shape = Shape(blocks=blocks, width=width, context=context, batch=batch)
    pictures = (torch.randn(batch, 3, 32, 32), torch.randint(10, (batch,)))
    results = {
        "GPT": compare(lambda: GPT(shape), tokens_for(shape), steps, in_a_row, budget),
        "ResNet": compare(lambda: ResNet(width // 4, blocks), pictures, steps, in_a_row, budget),
    }
    Console().print(table(results))
    if json_file:
        json_file.write_text(json.dumps({"environment": environment(), "results": results}, indent=2) + "\n")


if __name__ == "__main__":
    typer.run(main)
