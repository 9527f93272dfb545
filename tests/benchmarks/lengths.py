"""Batches of very different lengths, and a budget that the longest of them does not fit into: what an epoch costs.

    python tests/benchmarks/lengths.py --json lengths.json

Texts are the functions of Python's standard library, several to a batch, padded to the longest of these, in two ways:
as they are, when most batches are of middling length and a few are long, and sorted by length, when lengths vary much.

A fixed policy has to be chosen for the longest batch, and then costs its time in every other batch, too. Which fixed
policies get through an epoch at all is found out first, under an allocator that is made up and raises
``torch.OutOfMemoryError`` above the budget. Times are taken without it: processor time of a whole epoch, from ``fit``
on, with everything that ours does to find plans; every variant in turn in each round, medians over the rounds.
"""

from __future__ import annotations

import json
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from fits import Allocator, Batches, Lit, loader, trainer
from functions import as_they_are, functions, varied
from models import GPT, VOCABULARY, Shape, environment
from rich.console import Console
from rich.markup import escape
from rich.progress import track
from rich.table import Table
from torch import Tensor

from lightning_remat import RematStrategy

FIXED = ("selective", "every:2", "sqrt", "full")
"""Policies that are chosen once for a whole training."""
PLAIN = "none"
OURS = "auto"
DISTRIBUTIONS = {"as they are": as_they_are, "varied": varied}


@dataclass(frozen=True, kw_only=True)
class Task:
    """A model, an epoch, and the bytes that it may take at once."""

    shape: Shape
    batches: list[Tensor]
    budget: int

    def strategy(self, name: str) -> Any:
        """Of a variant."""
        return RematStrategy(policy=OURS, budget=self.budget) if name == OURS else RematStrategy(policy=name, retries=0)

    def fit(self, name: str, callbacks: list[Any], module: Lit, batches: list[Tensor] | None = None) -> None:
        """Train for an epoch."""
        trainer(self.strategy(name), callbacks, max_epochs=1).fit(module, loader(batches or self.batches))

    def module(self) -> Lit:
        """Always the same one."""
        torch.manual_seed(0)
        return Lit(GPT(self.shape))


def survived(task: Task, name: str) -> dict[str, Any]:
    """Whether a variant gets through an epoch within the budget."""
    module = task.module()
    allocator = Allocator(task.budget, weights(module))
    batches = Batches()
    failure = None
    try:
        with allocator:
            task.fit(name, [batches], module)
    except torch.OutOfMemoryError as error:
        failure = str(error)
    except Exception as error:  # whatever ends ours is a finding, and no reason to lose the others
        failure = repr(error)
    return {
        "variant": name,
        "trained": len(batches.seconds),
        "failure": failure,
        "refused": allocator.refused,
        "peak_bytes": allocator.peak,
    }


def weights(module: Lit) -> int:
    """Bytes of parameters and buffers."""
    return sum(t.untyped_storage().nbytes() for t in [*module.parameters(), *module.buffers()])


def peak(task: Task, name: str) -> int:
    """What three of the longest batches in a row take, optimizer state included."""
    module = task.module()
    allocator = Allocator(None, weights(module))
    with allocator:
        task.fit(name, [], module, [max(task.batches, key=lambda batch: batch.shape[1])] * 3)
    return allocator.peak


def timed(task: Task, names: list[str], rounds: int) -> dict[str, list[float]]:
    """Seconds of an epoch, by variant, in each round."""
    found: dict[str, list[float]] = {name: [] for name in names}
    for turn in track(range(rounds), description="rounds", transient=True):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            module = task.module()
            started = time.process_time()
            task.fit(name, [], module)
            found[name].append(time.process_time() - started)
    return found


