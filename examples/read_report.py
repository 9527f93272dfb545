"""The report of a plan, to read line by line: first the table of a first step, then a plan and all that is said of it.

python examples/read_report.py [--json FILE] [--save FOLDER]
"""

import argparse
import json
from pathlib import Path

import torch
from byte_gpt import ByteGPT, stdlib_batches

from lightning_remat import Remat

STEPS = 8  # the first is traced, the second planned, a later one measured
MIB = 2**20


def train(remat: Remat, steps: int) -> None:
    """Train a small GPT from a fixed seed."""
    torch.manual_seed(0)
    model = ByteGPT(blocks=6, width=128, heads=4, context=128)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batches = iter(stdlib_batches(context=128, batch=4))
    for _ in range(steps):
        with remat:
            loss = model.loss(next(batches))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def figures(remat: Remat) -> dict[str, float]:
    """What the report says, in bytes and seconds, without rounding."""
    facts = remat.report().facts  # the report is a PlanReport: there is a budget, and a plan was made
    named = {f"{name.replace(' ', '_')}_bytes": size for name, size in facts.static_parts}
    return {
        **named,
        "budget_bytes": facts.budget_bytes,
        "left_bytes": facts.budget_bytes - facts.predicted_peak_bytes,
        "static_bytes": facts.static_bytes,
        "predicted_peak_bytes": facts.predicted_peak_bytes,
        "measured_peak_bytes": facts.measured_peak_bytes,
        "plain_peak_bytes": facts.plain_peak_bytes,
        "smallest_peak_bytes": facts.smallest_peak_bytes,
        "predicted_extra_seconds": facts.predicted_extra_seconds,
        "measured_extra_seconds": facts.measured_extra_seconds,
        "smallest_extra_seconds": facts.smallest_extra_seconds,
        "kept_bytes": facts.kept_bytes,
        "recomputed_bytes": facts.recomputed_bytes,
        "ops": len(remat.plan.trace.ops),
        "ops_run_again": sum(remat.plan.chosen.drop),
        "paid_seconds_per_mib": facts.paid_price * MIB,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write the report's figures there")
    parser.add_argument("--save", type=Path, help="write report.html, .svg, .json and .txt into this folder")
    options = parser.parse_args()

    print("== Without a plan")
    # --8<-- [start:without-a-plan]
    fixed = Remat(policy="selective")
    train(fixed, steps=1)
    print(fixed.report())
    # --8<-- [end:without-a-plan]

    print("== The plan")
    # --8<-- [start:with-a-plan]
    remat = Remat(budget="32MiB")
    train(remat, steps=STEPS)
    print(remat.report())
    # --8<-- [end:with-a-plan]

    if options.save is not None:
        # --8<-- [start:save]
        report = remat.report()
        report.save(options.save / "report.html")  # a page in one file: tables and plots
        report.save(options.save / "report.svg")  # the plots; .png as well
        report.save(options.save / "report.json")  # bytes and seconds, without rounding
        report.save(options.save / "report.txt")  # what print shows
        # --8<-- [end:save]
    if options.json is not None:
        options.json.write_text(json.dumps(figures(remat), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
