"""What a step costs: plain, torch's two ways of checkpointing, and ours, in interleaved rounds.

    python tests/benchmarks/step_time.py --threads 1 --json time.json

Two tables. The first: processor time of whole steps of a GPT, where arithmetic dominates. The second: host time per
block on a tiny model and one thread, where it is Python and dispatch that cost. Before anything is timed, the losses
and gradients of all variants are compared bit for bit.

In each round every variant takes its turn, in an order that rotates; figures are medians over the rounds. A turn is a
few steps (``--in-a-row``), of which the last counts: training runs the same code step after step, while the first step
after another variant's finds neither its code nor its data in the processor's caches. ``--in-a-row 1`` measures that.
"""

from __future__ import annotations

import json
import statistics
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from models import (
    CHECKPOINT,
    GPT,
    PASS_THROUGH,
    PLAIN,
    SELECTIVE,
    Shape,
    Stack,
    Variant,
    check_equal,
    environment,
    ours,
    ours_with_list,
    states_for,
    tokens_for,
)
from rich.console import Console
from rich.table import Table
from rounds import Seconds, interleaved


def summary(variants: list[Variant], times: dict[str, list[Seconds]], parts: int) -> list[dict[str, Any]]:
    """Medians in seconds over ``parts`` (the number of blocks, or 1), with ratios of the totals."""
    totals = {name: statistics.median(s.processor for s in steps) for name, steps in times.items()}
    return [
        {
            "variant": variant.name,
            "forward_s": statistics.median(s.forward for s in times[variant.name]) / parts,
            "backward_s": statistics.median(s.backward for s in times[variant.name]) / parts,
            "total_s": totals[variant.name] / parts,
            "of_plain": totals[variant.name] / totals[PLAIN.name],
            "peer": variant.peer,
            "of_peer": totals[variant.name] / totals[variant.peer] if variant.peer else None,
            "rounds": len(times[variant.name]),
        }
        for variant in variants
    ]


def whole_steps(shape: Shape, rounds: int, in_a_row: int) -> list[dict[str, Any]]:
    """Processor time of forward and backward of a GPT."""
    torch.manual_seed(0)
    model, batch = GPT(shape), tokens_for(shape)
    variants = [
        PLAIN,
        CHECKPOINT,
        SELECTIVE,
        ours("full", CHECKPOINT),
        ours("every:2", CHECKPOINT),
        ours("sqrt", CHECKPOINT),
        ours("selective", SELECTIVE),
        ours_with_list(SELECTIVE),
    ]
    check_equal(variants, model, batch)
    return summary(variants, interleaved(variants, model, batch, rounds, in_a_row), parts=1)


def host_time(shape: Shape, rounds: int, in_a_row: int) -> list[dict[str, Any]]:
    """Host time per block of a stack of tiny blocks, on one thread."""
    torch.manual_seed(0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        model, batch = Stack(shape), states_for(shape)
        variants = [
            PLAIN,
            PASS_THROUGH,
            CHECKPOINT,
            SELECTIVE,
            ours("full", CHECKPOINT),
            ours("selective", SELECTIVE),
            ours_with_list(SELECTIVE),
        ]
        check_equal(variants, model, batch)
        return summary(variants, interleaved(variants, model, batch, rounds, in_a_row), parts=shape.blocks)
    finally:
        torch.set_num_threads(threads)


def table(title: str, shape: Shape, rows: list[dict[str, Any]], *, unit: str, scale: float) -> Table:
    """The rows as a table, seconds shown in ``unit`` (``scale`` of them make a second)."""
    out = Table(
        title=f"{title}: {shape.blocks} blocks, d={shape.width}, T={shape.context}, B={shape.batch}, "
        f"{shape.attention} attention",
        title_justify="left",
        caption=f"processor time in {unit}, medians of {rows[0]['rounds']} interleaved rounds, dropout {shape.dropout}",
        caption_justify="left",
    )
    out.add_column("variant", no_wrap=True)
    for header in ("fwd", "bwd", "total", "of\nplain", "of torch\ncheckpoint", "of torch\nselective"):
        out.add_column(header, justify="right", no_wrap=True)
    for row in rows:
        ratios = [f"{row['of_peer']:.2f}" if row["peer"] == peer.name else "" for peer in (CHECKPOINT, SELECTIVE)]
        out.add_row(
            row["variant"],
            *(f"{row[key] * scale:,.0f}" for key in ("forward_s", "backward_s", "total_s")),
            f"{row['of_plain']:.2f}",
            *ratios,
        )
    return out


def main(
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of whole steps.")] = 11,
    tiny_rounds: Annotated[int, typer.Option(min=1, help="Rounds of the tiny model.")] = 150,
    attention: Annotated[str, typer.Option(help="fused or eager.")] = "fused",
    blocks: Annotated[int, typer.Option(min=1)] = 8,
    width: Annotated[int, typer.Option(min=8, help="A multiple of 8, the number of heads.")] = 256,
    context: Annotated[int, typer.Option(min=1)] = 256,
    batch: Annotated[int, typer.Option(min=1)] = 4,
    in_a_row: Annotated[int, typer.Option(min=1, help="Steps in a turn; the last one counts.")] = 3,
    dropout: Annotated[float, typer.Option(min=0, max=1)] = 0.1,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Threads within an op, for whole steps; torch's choice by default.")
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures here as well.")] = None,
) -> None:
    """Compare the time of steps under all variants."""
    if attention not in ("fused", "eager"):
        raise typer.BadParameter(f"{attention} is neither fused nor eager", param_hint="'--attention'")
    if threads:
        torch.set_num_threads(threads)
    console = Console()

    shape = Shape(dropout=dropout, blocks=blocks, width=width, context=context, batch=batch, attention=attention)
    step_rows = whole_steps(shape, rounds, in_a_row)
    console.print(table("Whole steps", shape, step_rows, unit="ms", scale=1e3))

    tiny = Shape(dropout=dropout, blocks=12, width=64, context=16, batch=2, attention=attention)
    tiny_rows = host_time(tiny, tiny_rounds, in_a_row)
    console.print(table("Host time a block, one thread", tiny, tiny_rows, unit="µs", scale=1e6))

    if json_file:
        results = [
            {"what": "whole steps", "shape": asdict(shape), "rows": step_rows},
            {"what": "host time per block", "shape": asdict(tiny), "rows": tiny_rows},
        ]
        json_file.write_text(json.dumps({"environment": environment(), "results": results}, indent=2) + "\n")


if __name__ == "__main__":
    typer.run(main)
