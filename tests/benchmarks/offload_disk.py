"""Activations on a disk: memory, time, and how much of the transfers is hidden, on a machine without a GPU.

    python tests/benchmarks/offload_disk.py --json offload_disk.json
    python tests/benchmarks/offload_disk.py --slow 20

Losses and gradients are compared bit for bit first. Two tables: fixed policies with and without offload, and
``policy="auto"`` at several budgets, with and without. Peaks are counted from allocation events. Resident memory is the
most that the process took in a step, above what it had before, each variant in a process of its own. Times are taken in
turns, medians over the rounds; next to them stands what the disk does by itself (as ``lightning-remat bench-io``
measures it) and which share of the transfers' time the step did not have to wait for. ``--slow`` makes every read and
write take as long as on a disk of so many MB/s, to see that plans then recompute.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from models import GPT, PLAIN, Shape, Variant, check_equal, environment, tokens_for
from planned import STEPS_TO_SETTLE, static_bytes
from rich.console import Console
from rich.table import Table
from rounds import interleaved

from lightning_remat import Offload, Remat
from lightning_remat.engine.offload.disk import DiskPlace
from lightning_remat.engine.offload.file import ScratchFile
from lightning_remat.runtime.bandwidth import Bandwidth, measure
from lightning_remat.runtime.memory import measure_peak

_STEPS = 3  # of each variant in a process of its own, before resident memory is looked at
_WIDTH = 140  # of tables that go to a file
_PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, kw_only=True)
class Ours(Variant):
    """A variant under an engine."""

    engine: Remat


def ours(name: str, policy: str, **options: Any) -> Ours:
    """A variant under `Remat`."""
    engine = Remat(policy, **options)
    return Ours(name=name, around=lambda: engine, engine=engine)


@dataclass(frozen=True, kw_only=True)
class Where:
    """A directory, and how much may be in flight."""

    directory: str
    in_flight: str | None = None

    def offload(self, **options: Any) -> Offload:
        """The option."""
        return Offload(self.directory, in_flight=self.in_flight, **options)


def fixed(where: Where) -> dict[str, Callable[[], Variant]]:
    """Fixed policies, by name; fresh engines each time."""
    disk, unchecked = where.offload(), where.offload(checksum=False)
    return {
        "plain": lambda: PLAIN,
        "remat full": lambda: ours("remat full", "full"),
        "remat selective": lambda: ours("remat selective", "selective"),
        "offload_only": lambda: ours("offload_only", "offload_only", offload=disk),
        "offload_only, no checksum": lambda: ours("offload_only, no checksum", "offload_only", offload=unchecked),
        "selective, disk": lambda: ours("selective, disk", "selective", offload=disk),
        "full, disk": lambda: ours("full, disk", "full", offload=disk),
    }


@contextmanager
def slowed(mb_per_second: float | None) -> Iterator[None]:
    """Let every read and write take as long as on a disk of that speed."""
    if mb_per_second is None:
        yield
        return
    write, read = ScratchFile.write, ScratchFile.read

    def late(move: Callable[..., None]) -> Callable[..., None]:
        def moved(self: ScratchFile, offset: int, data: memoryview) -> None:
            start = time.perf_counter()
            move(self, offset, data)
            time.sleep(max(0.0, data.nbytes / (mb_per_second * 1e6) - (time.perf_counter() - start)))

        return moved

    ScratchFile.write, ScratchFile.read = late(write), late(read)  # type: ignore[method-assign]  # that is the point
    try:
        yield
    finally:
        ScratchFile.write, ScratchFile.read = write, read  # type: ignore[method-assign]  # as above


def step(variant: Variant, model: torch.nn.Module, batch: Any) -> None:
    """One step that leaves no gradients."""
    variant.step(model, batch)
    model.zero_grad()


def figures(variant: Variant, model: torch.nn.Module, batch: Any) -> dict[str, Any]:
    """Peak and what was moved, in a step of a variant that has settled."""
    peak = measure_peak(lambda: step(variant, model, batch)).peak_bytes
    row: dict[str, Any] = {"variant": variant.name, "peak_bytes": peak}
    if isinstance(variant, Ours) and variant.engine.offloading is not None:
        engine, offloading = variant.engine, variant.engine.offloading
        offloading.count()
        counters = engine.counters
        row |= {"bytes_out": counters.last_bytes_out, "bytes_in": counters.last_bytes_in}
        if offloading.mover is not None:
            place = offloading.mover.place
            row["most_at_the_place"] = place.peak_bytes
            if isinstance(place, DiskPlace):
                row["file_bytes"] = place.allocated()
    return row


def after_rounds(variant: Variant, before: dict[str, float]) -> dict[str, Any]:
    """Share of the transfers' time that was hidden in the rounds that were timed."""
    if not isinstance(variant, Ours) or variant.engine.offloading is None:
        return {"hidden": None}
    variant.engine.offloading.count()
    counters = variant.engine.counters
    transfers = counters.transfer_seconds - before.get("transfer", 0.0)
    waited = counters.waited_seconds - before.get("waited", 0.0)
    return {"hidden": 1 - waited / transfers if transfers else None, "waited_s": waited, "transfer_s": transfers}


