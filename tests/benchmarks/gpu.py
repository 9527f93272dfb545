"""Eager and compiled training of one GPT on an accelerator: ours beside PyTorch's own ways, in a few minutes.

    python tests/benchmarks/gpu.py --json gpu.json
    python tests/benchmarks/gpu.py --device cpu --small --no-compiled

Eager: plain, `torch.utils.checkpoint` per block, selective checkpointing by two lists, ours under ``full``,
``selective`` and ``auto`` at shares of plain's peak. Compiled: plain, the compiler's own activation budget, and ours
with ``compiled="budget"`` at the same shares. Everything runs under deterministic algorithms; loss, gradients and
random state are compared bit for bit with plain's, those of compiled ways with those of compiled plain. Peaks are those
of the device's allocator less what is there between steps; times are medians of interleaved rounds.

At the end a real shortage: the process may have no more memory than plain training lacks a little of
(`torch.cuda.set_per_process_memory_fraction`), plain fails, and ours goes on; its steps are compared with those that
plain makes without the limit. CUDA only.
"""

from __future__ import annotations

import functools
import itertools
import json
import statistics
import types
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from models import EXPENSIVE, PLAIN, Shape, differences, environment
from offload_gpu import MIB, SMALL, WIDTH, Bench, admitted, deterministic, timed
from offload_variants import CHECKPOINT_WAY, PLAIN_WAY, Makers, Way, ours
from rich.console import Console
from rich.table import Table
from rivals import TITAN, NotHere
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from lightning_remat import Remat

SEARCH = 24
"""Steps in which a run under ``compiled="budget"`` looks for its activation budget, at most."""

_numbers = itertools.count()


def selective(name: str, saved: Callable[[], Any]) -> Way:
    """PyTorch's selective checkpointing of each block."""
    return Way(name=name, run_block=functools.partial(checkpoint, use_reentrant=False, context_fn=saved))


def _titan() -> Any:
    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if op in TITAN else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def eager(budgets: dict[str, int]) -> Makers:
    """All eager ways but plain."""
    matmuls = functools.partial(create_selective_checkpoint_contexts, EXPENSIVE)
    makers: Makers = [
        ("checkpoint", lambda: [CHECKPOINT_WAY]),
        ("selective", lambda: [selective("torch selective, matmuls", matmuls)]),
        ("titan", lambda: [selective("torch selective, torchtitan's list", _titan)]),
        ("full", lambda: [ours("full")]),
        ("ours, selective", lambda: [ours("selective")]),
    ]
    for words, budget in budgets.items():
        makers.append((words, functools.partial(_at, words, budget)))
    return makers


def _at(words: str, budget: int) -> list[Way]:
    engine = Remat(budget=budget)
    return [
        Way(name=f"remat auto {words}", around=lambda: engine, ours=True, needs_steps=8, close=engine.close),
    ]


@dataclass(frozen=True, kw_only=True)
class CompiledWay(Way):
    """A way whose forward is compiled, apart from that of all others."""

    compiled: Callable[..., Tensor]

    def forward(self, model: nn.Module, batch: Any) -> Tensor:
        with self.around():
            return self.compiled(batch)


def _compiled(model: nn.Module, budget: float = 1.0) -> Callable[..., Tensor]:
    """The model's forward as code of its own: Dynamo gives up on code that it has compiled eight times."""
    from torch._functorch import config
    from torch._inductor.compile_fx import compile_fx

    def run(batch: Any) -> Tensor:
        out: Tensor = model(batch)
        return out

    code = run.__code__.replace(co_name=f"run_{next(_numbers)}")
    own = types.FunctionType(code, run.__globals__, code.co_name, None, run.__closure__)
    if budget == 1.0:
        return torch.compile(own)

    def backend(graph: Any, inputs: Any) -> Any:
        with config.patch(activation_memory_budget=budget):
            return compile_fx(graph, inputs)

    return torch.compile(own, backend=backend)


