"""Peak memory of each rank under every base: by itself, and under policies; two processes on the CPU, or four.

    python -m tests.benchmarks.ranks --json ranks.json

A step is counted in allocation events, from the beginning of a batch to the end of its backward, above what is there
between steps. What ``auto`` predicts stands beside what was counted in the same step. Losses and gradients are compared
bit for bit. Gloo's threads are kept out of the count, see ``tests/helpers/quiet.py``; with ``--loud`` they are not.
"""

from __future__ import annotations

import json
import logging
import tempfile
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import distributed

from tests.helpers.bases import BASES, Net, Peak, engine, run
from tests.helpers.quiet import quiet_collectives
from tests.helpers.ranks import peaks_of, together

COUNTS = {"ddp": 2, "fsdp1": 2, "fsdp2": 2, "tensor parallel": 2, "tensor parallel and fsdp2": 4}
NAMED: dict[str, dict[str, Any]] = {"full": {"policy": "full"}, "selective": {"policy": "selective"}}
SHARE = 0.4  # of the way from what the leanest plan takes to what the base takes by itself


def rows(batch: int, rank: int) -> int:
    """Of a batch; more on each further rank."""
    return 128 + 64 * rank


def measure(name: str, loud: bool) -> dict[str, Any]:
    """Everything on one rank under one base."""
    torch.set_num_threads(1)
    base = BASES[name]

    def training(remat: dict[str, Any] | None) -> tuple[Any, int]:
        peak = Peak()
        result = run(base, remat, net=partial(Net, 64, 6), rows=rows, callbacks=lambda: [peak])
        return result, max(peak.bytes)

    with nullcontext() if loud else quiet_collectives():
        plain, counted = training(None)
        found: dict[str, Any] = {"plain": counted, "different": []}
        for policy, options in NAMED.items():
            ours, found[policy] = training(options)
            found["different"] += ours.difference(plain)
        smallest, _ = training({"budget": 1})
        (kind,) = peaks_of(engine(smallest))
        budget = round(kind["predicted"] + SHARE * (kind["plain"] - kind["predicted"]))
        ours, _ = training({"budget": budget})
        found["different"] += smallest.difference(plain) + ours.difference(plain)
        for label, result in (("smallest", smallest), ("budget", ours)):
            (kind,) = peaks_of(engine(result))
            found[label] = {key: kind[key] - kind["static"] for key in ("predicted", "measured")}
        found["allowed"] = budget - kind["static"]
    distributed.destroy_process_group()
    return found


def table(found: dict[str, list[dict[str, Any]]]) -> Table:
    """A row for each rank."""
    shown = Table(title="KiB of a step above what is there between steps; auto: predicted, measured")
    for column in ("base", "rank", "plain", "full", "selective", "auto, smallest", "allowed", "auto, budget", "bits"):
        shown.add_column(column, justify="left" if column == "base" else "right")

    def kib(value: Any) -> str:
        return ", ".join(kib(v) for v in value.values()) if isinstance(value, dict) else f"{value / 1024:.1f}"

    for base, ranks in found.items():
        for number, row in enumerate(ranks):
            cells = [kib(row[key]) for key in ("plain", "full", "selective", "smallest", "allowed", "budget")]
            shown.add_row(base if not number else "", str(number), *cells, "differ" if row["different"] else "same")
    return shown


def main(
    only: Annotated[list[str] | None, typer.Option("--base", help="one of the bases; may be repeated")] = None,
    loud: Annotated[bool, typer.Option(help="count what gloo's threads hold, as far as the profiler sees it")] = False,
    json_file: Annotated[Path | None, typer.Option("--json")] = None,
) -> None:
    """Measure, print, and end with an error if a bit differs."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    found: dict[str, list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in only or COUNTS:
            count = COUNTS[name]
            ranks = together(Path(folder) / name, count, partial(measure, name, loud), 300)
            for rank in ranks:
                if "plain" not in rank:
                    raise RuntimeError(f"{name}: {rank.get('error', rank)}")
            found[name] = ranks
    Console(width=140).print(table(found))
    if json_file is not None:
        json_file.write_text(json.dumps(found, indent=2))
    if any(rank["different"] for ranks in found.values() for rank in ranks):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
