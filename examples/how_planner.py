"""Ask the planner and its simulator by hand: a traced step, plans for several budgets, and a plan of your own.

python examples/how_planner.py [--json FILE]
"""

import argparse
import json
from pathlib import Path

import torch
from byte_gpt import ByteGPT

from lightning_remat import Remat
from lightning_remat.planning.planner import Planner
from lightning_remat.planning.simulation import simulate
from lightning_remat.planning.trace import Trace

SHARES = (1.0, 0.7, 0.5, 0.35)  # budgets, of what the plain step takes


def traced() -> Trace:
    """A step of a small GPT, as the engine has traced it."""
    torch.manual_seed(0)
    model = ByteGPT(blocks=4, width=128, heads=4, context=128)
    remat = Remat(policy="auto", budget="1GiB")  # far more than enough: only the trace is of interest here
    for _ in range(2):  # the first step is traced, and planned for when the second begins
        with remat:
            loss = model.loss(torch.randint(0, 256, (4, 129)))
        loss.backward()
        model.zero_grad()
    assert remat.plan is not None
    return remat.plan.trace


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    # --8<-- [start:ask]
    trace = traced()
    planner = Planner(trace)
    plain = planner.plain.peak_bytes
    print(f"{len(trace.ops)} ops, {len(trace.events)} events; plain peak {plain / 2**20:.1f} MiB")

    def show(name: str, peak: int, again: int, seconds: float) -> None:
        print(f"{name:20} peak {peak / plain:6.1%}, {again:3} ops again, {1e3 * seconds:6.2f} ms more")

    for share in SHARES:
        plan = planner.within(int(share * plain))  # bytes above what always lies there
        show(f"budget {share:.0%}", plan.peak_bytes, sum(plan.drop), plan.extra_seconds)

    drop = [op.droppable and op.name == "aten.gelu.default" for op in trace.ops]  # a plan by hand
    mine = simulate(trace, drop)
    show("GELU only", mine.peak, len(mine.replayed), mine.extra_seconds)
    plan = planner.within(mine.peak)
    show("budget: that peak", plan.peak_bytes, sum(plan.drop), plan.extra_seconds)
    # --8<-- [end:ask]

    if options.json is not None:
        figures = {
            "ops": len(trace.ops),
            "events": len(trace.events),
            "plain_peak_bytes": plain,
            "gelu_peak_bytes": mine.peak,
            "gelu_again": len(mine.replayed),
            "smallest_peak_bytes": planner.smallest().peak_bytes,
        }
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
