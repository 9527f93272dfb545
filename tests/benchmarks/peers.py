"""Ours beside other ways to save memory: one model, one interleaved run, and ours at the peak that each peer has.

    python tests/benchmarks/peers.py --model llama --json peers.json --plot peers.svg
    python tests/benchmarks/peers.py --model llama --grid

What every peer takes at its peak is measured first. Then ours is given a budget of that many bytes and planned for it,
and all are timed in one run: in each round every variant has a turn, in an order that rotates. Figures are medians.
Each variant's loss, gradients, buffers and random state are compared with plain's, bit for bit; where they are not
equal, the table says so. A peer whose package is not installed, or which the model does not admit, is named below it
(``pip install torch-remat``; ``pip install --pre --no-deps ckptplan``; `torch.compile` needs a C++ compiler).

``--grid`` looks at ours alone: budgets from plain's peak downwards, what was predicted and what was measured.
"""

from __future__ import annotations

import json
import statistics
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from models import PLAIN, Variant, differences, environment, outcome
from peers_report import grid_table, grid_verdict, notes_below, peers_table, plot
from planned import NoPlan, Planned, ours_at, predicted_peak, settled, step_peak
from rich.console import Console
from rivals import NotHere, annotated, per_block, segments, selective, switch
from rivals_planned import COMPILED_PLAIN, Compiled, compiled, knapsack
from rounds import Seconds, interleaved
from yards import YARDS, Yard, build

WIDTH = 160
"""Of the tables where the output goes to a file or a pipe, which have no width of their own."""
SAME_PEAK = 0.005
"""Peers whose peaks differ by no more than this share have one run of ours, at the lowest of them."""


def rivals(yard: Yard, with_compiler: bool) -> tuple[list[Variant], list[str]]:
    """All peers that can be used here, and why the others cannot."""
    makers = {
        "checkpoint per block": lambda: [per_block("checkpoint per block", yard.blocks)],
        "selective checkpointing": lambda: selective(yard),
        "segments": lambda: segments(yard),
        "Hugging Face's switch": lambda: switch(yard),
        "torch_remat": lambda: annotated(yard),
        "ckptplan": lambda: knapsack(yard),
    }
    if with_compiler:
        makers["torch.compile"] = lambda: compiled(yard)
    found: list[Variant] = []
    notes = [] if with_compiler else ["torch.compile: switched off (--no-compiler)"]
    for name, make in makers.items():
        try:
            found += make()
        except NotHere as reason:
            notes.append(f"{name}: left out, {reason}")
    return found, notes


def row(variant: Variant, peak: int, times: list[Seconds], different: list[str]) -> dict[str, Any]:
    """What is known about one variant."""
    processor, wall = [s.processor for s in times], [s.wall for s in times]
    return {
        "variant": variant.name,
        "peak_bytes": peak,
        "processor_s": statistics.median(processor),
        "wall_s": statistics.median(wall),
        "quartiles_s": statistics.quantiles(processor, n=4)[::2] if len(processor) > 1 else processor * 2,
        "rounds": len(times),
        "different": different,
    }


def relate(found: dict[str, Any], plain: dict[str, Any], suffix: str = "of_plain") -> None:
    """Add the ratios to plain."""
    for key, value in (("peak", "peak_bytes"), ("processor", "processor_s"), ("wall", "wall_s")):
        found[f"{key}_{suffix}"] = found[value] / plain[value]


def compare(yard: Yard, rounds: int, in_a_row: int, with_compiler: bool) -> dict[str, Any]:
    """Measure plain, all peers, and ours at the peak of each."""
    peers, notes = rivals(yard, with_compiler)
    expected = outcome(PLAIN, yard.model, yard.batch)
    different: dict[str, list[str]] = {PLAIN.name: differences(expected, outcome(PLAIN, yard.model, yard.batch))}
    peaks = {PLAIN.name: step_peak(PLAIN, yard)}
    usable = []
    for peer in peers:
        try:
            different[peer.name] = differences(expected, outcome(peer, yard.model, yard.batch))
        except Exception as error:  # a peer that cannot run this model is a finding, not the end
            yard.model.zero_grad()
            notes.append(f"{peer.name}: left out, fails: {type(error).__name__}: {_first_line(error)}")
            continue
        peaks[peer.name] = step_peak(peer, yard)
        usable.append(peer)

    ours: list[Planned] = []
    ours_for: dict[str, str] = {}
    for peer in sorted(usable, key=lambda peer: peaks[peer.name]):
        if not ours or peaks[peer.name] > ours[-1].step_peak * (1 + SAME_PEAK):
            variant = ours_at(yard.model, peaks[peer.name])
            try:
                different[variant.name] = settled(variant, yard, expected)
            except NoPlan as error:
                yard.model.zero_grad()
                notes.append(f"{variant.name} ({peer.name}): {_first_line(error)}")
                continue
            peaks[variant.name] = step_peak(variant, yard)
            ours.append(variant)
        ours_for[peer.name] = ours[-1].name

    # What is compared has its turns next to each other, so that a machine that others use does not take sides.
    everyone = [PLAIN]
    for peer in usable:
        everyone += [peer, *(v for v in ours if v.name == ours_for.get(peer.name) and v not in everyone)]
    times = interleaved(everyone, yard.model, yard.batch, rounds, in_a_row, warm_up=1)
    for variant in ours:  # a plan may have been corrected meanwhile
        peaks[variant.name] = max(peaks[variant.name], step_peak(variant, yard))
    rows = {v.name: row(v, peaks[v.name], times[v.name], different[v.name]) for v in everyone}
    for found in rows.values():
        relate(found, rows[PLAIN.name])
    for peer in usable:
        if isinstance(peer, Compiled):
            relate(rows[peer.name], rows[COMPILED_PLAIN], "of_compiled")
    for variant in ours:
        rows[variant.name] |= {"allowed_bytes": variant.step_peak, "predicted_bytes": predicted_peak(variant)}
    return {
        "plain": rows[PLAIN.name],
        "peers": [rows[peer.name] | {"ours": ours_for.get(peer.name)} for peer in usable],
        "ours": [rows[variant.name] for variant in ours],
        "notes": notes,
    }


