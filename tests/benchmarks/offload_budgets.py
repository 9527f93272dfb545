"""What a place to move to is worth: extra time at ten budgets, without one and with places of several speeds.

    python -m tests.benchmarks.offload_budgets --model gpt2 --json offload.json

Steps are those of `tests/benchmarks/budgets.py`, one traced each; everything else is said by the simulator, nothing
moves. A speed is in plain peaks per forward pass: at 1, the place takes as much as the whole plain peak while forward
runs, and gives it back as fast. In each cell: extra time as a part of the step, and the part of it that is waiting
where there is any. Planning time is process CPU time of planners that know nothing beforehand.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from lightning_remat import Remat
from lightning_remat.errors import BudgetError
from lightning_remat.planning.planner import Planner
from lightning_remat.planning.trace import Trace
from lightning_remat.planning.transfer import Transfer
from tests.helpers.plans import BUDGET, Run, trace_of
from tests.helpers.zoo import CASES

SHARES = tuple(round(0.95 - 0.08 * i, 2) for i in range(10))  # of the plain step's peak
IN_FLIGHT = 2  # of the largest contents, in each direction, or less where the planner finds that better


@dataclass(frozen=True, kw_only=True)
class Row:
    """A plan.

    Attributes:
        model: of which step.
        share: budget, of the plain step's peak.
        speed: of the place, in plain peaks per forward pass; None: there is none.
        extra_seconds, waited_seconds: by the simulator; None: no plan fits.
        step_seconds: of the plain step.
        moved_share: bytes that leave, of the plain step's peak.
        dropped, moved: ops.
        planning_seconds: what finding it took.
    """

    model: str
    share: float
    speed: float | None
    extra_seconds: float | None
    waited_seconds: float
    step_seconds: float
    moved_share: float
    dropped: int
    moved: int
    planning_seconds: float


def traced(name: str, tiny: bool) -> Trace:
    """One real step."""
    torch.manual_seed(0)
    model, batch = CASES[name].make(tiny=tiny)
    remat = Remat(policy="auto", budget=BUDGET)
    run = Run(model, batch, remat)
    for seed in (1, 2):
        run.step(seed)
    return trace_of(remat)


def halves(trace: Trace) -> tuple[float, float]:
    """Seconds of forward and backward, as the simulator takes them."""
    ops = sum(op.seconds for op in trace.ops)
    return trace.forward_seconds or ops, trace.backward_seconds or 2 * ops


def place(trace: Trace, plain: int, speed: float) -> Transfer:
    """A place of so many plain peaks per forward pass."""
    pace = speed * plain / halves(trace)[0]
    aside = IN_FLIGHT * max(trace.nbytes)
    return Transfer(
        out_bytes_per_second=pace,
        in_bytes_per_second=pace,
        min_bytes=4096,
        window_bytes=aside,
        ahead_bytes=aside,
        adjustable=True,
    )


def measure(name: str, trace: Trace, share: float, speed: float | None) -> Row:
    """One plan."""
    plain = Planner(trace).plain.peak_bytes if speed is not None else 0
    start = time.process_time()
    planner = Planner(trace, None if speed is None else place(trace, plain, speed))
    try:
        chosen = planner.result(int(share * planner.plain.peak_bytes)).chosen
    except BudgetError:
        chosen = None
    return Row(
        model=name,
        share=share,
        speed=speed,
        extra_seconds=chosen.extra_seconds if chosen else None,
        waited_seconds=chosen.waited_seconds if chosen else 0.0,
        step_seconds=sum(halves(trace)),
        moved_share=chosen.moved_bytes / planner.plain.peak_bytes if chosen else 0.0,
        dropped=sum(chosen.drop) if chosen else 0,
        moved=sum(chosen.move) if chosen else 0,
        planning_seconds=time.process_time() - start,
    )


def table(rows: list[Row], speeds: list[float]) -> Table:
    """All models and budgets."""
    out = Table(title="Extra time, of the plain step (of it waiting)", title_justify="left")
    for header in ("model", "budget", "no place", *(f"speed {speed:g}" for speed in speeds)):
        out.add_column(header, justify="left" if header == "model" else "right", no_wrap=True)
    cells = {(row.model, row.share, row.speed): row for row in rows}
    before = ""
    for model, share in dict.fromkeys((row.model, row.share) for row in rows):
        if before not in ("", model):
            out.add_section()
        texts = [text(cells[model, share, speed]) for speed in (None, *speeds)]
        out.add_row("" if model == before else model, f"{share:.0%}", *texts)
        before = model
    return out


def text(row: Row) -> str:
    """One cell."""
    if row.extra_seconds is None:
        return "nothing fits"
    extra = f"{row.extra_seconds / row.step_seconds:.1%}"
    return f"{extra} ({row.waited_seconds / row.step_seconds:.1%})" if row.waited_seconds else extra


def times(rows: list[Row]) -> str:
    """How long planning took, with and without, where both found something."""
    both: dict[bool, float] = {False: 0.0, True: 0.0}
    count = {False: 0, True: 0}
    for row in rows:
        both[row.speed is not None] += row.planning_seconds
        count[row.speed is not None] += 1
    without, given = (both[key] / max(1, count[key]) for key in (False, True))
    return f"planning, on average: {without:.2f} s without a place, {given:.2f} s with one"


def main(
    model: Annotated[list[str], typer.Option(help="May be given several times.")] = list(CASES),  # noqa: B006 - typer copies it
    share: Annotated[list[float], typer.Option(help="Of the plain step's peak; several.")] = list(SHARES),  # noqa: B006 - the same
    speed: Annotated[list[float], typer.Option(help="Plain peaks per forward pass; several.")] = [0.1, 0.5, 2.0],  # noqa: B006 - the same
    tiny: Annotated[bool, typer.Option(help="The sizes that tests use.")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures here as well.")] = None,
) -> None:
    """Plan every model for every budget."""
    torch.set_num_threads(1)
    console = Console()
    rows = []
    for name in model:
        trace = traced(name, tiny)
        for part in track(share, description=name, transient=True, disable=not console.is_terminal):
            rows += [measure(name, trace, part, each) for each in (None, *speed)]
    console.print(table(rows, speed))
    console.print(times(rows))
    if json_file:
        json_file.write_text(json.dumps({"rows": [asdict(row) for row in rows]}, indent=2) + "\n")


if __name__ == "__main__":
    typer.run(main)
