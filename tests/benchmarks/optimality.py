"""How close the planner comes to the exact optimum, on models that are small enough to be planned exactly.

    python -m tests.benchmarks.optimality --json optimality.json

For each model ten budgets, from the least peak that any plan reaches to that of keeping everything; for each the least
extra time by a mixed-integer program (tests/planning/exact.py), the planner's, and their ratio. Where the solver did
not finish, the ratio is taken to its bound, so it is never flattered. Both plans are judged by the simulator.

``--random 200`` adds random traces, odder than any model, at three budgets each.
"""

from __future__ import annotations

import json
import math
import random
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from lightning_remat.planning.plan import judged
from lightning_remat.planning.planner import plan
from lightning_remat.planning.trace import Trace
from tests.planning.exact import budgets, least_time
from tests.planning.exact_model import Model
from tests.planning.small_models import MODELS
from tests.planning.small_traces import random_trace

MiB = 2**20


@dataclass(frozen=True, slots=True)
class Row:
    """One model at one budget.

    Attributes:
        model: its name.
        ops: how many can be dropped.
        variables: of the program.
        budget: bytes.
        of_plain: the budget as a part of the peak of keeping everything.
        optimum_s: the least extra time found exactly.
        bound_s: no plan takes less; the same if the solver finished.
        planner_s: the planner's extra time; None if its plan exceeds the budget.
        ratio: planner_s to bound_s; None likewise.
        step_s: time of the forward ops, to which extra time compares.
        solver_s, planning_s: how long the two took.
        nodes: of the solver's search tree.
    """

    model: str
    ops: int
    variables: int
    budget: int
    of_plain: float
    optimum_s: float
    bound_s: float
    planner_s: float | None
    ratio: float | None
    step_s: float
    solver_s: float
    planning_s: float
    nodes: int


def compare(name: str, model: Model, budget: int, limit: float) -> Row:
    """The planner against the optimum at one budget."""
    trace = model.trace
    best = least_time(model, budget, limit)
    if best is None:
        raise RuntimeError(f"{name}: no plan fits {budget} bytes")
    start = time.perf_counter()
    chosen = plan(trace, budget).chosen
    planning = time.perf_counter() - start
    mine = judged(trace, chosen.drop)  # what the planner says of its own plan is not taken on trust
    seconds = mine.extra_seconds if mine.peak_bytes <= budget else None
    return Row(
        model=name,
        ops=model.binaries,
        variables=len(model.columns),
        budget=budget,
        of_plain=budget / plain_peak(trace),
        optimum_s=best.plan.extra_seconds,
        bound_s=best.bound,
        planner_s=seconds,
        ratio=None if seconds is None else ratio(seconds, best.bound),
        step_s=sum(op.seconds for op in trace.ops),
        solver_s=best.elapsed,
        planning_s=planning,
        nodes=best.nodes,
    )


def plain_peak(trace: Trace) -> int:
    """Peak of keeping everything."""
    return judged(trace, [False] * len(trace.ops)).peak_bytes


def ratio(seconds: float, bound: float) -> float:
    """How many times the bound; infinite if nothing would do and something is taken."""
    if seconds <= bound * (1 + 1e-9):
        return 1.0
    return seconds / bound if bound > 0 else math.inf


def table(rows: list[Row]) -> Table:
    """All rows."""
    out = Table(
        title="Extra time: the planner and the exact optimum",
        title_justify="left",
        caption="of step: optimum to the time of all forward ops; ratio: planner to optimum (to the solver's bound "
        "where marked <)",
        caption_justify="left",
    )
    out.add_column("model", no_wrap=True)
    for header in ("ops", "budget\nMiB", "of plain\npeak", "optimum\nms", "of step", "planner\nms", "ratio"):
        out.add_column(header, justify="right", no_wrap=True)
    out.add_column("solver\ns", justify="right", no_wrap=True)
    out.add_column("planner\ns", justify="right", no_wrap=True)
    before = ""
    for row in rows:
        if before not in ("", row.model):
            out.add_section()
        name, before = ("" if row.model == before else row.model), row.model
        proven = row.bound_s == row.optimum_s
        out.add_row(
            name,
            str(row.ops) if name else "",
            f"{row.budget / MiB:,.1f}",
            f"{row.of_plain:.0%}",
            f"{row.optimum_s * 1e3:.3f}",
            f"{row.optimum_s / row.step_s:.1%}",
            "over budget" if row.planner_s is None else f"{row.planner_s * 1e3:.3f}",
            "" if row.ratio is None else f"{'' if proven else '< '}{row.ratio:.4f}",
            f"{row.solver_s:.1f}",
            f"{row.planning_s:.1f}",
        )
    return out


def verdict(rows: list[Row]) -> str:
    """The worst ratio, and how many plans do not fit."""
    ratios = [row.ratio for row in rows if row.ratio is not None]
    worst = max(ratios, default=math.nan)
    close = sum(r <= 1.02 for r in ratios)
    over = len(rows) - len(ratios)
    text = f"worst ratio {worst:.4f}; within 2 % of the optimum: {close} of {len(rows)}"
    return f"{text}; over budget: {over}" if over else text


def main(
    model: Annotated[list[str] | None, typer.Option(help="Only these models.")] = None,
    count: Annotated[int, typer.Option("--budgets", min=1, help="Budgets for each model.")] = 10,
    limit: Annotated[float, typer.Option(min=1, help="Seconds for one exact solution.")] = 120,
    randoms: Annotated[int, typer.Option("--random", min=0, help="Random traces as well.")] = 0,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures here as well.")] = None,
) -> None:
    """Compare the planner with the exact optimum."""
    if unknown := set(model or ()) - set(MODELS):
        raise typer.BadParameter(f"{sorted(unknown)} not among {sorted(MODELS)}", param_hint="'--model'")
    console = Console()
    rows = []
    for name in model or MODELS:
        exact = Model(MODELS[name]())
        for budget in track(budgets(exact, count), description=name, transient=True):
            rows.append(compare(name, exact, budget, limit))
    console.print(table(rows))
    console.print(verdict(rows))

    odd = []
    for seed in track(range(randoms), description="random", transient=True):
        exact = Model(random_trace(random.Random(seed), 20))
        odd += [compare(f"random {seed}", exact, budget, limit) for budget in sorted(set(budgets(exact, 3)))]
    if odd:
        console.print(f"{randoms} random traces: {verdict(odd)}")

    if json_file:
        result = {"rows": [asdict(row) for row in rows], "random": [asdict(row) for row in odd]}
        json_file.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    typer.run(main)
