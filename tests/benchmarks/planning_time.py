"""How long planning takes, and how large a trace is.

    python tests/benchmarks/planning_time.py --blocks 36 --blocks 340 --json planning.json

Traces are real: one step of a narrow GPT with that many blocks, eager attention and dropout, about 29 ops a block. Each
budget is planned by a planner of its own, so that nothing is known beforehand. Process CPU time.
"""

from __future__ import annotations

import json
import statistics
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from models import GPT, Shape, environment, tokens_for
from rich.console import Console
from rich.table import Table

from lightning_remat import Remat
from lightning_remat.errors import BudgetError
from lightning_remat.planning.planner import Planner
from lightning_remat.planning.simulation import simulate
from lightning_remat.planning.trace import Trace

SHARES = (0.75, 0.5, 0.3)  # of the plain step's peak


def traced(blocks: int) -> Trace:
    """One real step of a GPT with so many blocks."""
    shape = Shape(blocks=blocks, width=32, context=32, batch=2, attention="eager")
    torch.manual_seed(0)
    model, batch = GPT(shape), tokens_for(shape)
    remat = Remat(policy="auto", budget="100%")
    for _ in range(2):
        with remat:
            loss = model(batch)
        loss.backward()
        model.zero_grad()
    assert remat.plan is not None
    return remat.plan.trace


def seconds_of(job: Any) -> float:
    """Process CPU time of one call."""
    start = time.process_time()
    job()
    return time.process_time() - start


def planning(trace: Trace, budget: int) -> float | None:
    """Seconds that a plan takes; None where nothing fits (tiny models, by the states of their generators)."""
    try:
        return seconds_of(lambda: Planner(trace).result(budget))
    except BudgetError:
        return None


def measure(blocks: int) -> dict[str, Any]:
    """One row of the table."""
    trace = traced(blocks)
    plain = simulate(trace, [False] * len(trace.ops)).peak
    whole = Planner(trace)
    return {
        "blocks": blocks,
        "records": len(trace.ops),
        "events": len(trace.events),
        "trace_bytes": len(trace.to_json()),
        "simulation_seconds": statistics.median(
            seconds_of(lambda: simulate(trace, [True] * len(trace.ops))) for _ in range(5)
        ),
        "planning_seconds": {share: planning(trace, int(share * plain)) for share in SHARES},
        "front_seconds": seconds_of(whole.front),
    }


def table(rows: list[dict[str, Any]]) -> Table:
    """All rows, in seconds and KiB."""
    found = Table(title="Planning: process CPU seconds", title_justify="left")
    for name in ("records", "events", "trace, KiB", "one simulation", *(f"plan at {s:.0%}" for s in SHARES), "front"):
        found.add_column(name, justify="right")
    for row in rows:
        found.add_row(
            f"{row['records']:,}",
            f"{row['events']:,}",
            f"{row['trace_bytes'] / 1024:,.0f}",
            f"{row['simulation_seconds']:.4f}",
            *("nothing fits" if s is None else f"{s:.2f}" for s in row["planning_seconds"].values()),
            f"{row['front_seconds']:.2f}",
        )
    return found


def main(
    blocks: Annotated[list[int] | None, typer.Option(help="Blocks of the model; may be given again.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures here as well.")] = None,
) -> None:
    """See the text at the top of the file."""
    torch.set_num_threads(1)
    rows = [measure(count) for count in blocks or (36, 340)]
    Console().print(table(rows))
    Console().print(environment())
    if json_file is not None:
        json_file.write_text(json.dumps({"environment": environment(), "rows": rows}, indent=2))


if __name__ == "__main__":
    typer.run(main)