def examine(shape: Shape, batches: list[Tensor], share: float, rounds: int) -> dict[str, Any]:
    """Set the budget, see who survives, take times."""
    task = Task(shape=shape, batches=batches, budget=0)
    most, least = peak(task, PLAIN), peak(task, "full")
    task = Task(shape=shape, batches=batches, budget=int(least + share * (most - least)))
    rows = [survived(task, name) for name in (PLAIN, *FIXED, OURS)]
    times = timed(task, [PLAIN, *FIXED, OURS], rounds)
    best = min(statistics.median(times[r["variant"]]) for r in rows if r["variant"] in FIXED and not r["failure"])
    for row in rows:
        row["seconds"] = statistics.median(times[row["variant"]])
        row["of_best"] = row["seconds"] / best
    widths = sorted(batch.shape[1] for batch in batches)
    return {
        "budget_bytes": task.budget,
        "plain_peak_bytes": most,
        "full_peak_bytes": least,
        "batches": len(batches),
        "lengths": widths,
        "rows": rows,
        "rounds": rounds,
    }


def table(name: str, found: dict[str, Any]) -> Table:
    """One row for each variant."""
    widths, mib = found["lengths"], 2**20
    out = Table(
        title=f"Lengths {name}: {found['batches']} batches, shortest {widths[0]}, median {widths[len(widths) // 2]}, "
        f"longest {widths[-1]} tokens; budget {found['budget_bytes'] / mib:.0f} MiB, the longest takes "
        f"{found['plain_peak_bytes'] / mib:.0f} MiB plainly",
        title_justify="left",
        caption=f"processor time of an epoch, medians of {found['rounds']} interleaved rounds, in terms of the fastest "
        "fixed policy that gets through",
        caption_justify="left",
    )
    for header in ("policy", "batches\ntrained", "peak,\nMiB", "refused", "seconds", "of best\nfixed", "ended by"):
        out.add_column(header, justify="left" if header in ("policy", "ended by") else "right")
    for row in found["rows"]:
        out.add_row(
            row["variant"],
            str(row["trained"]),
            f"{row['peak_bytes'] / mib:.0f}",
            str(row["refused"]),
            f"{row['seconds']:.1f}",
            f"{row['of_best']:.3f}",
            escape((row["failure"] or "")[:60]),
        )
    return out


def main(
    lengths: Annotated[list[str] | None, typer.Option(help="'as they are' or 'varied'; both by default.")] = None,
    rounds: Annotated[int, typer.Option(min=1)] = 3,
    count: Annotated[int, typer.Option(min=2, help="Batches in an epoch.")] = 60,
    share: Annotated[
        float, typer.Option(min=0, max=1, help="Of the way from full's peak to plain's: the budget.")
    ] = 0.35,
    blocks: Annotated[int, typer.Option(min=1)] = 4,
    width: Annotated[int, typer.Option(min=8, help="A multiple of 8, the number of heads.")] = 64,
    context: Annotated[int, typer.Option(min=2, help="Texts are cut to this.")] = 512,
    batch: Annotated[int, typer.Option(min=1)] = 8,
    files: Annotated[int | None, typer.Option(help="Read so many files of the library.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures here as well.")] = None,
) -> None:
    """Compare what an epoch costs."""
    chosen = lengths or list(DISTRIBUTIONS)
    if unknown := set(chosen) - set(DISTRIBUTIONS):
        known = " nor ".join(DISTRIBUTIONS)
        raise typer.BadParameter(f"{', '.join(unknown)} is neither {known}", param_hint="'--lengths'")
    torch.set_num_threads(1)
    shape = Shape(blocks=blocks, width=width, context=context, batch=batch)
    texts = functions(VOCABULARY, files)
    results = {}
    for name in chosen:
        results[name] = examine(shape, DISTRIBUTIONS[name](texts, batch, count, context), share, rounds)
        Console(width=140).print(table(name, results[name]))
    if json_file:
        json_file.write_text(json.dumps({"environment": environment(), "results": results}, indent=2) + "\n")


if __name__ == "__main__":
    typer.run(main)
