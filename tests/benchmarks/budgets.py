"""Whether a budget is kept, what that costs, and how far the prediction is off: six kinds of model, four budgets each.

    python -m tests.benchmarks.budgets --json budgets.json

For every model and budget a fresh engine runs as it would in training: a traced step, an optimizer step, a planned
step, and a few more. The planned step is held against the plain one, loss, gradients, buffers and random state bit for
bit, and its measured peak against the prediction and the budget. A budget is what is there between steps (weights and
optimizer state) and a share of what the plain step takes above that; peaks in the tables are above that, too.

``--random 20`` also runs random plans, for which nobody has chosen what is easy to foresee. The exit status says
whether anything differed by a bit, exceeded its budget, or was further from its prediction than ``--tolerance``.
"""

from __future__ import annotations

import copy
import json
import random
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from time import process_time
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from lightning_remat import Remat
from lightning_remat.planning.fake.step import fake_trace
from lightning_remat.planning.simulation import simulate
from tests.helpers.plans import Expected, Run, differences, measured_peak, random_plan, trace_of
from tests.helpers.zoo import CASES, loss_of

FIRST, SECOND, LATER = 1, 2, (3, 4, 5)
"""Seeds of the steps of a run."""

QUIET = not Console().is_terminal


@dataclass(frozen=True, kw_only=True)
class Row:
    """A model under a budget; peaks above what is there between steps."""

    model: str
    share: float
    plain_bytes: int
    static_bytes: int
    feasible: bool
    predicted_bytes: int
    measured_bytes: int
    differing: list[str]
    predicted_seconds: float
    replay_seconds: float
    step_ratio: float
    second_step_ratio: float

    @property
    def budget_bytes(self) -> int:
        return int(self.share * self.plain_bytes)

    @property
    def ratio(self) -> float:
        return self.measured_bytes / self.predicted_bytes

    @property
    def within(self) -> bool:
        return self.measured_bytes <= self.budget_bytes


@dataclass(frozen=True, kw_only=True)
class Smallest:
    """The smallest peak that a plan gives, and that of policy "full"; and what fake tensors say of the plain step."""

    model: str
    plain_bytes: int
    estimated_plain_bytes: int
    predicted_bytes: int
    measured_bytes: int
    full_bytes: int
    differing: list[str]


@dataclass(frozen=True, kw_only=True)
class Random:
    """Random plans: measured over simulated peak, and what differed."""

    model: str
    plans: int
    lowest: float
    highest: float
    differing: list[str]


_ESTIMATE = 0.05  # how far an estimate from fake tensors may be off, for a step that is mostly activations:
_LARGE = 30e6  # bytes; in tiny steps the workspaces of kernels are what counts