def grid(yard: Yard, rounds: int, in_a_row: int, step: float) -> dict[str, Any]:
    """Measure ours at budgets from plain's peak downwards, until there is no plan."""
    expected = outcome(PLAIN, yard.model, yard.batch)
    plain_peak = step_peak(PLAIN, yard)
    different: dict[str, list[str]] = {PLAIN.name: []}
    peaks = {PLAIN.name: plain_peak}
    ours: list[Planned] = []
    notes = []
    share = 1.0
    while share > step / 2:
        variant = ours_at(yard.model, round(share * plain_peak))
        try:
            different[variant.name] = settled(variant, yard, expected)
        except NoPlan as error:
            yard.model.zero_grad()
            notes.append(f"no plan at {share:.0%}: {_first_line(error)}")
            break
        peaks[variant.name] = step_peak(variant, yard)
        ours.append(variant)
        share -= step
    everyone = [PLAIN, *ours]
    times = interleaved(everyone, yard.model, yard.batch, rounds, in_a_row, warm_up=1)
    for variant in ours:
        peaks[variant.name] = max(peaks[variant.name], step_peak(variant, yard))
    rows = {v.name: row(v, peaks[v.name], times[v.name], different[v.name]) for v in everyone}
    for found in rows.values():
        relate(found, rows[PLAIN.name])
    for variant in ours:
        rows[variant.name] |= {"allowed_bytes": variant.step_peak, "predicted_bytes": predicted_peak(variant)}
    return {"plain": rows[PLAIN.name], "ours": [rows[variant.name] for variant in ours], "notes": notes}


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [""])[0][:200]


def main(
    model: Annotated[str, typer.Option(help=f"One of {', '.join(YARDS)}.")] = "gpt",
    blocks: Annotated[int | None, typer.Option(min=2)] = None,
    width: Annotated[int | None, typer.Option(min=8, help="Of the residual stream; of the stem in a ResNet.")] = None,
    context: Annotated[int | None, typer.Option(min=1, help="Length of a text, side of an image.")] = None,
    batch: Annotated[int | None, typer.Option(min=1)] = None,
    rounds: Annotated[int, typer.Option(min=1)] = 9,
    in_a_row: Annotated[int, typer.Option(min=1, help="Steps in a turn; the last one counts.")] = 2,
    threads: Annotated[int, typer.Option(min=1, help="Threads within an op.")] = 1,
    compiler: Annotated[bool, typer.Option(help="Compare with torch.compile, too; compiling takes minutes.")] = True,
    only_ours: Annotated[bool, typer.Option("--grid", help="Ours alone, at falling budgets.")] = False,
    grid_step: Annotated[float, typer.Option(min=0.01, max=1, help="Of plain's peak, between two budgets.")] = 0.05,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures here as well.")] = None,
    plot_file: Annotated[Path | None, typer.Option("--plot", help="Draw time against memory; .png or .svg.")] = None,
) -> None:
    """Compare with peers on one model."""
    if model not in YARDS:
        raise typer.BadParameter(f"{model} is none of {', '.join(YARDS)}", param_hint="'--model'")
    torch.set_num_threads(threads)
    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDTH)
    yard = build(model, blocks=blocks, width=width, context=context, batch=batch)
    if only_ours:
        results = grid(yard, rounds, in_a_row, grid_step)
        console.print(grid_table(model, yard.shape, results), *grid_verdict(results), sep="\n")
    else:
        results = compare(yard, rounds, in_a_row, compiler)
        console.print(peers_table(model, yard.shape, results), *notes_below(results), sep="\n")
    if plot_file:
        plot(model, results, plot_file)
    if json_file:
        written = {"environment": environment(), "model": model, "shape": asdict(yard.shape), **results}
        json_file.write_text(json.dumps(written, indent=2) + "\n")


if __name__ == "__main__":
    typer.run(main)