def compiled(model: nn.Module, budgets: dict[str, int], shares: list[float]) -> Makers:
    """All compiled ways but plain."""

    def peer(share: float) -> list[Way]:
        return [CompiledWay(name=f"compiled, activation budget {share:g}", compiled=_compiled(model, share))]

    def held(words: str, budget: int) -> list[Way]:
        engine = Remat(budget=budget, compiled="budget")
        return [
            CompiledWay(
                name=f"compiled, remat auto {words}",
                compiled=_compiled(model),
                around=lambda: engine,
                ours=True,
                needs_steps=SEARCH,
                close=engine.close,
            )
        ]

    makers: Makers = [(f"activation budget {share:g}", functools.partial(peer, share)) for share in shares]
    for words, budget in budgets.items():
        makers.append((f"compiled, {words}", functools.partial(held, words, budget)))
    return makers


def group(bench: Bench, plain: Way, more: Callable[[dict[str, int]], Makers], args: dict[str, Any]) -> dict[str, Any]:
    """One table: ``plain``, what the others are compared with, and the ways that ``more`` makes for budgets."""
    bench.step(plain)  # compiles, if anything is to be
    expected = bench.outcome(plain)
    if unequal := differences(expected, bench.outcome(plain)):
        raise SystemExit(f"{plain.name} differs from itself in {', '.join(unequal)}: nothing can be compared here")
    base = bench.peak(plain)["peak_bytes"]
    assert base is not None
    static = bench.static_bytes()
    budgets = {f"{share:.0%}": static + int(share * base) for share in args["shares"]}
    found = admitted(bench, [("plain", lambda: [plain]), *more(budgets)], expected)
    peaks = {way.name: bench.peak(way) for way in found.ways}
    times = timed(bench, found.ways, args["rounds"], args["in_a_row"])
    for way in found.ways:
        way.close()
    first = statistics.median(times[plain.name])
    rows = [
        {
            "variant": way.name,
            "ours": way.ours,
            **peaks[way.name],
            "of_plain": (peaks[way.name]["peak_bytes"] or 0) / base,
            "seconds": statistics.median(times[way.name]),
            "time_of_plain": statistics.median(times[way.name]) / first,
            **found.known[way.name],
        }
        for way in found.ways
    ]
    return {"static_bytes": static, "rows": rows, "notes": found.notes}


def shortage(bench: Bench, steps: int = 6) -> dict[str, Any]:
    """Train with less memory than plain needs, under a limit that the allocator keeps."""
    if not bench.on_cuda:
        raise NotHere("a limit on what the process may have is CUDA's")

    def trained(step: Callable[[], Tensor]) -> list[Tensor]:
        torch.manual_seed(7)
        found = []
        for _ in range(steps):
            found.append(step())
            found += [p.grad.clone() for p in bench.model.parameters() if p.grad is not None]
            bench.model.zero_grad()
        return [t.cpu() for t in found]

    def plain() -> Tensor:
        loss = PLAIN.forward(bench.model, bench.batch)
        loss.backward()
        return loss.detach()

    expected = trained(plain)
    bench.peak(PLAIN_WAY)
    peak = torch.cuda.max_memory_allocated(bench.device)
    limit = int(0.6 * peak)
    total = torch.cuda.get_device_properties(bench.device).total_memory
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(limit / total, bench.device)
    remat = Remat(retries=4)
    try:
        failed = ""
        try:
            trained(plain)
        except torch.OutOfMemoryError as error:
            failed = str(error).partition("\n")[0]
        bench.model.zero_grad()

        def step() -> Tensor:
            with remat:
                loss = PLAIN.forward(bench.model, bench.batch)
            loss.backward()
            return loss.detach()

        got = trained(lambda: remat.attempt(step, bench.model))
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, bench.device)
        remat.close()
    return {
        "plain_peak_bytes": peak,
        "limit_bytes": limit,
        "plain_failed": failed,
        "same_bits": all(torch.equal(a, b) for a, b in zip(expected, got, strict=True)),
        "out_of_memory": remat.counters.out_of_memory,
        "retried_batches": remat.counters.retried_batches,
        "evictions": remat.counters.evictions,
        "notes": remat.counters.notes,
    }


