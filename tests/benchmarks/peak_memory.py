"""Peak memory of one step, from allocation events: plain, torch's two ways of checkpointing, and ours.

    python tests/benchmarks/peak_memory.py --json peak.json

One run, one model, one batch, one process. Losses and gradients are compared bit for bit first. The peak is what
forward and backward allocate on top of weights and batch; gradients are part of it.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from models import (
    CHECKPOINT,
    GPT,
    PLAIN,
    SELECTIVE,
    Shape,
    Variant,
    check_equal,
    environment,
    ours,
    ours_with_list,
    tokens_for,
)
from rich.console import Console
from rich.table import Table

from lightning_remat.runtime.memory import measure_peak


def variants() -> list[Variant]:
    """Fresh engines each time: an engine belongs to one model."""
    return [
        PLAIN,
        CHECKPOINT,
        SELECTIVE,
        ours("full", CHECKPOINT),
        ours("every:2", CHECKPOINT),
        ours("sqrt", CHECKPOINT),
        ours("selective", SELECTIVE),
        ours_with_list(SELECTIVE),
        ours_with_list(SELECTIVE, borders=False),
    ]


def peaks(shape: Shape) -> list[dict[str, Any]]:
    """Measure all variants on one model; one row for each."""
    torch.manual_seed(0)
    model, batch = GPT(shape), tokens_for(shape)
    chosen = variants()
    # This is also each engine's first step, which may be recorded in more detail than later ones.
    check_equal(chosen, model, batch)
    found: dict[str, int] = {}
    rows = []
    for variant in chosen:

        def step(variant: Variant = variant) -> None:
            variant.step(model, batch)
            model.zero_grad()

        found[variant.name] = measure_peak(step).peak_bytes
        rows.append(
            {
                "variant": variant.name,
                "peak_bytes": found[variant.name],
                "of_plain": found[variant.name] / found[PLAIN.name],
                "peer": variant.peer,
                "of_peer": found[variant.name] / found[variant.peer] if variant.peer else None,
            }
        )
    return rows


def table(shape: Shape, rows: list[dict[str, Any]]) -> Table:
    """The rows as a table."""
    out = Table(
        title=f"Peak memory of a step: {shape.blocks} blocks, d={shape.width}, T={shape.context}, B={shape.batch}, "
        f"{shape.attention} attention",
        title_justify="left",
    )
    out.add_column("variant", no_wrap=True)
    for header in ("peak,\nbytes", "of\nplain", "of torch\ncheckpoint", "of torch\nselective"):
        out.add_column(header, justify="right", no_wrap=True)
    for row in rows:
        ratios = [f"{row['of_peer']:.3f}" if row["peer"] == peer.name else "" for peer in (CHECKPOINT, SELECTIVE)]
        out.add_row(row["variant"], f"{row['peak_bytes']:,}", f"{row['of_plain']:.3f}", *ratios)
    return out


def main(
    attention: Annotated[list[str], typer.Option(help="fused or eager; may be given twice.")] = ["fused", "eager"],  # noqa: B006 - typer copies it
    blocks: Annotated[int, typer.Option(min=1)] = 8,
    width: Annotated[int, typer.Option(min=8, help="A multiple of 8, the number of heads.")] = 512,
    context: Annotated[int, typer.Option(min=1)] = 512,
    batch: Annotated[int, typer.Option(min=1)] = 4,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads within an op; torch's choice by default.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures here as well.")] = None,
) -> None:
    """Compare peak memory under all variants."""
    if unknown := set(attention) - {"fused", "eager"}:
        raise typer.BadParameter(f"{', '.join(unknown)}: neither fused nor eager", param_hint="'--attention'")
    if threads:
        torch.set_num_threads(threads)
    results = []
    for kind in attention:
        shape = Shape(blocks=blocks, width=width, context=context, batch=batch, attention=kind)
        rows = peaks(shape)
        Console().print(table(shape, rows))
        results.append({"shape": asdict(shape), "rows": rows})
    if json_file:
        json_file.write_text(json.dumps({"environment": environment(), "results": results}, indent=2) + "\n")


if __name__ == "__main__":
    typer.run(main)
