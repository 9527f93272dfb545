"""Activations in host memory, by this project and by others, on one accelerator: memory, time, and whether it is exact.

    python tests/benchmarks/offload_gpu.py --json offload.json --traces traces
    python tests/benchmarks/offload_gpu.py --device cpu --small --place disk

One GPT, one batch, one process. A row for each way to train: plain; `torch.utils.checkpoint` per block;
`torch.autograd.graph.save_on_cpu` with pinned memory; the activation offloading of TRL and of torchtune (which is
archived) where they are installed; each of these three around checkpointed blocks; and ours with and without offload.

Everything runs under deterministic algorithms. Loss, gradients and random state of every way are compared with plain's
bit for bit, for ours in each of its first steps; what differs is said in the table and, for ours, in the exit status.
Peaks are those of the device's allocator, less what is there between steps. Times are medians of interleaved rounds on
the clock, the device waited for at both ends. Pinned memory is what PyTorch's host allocator has handed out at most,
powers of two as it rounds them. What share of the copies lies under kernels is read from one profiled step of each way
that offloads.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

# Read when cuBLAS is set up; without it, deterministic algorithms refuse to multiply matrices.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch
import typer
from models import GPT, Shape, Variant, differences, environment, outcome, tokens_for
from offload_variants import PLAIN_WAY, Makers, Way, everyone
from overlap import events_of, hidden_copies
from rich.console import Console
from rich.table import Table
from rivals import NotHere
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from lightning_remat.runtime.memory import measure_peak

MIB = 2**20
SMALL = Shape(blocks=2, width=32, context=64, batch=2)
WIDTH = 150
"""Of the table where the output goes to a file."""


class Bench:
    """A model, its batch, and how one step of it is run and measured on a device."""

    def __init__(self, shape: Shape, device: torch.device, dtype: torch.dtype) -> None:
        torch.manual_seed(0)
        self.device = device
        self.batch = tokens_for(shape).to(device)
        self.model = GPT(shape).to(device, dtype)
        self.on_cuda = device.type == "cuda"

    def synchronize(self) -> None:
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)

    def step(self, way: Variant) -> None:
        way.step(self.model, self.batch)
        self.model.zero_grad()

    def outcome(self, way: Variant) -> dict[str, list[Tensor]]:
        """What a step from a fixed seed leaves behind."""
        found = outcome(way, self.model, self.batch)
        if self.device.type != "cpu":
            found["random state"].append(torch.get_device_module(self.device).get_rng_state(self.device))
        return found

    def static_bytes(self) -> int:
        """What is there between steps."""
        if self.on_cuda:
            return torch.cuda.memory_allocated(self.device)
        tensors = [*self.model.parameters(), *self.model.buffers()]
        return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())

    def peak(self, way: Variant) -> dict[str, int | None]:
        """The most that a step has on the device above what was there, and what the allocator reserves for it."""
        if not self.on_cuda:
            measured = measure_peak(lambda: self.step(way), self.device).peak_bytes
            return {"peak_bytes": measured, "reserved_bytes": None}
        self.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        self.step(way)
        self.synchronize()
        return {
            "peak_bytes": torch.cuda.max_memory_allocated(self.device) - before,
            "reserved_bytes": torch.cuda.max_memory_reserved(self.device),
        }

    @contextmanager
    def pinned(self) -> Iterator[dict[str, int | None]]:
        """How much pinned memory is in use at most meanwhile, more than before; known at the end."""
        found: dict[str, int | None] = {"host_bytes": None}
        if not self.on_cuda:
            yield found
            return
        before = torch.cuda.host_memory_stats().get("active_bytes.current", 0)
        torch.cuda.reset_peak_host_memory_stats()
        yield found
        self.synchronize()
        found["host_bytes"] = torch.cuda.host_memory_stats().get("active_bytes.peak", 0) - before

    def seconds(self, way: Variant) -> float:
        self.synchronize()
        start = time.perf_counter()
        self.step(way)
        self.synchronize()
        return time.perf_counter() - start

    def traced(self, way: Variant, folder: Path) -> dict[str, Any]:
        """Profile a step; where the trace is, and how its copies lie."""
        file = folder / ("".join(c if c.isalnum() else "_" for c in way.name) + ".json.gz")
        kinds = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if self.on_cuda else [])
        with profile(activities=kinds) as profiler:
            self.step(way)
            self.synchronize()
        profiler.export_chrome_trace(str(file))
        return {"trace": file.name, **hidden_copies(events_of(file))}


@contextmanager
def deterministic() -> Iterator[None]:
    """Deterministic algorithms, without filling memory that nobody has written to, which would cost everybody time."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    filled = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.utils.deterministic.fill_uninitialized_memory = filled