class Study:
    """All runs of one model.

    Args:
        name: which.
        tiny: at the size for tests.
    """

    def __init__(self, name: str, tiny: bool) -> None:
        self.name = name
        self.model, self.batch = CASES[name].make(tiny=tiny)
        plain = self._run(None)
        plain.step(FIRST)
        self.static = plain.static_bytes()
        self.plain_bytes = plain.measured(SECOND)
        self.left = plain.left()
        plain.finish()
        self.plain_seconds = [plain.step(seed) for seed in LATER]

    def _run(self, remat: Remat | None) -> Run:
        return Run(copy.deepcopy(self.model), self.batch, remat)

    def budget(self, share: float) -> tuple[Row, Run]:
        """One row, and the run with its engine."""
        remat = Remat(policy="auto", budget=self.static + int(share * self.plain_bytes))
        run = self._run(remat)
        run.step(FIRST)
        torch.manual_seed(SECOND)
        start = process_time()
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            run.forward_backward()
        second = process_time() - start
        wrong = differences(self.left, run.left())
        plan = remat.plan
        run.finish()
        seconds = [run.step(seed) for seed in LATER]
        if plan is None or plan.static_bytes != self.static:
            raise SystemExit(f"{self.name}: there is no plan, or static memory is not what was expected")
        row = Row(
            model=self.name,
            share=share,
            plain_bytes=self.plain_bytes,
            static_bytes=self.static,
            feasible=not any("not feasible" in str(w.message) for w in said),
            predicted_bytes=plan.chosen.peak_bytes,
            measured_bytes=measured_peak(remat),
            differing=wrong,
            predicted_seconds=plan.chosen.extra_seconds,
            replay_seconds=remat.stats.replay_seconds,
            step_ratio=min(seconds) / min(self.plain_seconds),
            second_step_ratio=second / min(self.plain_seconds),
        )
        return row, run

    def expected(self, run: Run) -> Expected:
        """A plain step from where a run has got to."""
        return Expected.of(Run(copy.deepcopy(run.model), self.batch), SECOND)

    def smallest(self, run: Run) -> Smallest:
        """The leanest plan of an engine, and the policy that keeps block inputs only."""
        plan = run.remat.plan if run.remat else None
        assert plan is not None
        measured, wrong = self.expected(run).under(run, plan.smallest.drop)
        full = self._run(Remat(policy="full"))
        full.step(FIRST)
        return Smallest(
            model=self.name,
            plain_bytes=self.plain_bytes,
            estimated_plain_bytes=self.estimate(),
            predicted_bytes=plan.smallest.peak_bytes,
            measured_bytes=measured,
            full_bytes=full.measured(SECOND),
            differing=wrong,
        )

    def estimate(self) -> int:
        """The plain step's peak, without running it."""
        trace = fake_trace(loss_of, copy.deepcopy(self.model), self.batch)
        return simulate(trace, [False] * len(trace.ops)).peak

    def random(self, run: Run, count: int) -> Random:
        """Plans that nobody chose."""
        trace, expected, generator = trace_of(run.remat), self.expected(run), random.Random(7)
        ratios, wrong = [], set()
        for _ in track(range(count), description=f"{self.name}: random plans", transient=True, disable=QUIET):
            drop = random_plan(trace, generator)
            measured, differing = expected.under(run, drop)
            ratios.append(measured / simulate(trace, drop).peak)
            wrong |= set(differing)
        return Random(model=self.name, plans=count, lowest=min(ratios), highest=max(ratios), differing=sorted(wrong))


def budget_table(rows: list[Row]) -> Table:
    """All models under all budgets."""
    out = _table(
        "Budgets: static memory and a share of what the plain step takes above it; peaks are above static memory",
        [
            *("model", "budget", "fits", "budget,\nMiB", "predicted,\nMiB", "measured,\nMiB", "measured /\npredicted"),
            *("within", "exact", "extra,\npredicted ms", "replay,\nms", "step /\nplain", "planning step /\nplain"),
        ],
    )
    for i, row in enumerate(rows):
        out.add_row(
            row.model,
            f"{row.share:.0%}",
            _yes(row.feasible),
            _mib(row.budget_bytes),
            _mib(row.predicted_bytes),
            _mib(row.measured_bytes),
            f"{row.ratio:.4f}",
            _yes(row.within) if row.feasible else "",
            _yes(not row.differing),
            f"{row.predicted_seconds * 1e3:,.0f}",
            f"{row.replay_seconds * 1e3:,.0f}",
            f"{row.step_ratio:.2f}",
            f"{row.second_step_ratio:.1f}",
            end_section=i + 1 < len(rows) and rows[i + 1].model != row.model,
        )
    return out


def smallest_table(rows: list[Smallest]) -> Table:
    """How far down it goes."""
    headers = ["model", "plain,\nMiB", "fake\nplain,\nMiB", "predicted,\nMiB", "measured,\nMiB"]
    headers += ["policy full,\nMiB", "of full", "exact"]
    out = _table("The smallest peak of any plan found, and that of policy 'full'", headers)
    for row in rows:
        plain = (row.plain_bytes, row.estimated_plain_bytes)
        sizes = [_mib(b) for b in (*plain, row.predicted_bytes, row.measured_bytes, row.full_bytes)]
        out.add_row(row.model, *sizes, f"{row.measured_bytes / row.full_bytes:.3f}", _yes(not row.differing))
    return out