def timed(variants: list[Variant], model: torch.nn.Module, batch: Any, rounds: int, rows: list[dict[str, Any]]) -> None:
    """Add times to the rows of these variants."""
    before = {}
    for variant in variants:
        if isinstance(variant, Ours):
            counters = variant.engine.counters
            before[variant.name] = {"transfer": counters.transfer_seconds, "waited": counters.waited_seconds}
    found = interleaved(variants, model, batch, rounds, in_a_row=2, warm_up=1)
    for variant, row in zip(variants, rows, strict=True):
        row["wall_s"] = statistics.median(t.wall for t in found[variant.name])
        row["processor_s"] = statistics.median(t.processor for t in found[variant.name])
        row |= after_rounds(variant, before.get(variant.name, {}))


# ---------------------------------------------------------------------- resident memory


def resident(name: str, where: Where, shape: Shape) -> int:
    """The most that a process takes in a step under a variant, above what it has between steps; bytes."""
    text = json.dumps({"name": name, "where": asdict(where), "shape": asdict(shape)})
    found = subprocess.run([sys.executable, __file__, "--child", text], capture_output=True, text=True, check=True)
    return int(found.stdout.split()[-1])


def child(text: str) -> None:
    """Print what :func:`resident` asks for."""
    asked = json.loads(text)
    torch.manual_seed(0)
    shape = Shape(**asked["shape"])
    model, batch = GPT(shape), tokens_for(shape)
    variant = fixed(Where(**asked["where"]))[asked["name"]]()
    between = int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE
    for _ in range(_STEPS):
        step(variant, model, batch)
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins anew
    step(variant, model, batch)
    status = Path("/proc/self/status").read_text()
    most = next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM"))
    print(most - between)


# ---------------------------------------------------------------------- tables


def policies_table(shape: Shape, rows: list[dict[str, Any]], disk: Bandwidth) -> Table:
    """Fixed policies."""
    out = Table(
        title=f"Offload to disk: {shape.blocks} blocks, d={shape.width}, T={shape.context}, B={shape.batch}; the disk "
        f"by itself writes {disk.out_bytes_per_second / 1e9:.2f} GB/s and reads {disk.in_bytes_per_second / 1e9:.2f}",
        title_justify="left",
    )
    out.add_column("policy", no_wrap=True)
    headers = ("peak,\nMB", "of\nplain", "resident,\nMB", "moved out,\nMB", "in the\nfile, MB", "time,\ns", "of\nplain")
    for header in (*headers, "processor\ns", "hidden"):
        out.add_column(header, justify="right", no_wrap=True)
    plain = rows[0]
    for row in rows:
        out.add_row(
            row["variant"],
            f"{row['peak_bytes'] / 1e6:.1f}",
            f"{row['peak_bytes'] / plain['peak_bytes']:.3f}",
            f"{row['resident_bytes'] / 1e6:.0f}" if row.get("resident_bytes") is not None else "",
            f"{row['bytes_out'] / 1e6:.1f}" if "bytes_out" in row else "",
            f"{row['file_bytes'] / 1e6:.1f}" if "file_bytes" in row else "",
            f"{row['wall_s']:.3f}",
            f"{row['wall_s'] / plain['wall_s']:.2f}",
            f"{row['processor_s']:.3f}",
            f"{row['hidden']:.0%}" if row["hidden"] is not None else "",
        )
    return out


def budgets_table(rows: list[dict[str, Any]]) -> Table:
    """Budgets, with and without."""
    out = Table(title='policy="auto" at several budgets, without and with offload', title_justify="left")
    out.add_column("budget for a step", no_wrap=True)
    headers = ("predicted\npeak, MB", "measured\nMB", "run\nagain", "moved\nMB", "predicted\nextra, s", "time, s")
    for header in (*headers, "of without", "hidden"):
        out.add_column(header, justify="right", no_wrap=True)
    for row in rows:
        out.add_row(
            row["variant"],
            f"{row['predicted_bytes'] / 1e6:.1f}",
            f"{row['peak_bytes'] / 1e6:.1f}",
            str(row["ops_again"]),
            f"{row['moved_bytes'] / 1e6:.1f}",
            f"{row['extra_s']:.3f}",
            f"{row['wall_s']:.3f}",
            f"{row['wall_s'] / row['without_wall_s']:.3f}" if "without_wall_s" in row else "",
            f"{row['hidden']:.0%}" if row["hidden"] is not None else "",
        )
    return out