@dataclass
class Admitted:
    """The ways that run here, what is known of each by its name, and why others do not run."""

    ways: list[Way] = field(default_factory=list)
    known: dict[str, dict[str, Any]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def admitted(bench: Bench, makers: Makers, expected: dict[str, list[Tensor]]) -> Admitted:
    """Run the first steps of all ways, and see in what they differ from plain.

    Pinned memory is measured here: a way that keeps its buffers for later steps pins them in its first ones.
    """
    found = Admitted()
    for name, make in makers:
        try:
            made = make()
        except NotHere as reason:
            found.notes.append(f"{name}: left out, {reason}")
            continue
        except Exception as error:  # an option that cannot work here
            found.notes.append(f"{name}: left out, {_words(error)}")
            continue
        for way in made:
            try:
                with bench.pinned() as host:
                    different = [differences(expected, bench.outcome(way)) for _ in range(way.needs_steps)]
            except Exception as error:  # a way that cannot run this model is a finding, not the end
                bench.model.zero_grad()
                found.notes.append(f"{way.name}: left out, fails: {_words(error)}")
                continue
            found.known[way.name] = {"different": sorted({kind for kinds in different for kind in kinds}), **host}
            found.ways.append(way)
    return found


def timed(bench: Bench, ways: list[Way], rounds: int, in_a_row: int) -> dict[str, list[float]]:
    """Seconds of each way, one for each round: of the last of ``in_a_row`` steps. The order rotates."""
    found: dict[str, list[float]] = {way.name: [] for way in ways}
    for turn in range(-1, rounds):
        first = turn % len(ways)
        for way in ways[first:] + ways[:first]:
            times = [bench.seconds(way) for _ in range(in_a_row)]
            if turn >= 0:
                found[way.name].append(times[-1])
    return found


def compare(bench: Bench, args: dict[str, Any], shares: list[float], rounds: int, traces: Path) -> dict[str, Any]:
    """Measure all ways; rows in the order of `everyone`, plain first."""
    expected = bench.outcome(PLAIN_WAY)
    if unequal := differences(expected, bench.outcome(PLAIN_WAY)):
        raise SystemExit(f"plain differs from itself in {', '.join(unequal)}: nothing can be compared here")
    plain = bench.peak(PLAIN_WAY)["peak_bytes"]
    assert plain is not None
    static = bench.static_bytes()
    budgets = {f"{share:.0%}": static + int(share * plain) for share in shares}
    makers: Makers = [
        ("plain", lambda: [PLAIN_WAY]),
        *everyone(bench.model, bench.device, args["place"], args["limits"], budgets),
    ]
    found = admitted(bench, makers, expected)
    ways = found.ways
    peaks = {way.name: bench.peak(way) for way in ways}
    times = timed(bench, ways, rounds, args["in_a_row"])
    copies = {way.name: bench.traced(way, traces) for way in ways if way.offloads}
    for way in ways:
        way.close()
    base = statistics.median(times[PLAIN_WAY.name])
    rows = [
        {
            "variant": way.name,
            "ours": way.ours,
            **peaks[way.name],
            "of_plain": (peaks[way.name]["peak_bytes"] or 0) / plain,
            "seconds": statistics.median(times[way.name]),
            "seconds_all": times[way.name],
            "time_of_plain": statistics.median(times[way.name]) / base,
            **found.known[way.name],
            **copies.get(way.name, {}),
        }
        for way in ways
    ]
    return {"static_bytes": static, "budgets": budgets, "rows": rows, "notes": found.notes}


def table(shape: Shape, dtype: str, device: str, results: dict[str, Any], rounds: int) -> Table:
    """The rows as a table."""
    out = Table(
        title=f"GPT on {device}: {shape.blocks} blocks, d={shape.width}, T={shape.context}, B={shape.batch}, {dtype}",
        title_justify="left",
        caption=f"peaks above {results['static_bytes'] / MIB:,.0f} MiB that are there between steps (with plain's "
        f"gradients, to compare with); medians of {rounds} interleaved rounds, deterministic algorithms; hidden: share "
        "of the copies out / back that kernels run beside",
        caption_justify="left",
    )
    out.add_column("variant", no_wrap=True)
    for header in ("peak,\nMiB", "of\nplain", "step,\nms", "of\nplain", "pinned,\nMiB", "copies,\nms", "hidden"):
        out.add_column(header, justify="right", no_wrap=True)
    out.add_column("bits")
    for row in results["rows"]:
        out.add_row(
            row["variant"],
            f"{row['peak_bytes'] / MIB:,.1f}",
            f"{row['of_plain']:.3f}",
            f"{row['seconds'] * 1e3:,.1f}",
            f"{row['time_of_plain']:.2f}",
            "" if row["host_bytes"] is None else f"{row['host_bytes'] / MIB:,.0f}",
            _pair(row, "{:.1f}", "out_s", "back_s", 1e3),
            _pair(row, "{:.0%}", "out_hidden", "back_hidden", 1),
            f"differ: {', '.join(row['different'])}" if row["different"] else "equal",
        )
    return out


def _pair(row: dict[str, Any], how: str, left: str, right: str, scale: float) -> str:
    values = [row.get(left), row.get(right)]
    return " / ".join("-" if value is None else how.format(value * scale) for value in values) if any(values) else ""


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"


def main(
    device: Annotated[str, typer.Option(help="cuda or cpu.")] = "cuda",
    place: Annotated[str, typer.Option(help="Where ours moves contents to: cpu (host memory) or disk.")] = "cpu",
    small: Annotated[bool, typer.Option("--small", help="A model that any CPU runs in no time.")] = False,
    blocks: Annotated[int, typer.Option(min=1)] = 8,
    width: Annotated[int, typer.Option(min=8, help="A multiple of the heads.")] = 4096,
    heads: Annotated[int, typer.Option(min=1)] = 32,
    context: Annotated[int, typer.Option(min=1)] = 2048,
    batch: Annotated[int, typer.Option(min=1)] = 2,
    dtype: Annotated[str, typer.Option(help="bf16 or fp32.")] = "bf16",
    share: Annotated[list[float], typer.Option(help="Budgets of ours, as shares of plain's peak.")] = [0.5, 0.3],  # noqa: B006 - typer copies it
    rounds: Annotated[int, typer.Option(min=1)] = 7,
    in_a_row: Annotated[int, typer.Option(min=1, help="Steps in a turn; the last one counts.")] = 2,
    min_bytes: Annotated[int, typer.Option(min=0, help="What is smaller is not moved.")] = 64 * 1024,
    traces: Annotated[
        Path | None, typer.Option(help="A folder for the profiler's traces; none are kept without.")
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures here as well.")] = None,
) -> None:
    """Compare ways to train with activations in host memory, on disk, or recomputed."""
    if dtype not in ("bf16", "fp32"):
        raise typer.BadParameter(f"{dtype} is neither bf16 nor fp32", param_hint="'--dtype'")
    if device.partition(":")[0] not in ("cuda", "cpu"):
        raise typer.BadParameter(f"{device} is neither cuda nor cpu", param_hint="'--device'")
    if small:
        shape, dtype, rounds, min_bytes, in_flight = SMALL, "fp32", 1, 1024, 64 * 1024
    else:
        shape = Shape(blocks=blocks, width=width, context=context, batch=batch, heads=heads)
    limits = {"min_bytes": min_bytes} | ({} if in_flight is None else {"in_flight": in_flight})
    args = {"place": place, "limits": limits, "in_a_row": in_a_row}
    with tempfile.TemporaryDirectory() as scratch, deterministic(), warnings.catch_warnings():
        # A budget that no plan fits is a row like others.
        warnings.filterwarnings("ignore", message="policy='auto'")
        folder = traces or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        bench = Bench(shape, torch.device(device), torch.bfloat16 if dtype == "bf16" else torch.float32)
        results = compare(bench, args, share, rounds, folder)
    console = Console()
    console = console if console.is_terminal else Console(width=WIDTH)
    name = torch.cuda.get_device_name(device) if device.startswith("cuda") else device
    console.print(table(shape, dtype, name, results, rounds))
    for note in results["notes"]:
        console.print(note, markup=False)
    if json_file:
        what = {"environment": {**environment(), "device": name}, "shape": asdict(shape), "dtype": dtype, **args}
        json_file.write_text(json.dumps({**what, **results}, indent=2) + "\n")
    if wrong := [row["variant"] for row in results["rows"] if row["ours"] and row["different"]]:
        raise SystemExit(f"not equal to plain in every bit: {', '.join(wrong)}")


if __name__ == "__main__":
    typer.run(main)