def table(title: str, found: dict[str, Any], rounds: int) -> Table:
    """The rows of a group."""
    out = Table(
        title=title,
        title_justify="left",
        caption=f"peaks above {found['static_bytes'] / MIB:,.0f} MiB that are there between steps; medians of {rounds} "
        "interleaved rounds, deterministic algorithms",
        caption_justify="left",
    )
    out.add_column("variant", no_wrap=True)
    for header in ("peak, MiB", "of plain", "step, ms", "of plain"):
        out.add_column(header, justify="right", no_wrap=True)
    out.add_column("bits")
    for row in found["rows"]:
        out.add_row(
            row["variant"],
            f"{row['peak_bytes'] / MIB:,.1f}",
            f"{row['of_plain']:.3f}",
            f"{row['seconds'] * 1e3:,.1f}",
            f"{row['time_of_plain']:.2f}",
            f"differ: {', '.join(row['different'])}" if row["different"] else "equal",
        )
    return out


def main(
    device: Annotated[str, typer.Option(help="cuda or cpu.")] = "cuda",
    small: Annotated[bool, typer.Option("--small", help="A model that any CPU runs in no time.")] = False,
    blocks: Annotated[int, typer.Option(min=1)] = 8,
    width: Annotated[int, typer.Option(min=8, help="A multiple of the heads.")] = 2048,
    heads: Annotated[int, typer.Option(min=1)] = 16,
    context: Annotated[int, typer.Option(min=1)] = 2048,
    batch: Annotated[int, typer.Option(min=1)] = 4,
    share: Annotated[list[float], typer.Option(help="Budgets of ours, as shares of plain's peak.")] = [0.75, 0.5, 0.3],  # noqa: B006 - typer copies it
    rounds: Annotated[int, typer.Option(min=1)] = 7,
    with_compiled: Annotated[bool, typer.Option("--compiled/--no-compiled", help="Compiled ways as well.")] = True,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures here as well.")] = None,
) -> None:
    """Compare ways to train with less memory, eager and compiled, in bfloat16."""
    if small:
        shape, rounds, dtype = SMALL, 1, torch.float32
    else:
        shape = Shape(blocks=blocks, width=width, context=context, batch=batch, heads=heads)
        dtype = torch.bfloat16
    args = {"shares": list(share), "rounds": rounds, "in_a_row": 2}
    results: dict[str, Any] = {}
    with deterministic(), warnings.catch_warnings():
        # A budget that no plan fits is a row like others; the compiler warns about what it finds in itself.
        warnings.filterwarnings("ignore")
        bench = Bench(shape, torch.device(device), dtype)
        results["eager"] = group(bench, PLAIN_WAY, eager, args)
        if with_compiled:
            plain = CompiledWay(name="compiled", compiled=_compiled(bench.model))
            shares = [0.5, 0.25]
            results["compiled"] = group(bench, plain, lambda b: compiled(bench.model, b, shares), args)
        try:
            results["shortage"] = shortage(bench)
        except NotHere as reason:
            results["shortage"] = {"left_out": str(reason)}
    console = Console()
    console = console if console.is_terminal else Console(width=WIDTH)
    name = torch.cuda.get_device_name(device) if device.startswith("cuda") else device
    for kind in ("eager", "compiled"):
        if kind in results:
            title = f"{kind} GPT on {name}: {shape.blocks} blocks, d={shape.width}, T={shape.context}, B={shape.batch}"
            console.print(table(title, results[kind], rounds))
            for note in results[kind]["notes"]:
                console.print(note, markup=False)
    console.print("less memory than plain needs:", results["shortage"], markup=False)
    if json_file:
        what = {"environment": {**environment(), "device": name}, "shape": asdict(shape), "dtype": str(dtype), **args}
        json_file.write_text(json.dumps({**what, **results}, indent=2) + "\n")
    wrong = [row["variant"] for row in results["eager"]["rows"] if row["ours"] and row["different"]]
    if wrong or results["shortage"].get("same_bits") is False:
        raise SystemExit(f"not equal to plain in every bit: {', '.join(wrong) or 'under the limit'}")


if __name__ == "__main__":
    typer.run(main)