def policies(shape: Shape, where: Where, rounds: int, with_resident: bool) -> list[dict[str, Any]]:
    """All fixed variants."""
    torch.manual_seed(0)
    model, batch = GPT(shape), tokens_for(shape)
    variants = [make() for make in fixed(where).values()]
    check_equal(variants, model, batch)
    rows = []
    for variant in variants:
        step(variant, model, batch)  # the first one keeps books, and nobody knows the order yet
        rows.append(figures(variant, model, batch))
    timed(variants, model, batch, rounds, rows)
    if with_resident:
        for row in rows:
            row["resident_bytes"] = resident(row["variant"], where, shape)
    for variant in variants:
        if isinstance(variant, Ours):
            variant.engine.close()
    return rows


def budgets(shape: Shape, where: Where, rounds: int, shares: list[float]) -> list[dict[str, Any]]:
    """Ours under budgets, which are shares of the plain peak."""
    torch.manual_seed(0)
    model, batch = GPT(shape), tokens_for(shape)
    plain = measure_peak(lambda: step(PLAIN, model, batch)).peak_bytes
    found: list[dict[str, Any]] = []
    for share in shares:
        budget = static_bytes(model) + int(share * plain)
        pair: list[Variant] = [
            ours(f"{share:.0%} of plain", "auto", budget=budget),
            ours(f"{share:.0%} of plain, disk", "auto", budget=budget, offload=where.offload()),
        ]
        check_equal([PLAIN, *pair], model, batch)
        rows = []
        for variant in pair:
            for _ in range(STEPS_TO_SETTLE):
                step(variant, model, batch)
            row = figures(variant, model, batch)
            assert isinstance(variant, Ours)
            result = variant.engine.plan
            assert result is not None
            row |= {
                "predicted_bytes": result.chosen.peak_bytes,
                "ops_again": sum(result.chosen.drop),
                "moved_bytes": result.chosen.moved_bytes,
                "extra_s": result.chosen.extra_seconds,
            }
            rows.append(row)
        timed(pair, model, batch, rounds, rows)
        rows[1]["without_wall_s"] = rows[0]["wall_s"]
        for variant in pair:
            assert isinstance(variant, Ours)
            variant.engine.close()
        found += rows
    return found


def main(
    blocks: Annotated[int, typer.Option(min=1)] = 8,
    width: Annotated[int, typer.Option(min=8, help="A multiple of 8, the number of heads.")] = 512,
    context: Annotated[int, typer.Option(min=1)] = 512,
    batch: Annotated[int, typer.Option(min=1)] = 4,
    rounds: Annotated[int, typer.Option(min=1)] = 5,
    shares: Annotated[str, typer.Option(help="Budgets, as shares of the plain peak.")] = "0.6,0.45,0.35",
    directory: Annotated[Path | None, typer.Option(help="Where; the directory for temporary files.")] = None,
    in_flight: Annotated[str | None, typer.Option(help="Bytes in flight, as Offload takes them.")] = None,
    slow: Annotated[float | None, typer.Option(min=0.001, help="Slow the disk down to so many MB/s.")] = None,
    fixed_policies: Annotated[bool, typer.Option(help="The first table.")] = True,
    rss: Annotated[bool, typer.Option(help="Resident memory, each variant in a process of its own.")] = True,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads within an op; torch's choice by default.")] = None,
    child_text: Annotated[str | None, typer.Option("--child", hidden=True)] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures here as well.")] = None,
) -> None:
    """Compare memory and time with and without offload to disk."""
    if child_text is not None:
        child(child_text)
        return
    if threads:
        torch.set_num_threads(threads)
    shape = Shape(blocks=blocks, width=width, context=context, batch=batch)
    where = Where(directory=str(directory or tempfile.gettempdir()), in_flight=in_flight)
    console = Console()
    console = console if console.is_terminal else Console(width=_WIDTH)
    with ExitStack() as stack:
        # What others have measured there is of no use: a disk that is slowed down is another one, and so is a new day.
        os.environ["XDG_CACHE_HOME"] = stack.enter_context(tempfile.TemporaryDirectory())
        stack.enter_context(slowed(slow))
        place = DiskPlace(where.directory)
        disk = measure(place, where.directory)
        place.close()
        rows = policies(shape, where, rounds, rss) if fixed_policies and not slow else []
        if rows:
            console.print(policies_table(shape, rows, disk))
        of_budgets = budgets(shape, where, rounds, [float(s) for s in shares.split(",")])
        console.print(budgets_table(of_budgets))
    if json_file:
        content = {
            "environment": environment(),
            "shape": asdict(shape),
            "disk": asdict(disk),
            "slow_mb_per_s": slow,
            "policies": rows,
            "budgets": of_budgets,
        }
        json_file.write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    typer.run(main)