def random_table(rows: list[Random]) -> Table:
    """How well the simulator knows plans that nobody chose."""
    out = _table("Random plans: measured over simulated peak", ["model", "plans", "lowest", "highest", "exact"])
    for row in rows:
        out.add_row(row.model, str(row.plans), f"{row.lowest:.4f}", f"{row.highest:.4f}", _yes(not row.differing))
    return out


def faults(rows: list[Row], smallest: list[Smallest], plans: list[Random], tolerance: float) -> list[str]:
    """What a run that passes does not have."""
    found = [f"{r.model}: not exact: {', '.join(r.differing[:3])}" for r in (*rows, *smallest, *plans) if r.differing]
    for row in rows:
        where = f"{row.model} at {row.share:.0%}"
        if row.feasible and not row.within:
            found.append(f"{where}: {row.measured_bytes - row.budget_bytes:,} bytes above the budget")
        if abs(row.ratio - 1) > tolerance:
            found.append(f"{where}: measured is {row.ratio:.4f} of predicted")
    found += [f"{r.model}: smallest peak above that of 'full'" for r in smallest if r.measured_bytes > r.full_bytes]
    found += [
        f"{r.model}: fake tensors say {r.estimated_plain_bytes / r.plain_bytes:.4f} of the plain peak"
        for r in smallest
        if abs(r.estimated_plain_bytes / r.plain_bytes - 1) > _ESTIMATE and r.plain_bytes > _LARGE
    ]
    found += [
        f"{r.model}: a random plan took {r.highest:.4f} of its simulation" for r in plans if r.highest > 1 + tolerance
    ]
    return found


def _table(title: str, headers: list[str]) -> Table:
    out = Table(title=title, title_justify="left")
    for i, header in enumerate(headers):
        out.add_column(header, justify="right" if i else "left", no_wrap=True)
    return out


def _mib(nbytes: float) -> str:
    return f"{nbytes / 2**20:,.2f}"


def _yes(flag: bool) -> str:
    return "yes" if flag else "NO"


def main(
    model: Annotated[list[str], typer.Option(help="May be given several times.")] = list(CASES),  # noqa: B006 - typer copies it
    share: Annotated[list[float], typer.Option(help="Of the plain step's peak; several.")] = [0.75, 0.5, 0.35, 0.25],  # noqa: B006 - the same
    plans: Annotated[int, typer.Option("--random", min=0, help="Random plans per model.")] = 0,
    tiny: Annotated[bool, typer.Option(help="The sizes that tests use.")] = False,
    tolerance: Annotated[float, typer.Option(help="How far a measured peak may be from its prediction.")] = 0.02,
    threads: Annotated[int, typer.Option(min=1, help="Threads within an op.")] = 1,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures here as well.")] = None,
) -> None:
    """Run every model under every budget."""
    if unknown := set(model) - set(CASES):
        raise typer.BadParameter(f"{', '.join(sorted(unknown))}: none of {', '.join(CASES)}", param_hint="'--model'")
    torch.set_num_threads(threads)
    console = Console()
    rows: list[Row] = []
    smallest: list[Smallest] = []
    randoms: list[Random] = []
    for name in model:
        study = Study(name, tiny)
        for part in track(share, description=name, transient=True, disable=QUIET):
            row, run = study.budget(part)
            rows.append(row)
        smallest.append(study.smallest(run))
        if plans:
            randoms.append(study.random(run, plans))
    console.print(budget_table(rows))
    console.print(smallest_table(smallest))
    if randoms:
        console.print(random_table(randoms))
    wrong = faults(rows, smallest, randoms, tolerance)
    for line in wrong:
        console.print(line)
    if json_file:
        content: dict[str, object] = {"environment": {"torch": torch.__version__, "threads": threads}, "faults": wrong}
        for key, some in (("budgets", rows), ("smallest", smallest), ("random", randoms)):
            content[key] = [asdict(row) for row in some]
        json_file.write_text(json.dumps(content, indent=2) + "\n")
    raise typer.Exit(bool(wrong))


if __name__ == "__main__":
    typer.run(main)
