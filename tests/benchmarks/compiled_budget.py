"""Compiled blocks under byte budgets: which activation budget is chosen, what that takes, and whether results stay.

    python tests/benchmarks/compiled_budget.py --blocks 3 --json compiled_budget.json

The same training (same seeds) is run compiled without remat, which is what all others are compared with, and under
budgets that are shares of its peak. Peaks are counted from allocation events, after the search has ended. Times are
processor times of a step, medians over the last steps; compilations are Dynamo's graphs. It takes a C++ compiler, and
minutes: nearly all of that is compiling.
"""

from __future__ import annotations

import json
import statistics
import time
import warnings
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.nn.functional as F
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch._dynamo.utils import counters

from lightning_remat import Remat
from lightning_remat.runtime.memory import measure_peak
from lightning_remat.sizes import format_bytes


class Block(nn.Module):
    """A block of a GPT, attention op by op, with dropout."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.heads, self.dropout = heads, dropout

    def forward(self, x: Tensor) -> Tensor:
        """``(B, T, width)`` to the same."""
        b, t, d = x.shape
        q, k, v = self.qkv(self.norm_1(x)).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        weights = ((q @ k.transpose(-1, -2)) / (d // self.heads) ** 0.5).softmax(-1)
        h = F.dropout(weights, self.dropout, True) @ v
        x = x + F.dropout(self.out(h.transpose(1, 2).reshape(b, t, d)), self.dropout, True)
        return x + F.dropout(self.down(F.gelu(self.up(self.norm_2(x)))), self.dropout, True)


class Model(nn.Module):
    """Blocks in a row. (The forward of PyTorch's own Sequential is left alone by the compiler, which goes inside.)"""

    def __init__(self, blocks: int, width: int, dropout: float) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width, 4, dropout) for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        """``(B, T, width)`` to the same."""
        for block in self.blocks:
            x = block(x)
        return x


def train(remat: Remat | None, sizes: dict[str, Any]) -> dict[str, Any]:
    """One training; its figures, and everything that has to be the same."""
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    width, steps = sizes["width"], sizes["steps"]
    net = Model(sizes["blocks"], width, sizes["dropout"])
    if sizes["whole"]:
        net.compile()
    else:
        for block in net.blocks:
            block.compile()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    x = torch.randn(sizes["batch"], sizes["length"], width)
    results: list[Tensor] = []
    seconds: list[float] = []

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=sizes["bf16"]):
            if remat is None:
                loss = net(x).square().mean()
            else:
                with remat:
                    loss = net(x).square().mean()
        loss.backward()
        results.append(loss.detach())

    if remat is not None:
        remat.bind(net)
    peak = 0
    for i in range(steps):
        begin = time.process_time()
        if i == steps - 1:
            peak = measure_peak(step).peak_bytes
        else:
            step()
            seconds.append(time.process_time() - begin)
        results.extend(p.grad.clone() for p in net.parameters() if p.grad is not None)
        optimizer.step()
        optimizer.zero_grad()
    results.extend(p.detach().clone() for p in net.parameters())
    results.append(torch.get_rng_state())
    if remat is not None:
        remat.close()
    static = sum(p.nbytes for p in net.parameters())
    return {
        "losses": [r.item() for r in results if r.ndim == 0],
        "results": results,
        "peak_bytes": static + peak,
        "step_seconds": statistics.median(seconds[-5:]),
        "compilations": int(counters["stats"]["unique_graphs"]),
        "activation_budget": None if remat is None else remat.counters.activation_budget,
        "notes": [] if remat is None else remat.counters.notes,
    }


def main(
    blocks: Annotated[int, typer.Option(help="Blocks of the model.")] = 3,
    width: Annotated[int, typer.Option(help="Its width.")] = 64,
    length: Annotated[int, typer.Option(help="Tokens of a sample.")] = 128,
    batch: Annotated[int, typer.Option(help="Samples.")] = 4,
    dropout: Annotated[float, typer.Option(help="Share that is dropped.")] = 0.1,
    steps: Annotated[int, typer.Option(help="Steps of each training; the search takes up to 20.")] = 26,
    shares: Annotated[str, typer.Option(help="Budgets, as shares of the plain peak.")] = "1.1,0.9,0.8,0.7,0.6",
    whole: Annotated[bool, typer.Option(help="Compile the model as a whole, not block by block.")] = False,
    bf16: Annotated[bool, typer.Option(help="Under autocast to bfloat16.")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write figures here.")] = None,
) -> None:
    """Print the table."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")  # the compiler's; that a budget is not feasible is seen in the table
    sizes = {
        "blocks": blocks, "width": width, "length": length, "batch": batch, "dropout": dropout, "steps": steps,
        "whole": whole, "bf16": bf16,
    }  # fmt: skip
    plain = train(None, sizes)
    rows = [{"budget_bytes": None, **plain}]
    for share in map(float, shares.split(",")):
        budget = int(share * plain["peak_bytes"])
        rows.append({"budget_bytes": budget, **train(Remat(budget=budget, compiled="budget"), sizes)})
    table = Table(title=f"compiled {'as a whole' if whole else 'block by block'}, {sizes}")
    heads = ("budget", "activation budget", "measured peak", "of plain", "step ms", "compilations", "same bits")
    for head in (*heads, "losses differ"):
        table.add_column(head, justify="right")
    for row in rows:
        found = row.pop("results")
        row["same"] = all(torch.equal(a, b) for a, b in zip(plain.get("results", found), found, strict=True))
        pairs = zip(plain["losses"], row["losses"], strict=True)
        row["losses_differ"] = max(abs(a - b) / abs(a) for a, b in pairs)
        table.add_row(
            "compiled, without remat" if row["budget_bytes"] is None else format_bytes(row["budget_bytes"]),
            "" if row["activation_budget"] is None else f"{row['activation_budget']:g}",
            format_bytes(row["peak_bytes"]),
            f"{row['peak_bytes'] / plain['peak_bytes']:.2f}",
            f"{row['step_seconds'] * 1e3:.1f}",
            str(row["compilations"]),
            "yes" if row["same"] else "no",
            f"{row['losses_differ']:.1e}" if row["losses_differ"] else "nowhere",
        )
    Console(width=140).print(table)
    if json_file is not None:
        json_file.write_text(json.dumps({"sizes": sizes, "rows": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
