"""Train one GPT under several remat policies and show what each costs, what it saves, and that the result is the same.

    lightning-remat demo                      # installed; or: python examples/demo_gpt.py
    lightning-remat demo --policy full --policy every:4 --steps 20
    lightning-remat demo --size base --device cuda

Each policy trains the same model from the same seed with Lightning. `none` is plain Lightning without the plugin, and
every other run is compared with it bit for bit. Then the policies take turns at single steps, in which time and memory
are measured. A table and a plot of memory against time come out.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import random
import statistics
import time
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import lightning.pytorch as L
import numpy as np
import torch
import typer
from byte_gpt import LitByteGPT, Windows, stdlib_source
from demo_plot import Curve, draw_memory
from lightning.pytorch.callbacks import Callback
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader

from lightning_remat import Remat, RematStrategy
from lightning_remat.runtime.memory import PeakResult, measure_peak

PLAIN = "none"
POLICIES = [PLAIN, "full", "sqrt", "selective"]
TIMED_ROUNDS = 5


class Size(str, Enum):
    """Names of the model shapes in `SHAPES`."""

    tiny = "tiny"
    small = "small"
    base = "base"


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A model's shape, and the batch that goes with it unless another is asked for."""

    blocks: int
    width: int
    heads: int
    context: int
    batch: int

    def model(self) -> LitByteGPT:
        return LitByteGPT(blocks=self.blocks, width=self.width, heads=self.heads, context=self.context)


SHAPES = {
    Size.tiny: Shape(blocks=4, width=32, heads=2, context=32, batch=2),  # seconds, for tests
    Size.small: Shape(blocks=8, width=192, heads=6, context=256, batch=4),  # under two minutes on two CPU cores
    Size.base: Shape(blocks=12, width=768, heads=12, context=1024, batch=8),  # wants an accelerator
}


@dataclass(kw_only=True)
class Outcome:
    """What one policy gave."""

    policy: str
    fingerprint: dict[str, str]
    final_loss: float
    seconds: list[float] = field(default_factory=list)
    rerun_share: float = 0.0
    memory: PeakResult | None = None
    forward_seconds: float = 0.0


class Recorder(Callback):
    """Keeps each step's loss and moves the progress bar."""

    def __init__(self, progress: Progress, task: Any) -> None:
        self.progress = progress
        self.task = task
        self.losses: list[Tensor] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(outputs["loss"].detach().clone())
        self.progress.update(self.task, advance=1, note=f"loss {self.losses[-1].item():.3f}")


class OpCount(TorchDispatchMode):
    """Counts the ops that compute something; views only look at memory in another way."""

    ops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops += not func.is_view
        return func(*args, **(kwargs or {}))


def digest(tensors: Iterable[Tensor]) -> str:
    """A hash over types, shapes and every bit of the tensors."""
    sha = hashlib.sha256()
    for tensor in tensors:
        sha.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
        sha.update(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()


def fingerprint(model: LitByteGPT, optimizer: torch.optim.Optimizer, losses: list[Tensor]) -> dict[str, str]:
    """Hashes of all that training has produced, by part."""
    moments = (value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor))
    streams = f"{random.getstate()}{np.random.get_state()}"
    device_streams = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return {
        "weights": digest(model.parameters()),
        "buffers": digest(model.buffers()),
        "optimizer state": digest(moments),
        "losses": digest(losses),
        "random state": digest([torch.get_rng_state(), *device_streams]) + hashlib.sha256(streams.encode()).hexdigest(),
    }


def train(
    policy: str, *, shape: Shape, data: Windows, batch: int, steps: int, device: torch.device, seed: int, bar: Progress
) -> tuple[Outcome, LitByteGPT]:
    """Train from ``seed`` under one policy. `none` leaves the plugin out."""
    task = bar.add_task(policy, total=steps, note="")
    L.seed_everything(seed, verbose=False)
    model = shape.model()
    recorder = Recorder(bar, task)
    trainer = L.Trainer(
        strategy="auto" if policy == PLAIN else RematStrategy(policy=policy),
        accelerator="cpu" if device.type == "cpu" else "gpu",
        devices=1 if device.index is None else [device.index],
        # Kernels that differ from run to run would differ between two plain runs as well.
        deterministic=device.type == "cuda" or None,
        max_steps=steps,
        max_epochs=-1,
        callbacks=[recorder],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, DataLoader(data, batch_size=batch, shuffle=True, drop_last=True))
    marks = fingerprint(model, trainer.optimizers[0], recorder.losses)
    return Outcome(policy=policy, fingerprint=marks, final_loss=recorder.losses[-1].item()), model


def measure(outcomes: list[Outcome], model: LitByteGPT, windows: Tensor, device: torch.device, bar: Progress) -> None:
    """Time and memory of single steps on one batch, the policies taking turns so that drift hits all alike."""
    task = bar.add_task("measuring", total=len(outcomes) * (TIMED_ROUNDS + 2), note="")
    model.to(device)
    optimizer = model.configure_optimizers()
    windows = windows.to(device)
    engines: dict[str, Any] = {
        one.policy: contextlib.nullcontext() if one.policy == PLAIN else Remat(policy=one.policy) for one in outcomes
    }

    def step(policy: str) -> float:
        """One training step; returns the seconds until forward was done."""
        started = time.perf_counter()
        with engines[policy]:
            loss = model.training_step(windows, 0)
        forward = time.perf_counter() - started
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return forward

    with OpCount() as counter:
        model.training_step(windows, 0)
    forward_ops = counter.ops

    for one in outcomes:  # first steps allocate what stays: optimizer state, workspaces
        step(one.policy)
        bar.advance(task)
    for _ in range(TIMED_ROUNDS):
        for one in outcomes:
            started = clock(device)
            step(one.policy)
            one.seconds.append(clock(device) - started)
            bar.advance(task)
    for one in outcomes:
        forward: list[float] = []
        one.memory = measure_peak(lambda one=one, forward=forward: forward.append(step(one.policy)), device)
        one.forward_seconds = forward[0]
        if one.policy != PLAIN:
            one.rerun_share = engines[one.policy].stats.replayed_ops / forward_ops
        bar.advance(task)


def clock(device: torch.device) -> float:
    """Seconds: of processor time on a CPU, where other programs compete; by the wall on an accelerator."""
    if device.type == "cpu":
        return time.process_time()
    torch.cuda.synchronize(device)
    return time.perf_counter()


def table(outcomes: list[Outcome], title: str) -> Table:
    """The comparison, one row per policy, the first one being the plain run."""
    plain = outcomes[0]
    out = Table(title=title, title_style="bold", title_justify="left")
    out.add_column("policy", style="bold", no_wrap=True)
    for header in ("peak\nmemory", "of\nnone", "time\nper step", "ops run\nagain", "final\nloss"):
        out.add_column(header, justify="right", no_wrap=True)
    out.add_column("identical\nto none", justify="center")
    for one in outcomes:
        assert one.memory is not None
        assert plain.memory is not None
        different = differences(one, plain)
        out.add_row(
            one.policy,
            f"{one.memory.peak_bytes / 2**20:.1f} MiB",
            f"{one.memory.peak_bytes / plain.memory.peak_bytes:.0%}",
            f"{statistics.median(one.seconds) / statistics.median(plain.seconds):.2f} x",
            f"{one.rerun_share:.0%}",
            f"{one.final_loss:.6f}",
            f"[red]no: {', '.join(different)}" if different else "[green]yes",
        )
    return out


def legend(device: torch.device, steps: int, seed: int) -> Table:
    """What the columns mean."""
    clock_name = "processor time" if device.type == "cpu" else "wall time"
    out = Table.grid(padding=(0, 2))
    out.add_column(style="dim bold", no_wrap=True)
    out.add_column(style="dim")
    out.add_row("peak memory", "the most that a step adds to what was there, by allocation events")
    out.add_row("time per step", f"{clock_name}, median of {TIMED_ROUNDS} rounds, taking turns")
    out.add_row("ops run again", "in backward, as a share of the ops of forward")
    out.add_row(
        "identical",
        "bit for bit in weights, buffers, optimizer state, every loss and random states "
        f"after {steps} steps from seed {seed}; none is Lightning without the plugin",
    )
    return out


def differences(one: Outcome, plain: Outcome) -> list[str]:
    """The parts of the result that are not bit for bit those of the plain run."""
    return [part for part, mark in plain.fingerprint.items() if one.fingerprint[part] != mark]


def checked_policies(names: list[str]) -> list[str]:
    """`none` first, since the others are compared with it, each policy once. Raises on one that does not exist."""
    for name in names:
        try:
            Remat(policy=name)
        except ValueError as error:
            raise typer.BadParameter(str(error), param_hint="'--policy'") from None
    return list(dict.fromkeys([PLAIN, *names]))


def checked_device(name: str) -> torch.device:
    """The device asked for, if it is there."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise typer.BadParameter(f"{name!r} is none of auto, cpu, cuda, cuda:N", param_hint="'--device'")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        found = torch.cuda.device_count()
        raise typer.BadParameter(
            f"{name!r} is not there: torch finds {found} CUDA devices. Use --device cpu or auto",
            param_hint="'--device'",
        )
    return device


def checked_output(path: Path) -> Path:
    """A path that the plot can be written to."""
    if path.suffix.lower() != ".png":
        raise typer.BadParameter(f"'{path}' does not end in .png", param_hint="'--output'")
    if path.is_dir() or not path.absolute().parent.is_dir():
        reason = "is a folder" if path.is_dir() else "lies in a folder that does not exist"
        raise typer.BadParameter(f"'{path}' {reason}", param_hint="'--output'")
    return path


@contextlib.contextmanager
def quiet_lightning() -> Iterator[None]:
    """Without the lines in which Lightning lists devices and gives advice; they would cut through the progress bar."""
    # Where both of Lightning's names are installed, the one imported last logs for both.
    names = ("lightning.pytorch", "lightning.fabric", "pytorch_lightning", "lightning_fabric")
    loggers = [logging.getLogger(name) for name in names]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*does not have many workers")
        warnings.filterwarnings("ignore", message=".*LeafSpec")
        warnings.filterwarnings("ignore", message="GPU available but not used")
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)


app = typer.Typer(add_completion=False, rich_markup_mode="rich")


@app.command()
def main(
    size: Annotated[Size, typer.Option(help="Shape of the model; base wants an accelerator.")] = Size.small,
    steps: Annotated[int, typer.Option(min=1, help="Training steps per policy.")] = 25,
    batch: Annotated[int | None, typer.Option(min=1, help="Windows of text per step.", show_default="by size")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    # With several, each op waits for the slowest thread: on a machine that does other work, too, that takes longer than
    # one thread alone, and waiting counts as processor time.
    threads: Annotated[int, typer.Option(min=1, help="CPU threads within an op; more than 1 on an idle machine.")] = 1,
    policy: Annotated[
        list[str] | None,
        typer.Option(help="A policy to compare with none; give it several times.", show_default=", ".join(POLICIES)),
    ] = None,
    output: Annotated[Path, typer.Option(help="Where the plot goes (PNG).")] = Path("remat-demo.png"),
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Seed of weights, data order and dropout.")] = 0,
) -> None:
    """Train a byte-level GPT on the source of Python's standard library under several policies, and compare them."""
    policies = checked_policies(policy or POLICIES)
    where = checked_device(device)
    target = checked_output(output)
    shape = SHAPES[size]
    windows_per_step = batch or shape.batch
    data = Windows(stdlib_source(), shape.context)
    if len(data) < windows_per_step:
        raise typer.BadParameter(f"the text has only {len(data)} windows of this size", param_hint="'--batch'")

    torch.set_num_threads(threads)
    console = Console()
    columns = (TextColumn("{task.description:>9}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    outcomes = []
    with (
        quiet_lightning(),
        Progress(*columns, TimeRemainingColumn(), TextColumn("{task.fields[note]}"), console=console) as bar,
    ):
        for name in policies:
            outcome, model = train(
                name, shape=shape, data=data, batch=windows_per_step, steps=steps, device=where, seed=seed, bar=bar
            )
            outcomes.append(outcome)
        measure(outcomes, model, torch.stack([data[i] for i in range(windows_per_step)]), where, bar)

    parameters = sum(p.numel() for p in model.parameters())
    cpu = f"{threads} CPU thread{'s' if threads > 1 else ''}"
    place = cpu if where.type == "cpu" else torch.cuda.get_device_name(where)
    title = (
        f"GPT: {shape.blocks} blocks, {parameters / 1e6:.1f} M parameters, "
        f"{windows_per_step} windows of {shape.context} bytes, {place}"
    )
    console.print()
    console.print(table(outcomes, title))
    console.print(legend(where, steps, seed))
    curves = [Curve(one.policy, one.memory, one.forward_seconds) for one in outcomes if one.memory]
    console.print(draw_memory(curves, target, title), soft_wrap=True, markup=False, highlight=False)
    if any(differences(one, outcomes[0]) for one in outcomes):
        raise typer.Exit(1)


if __name__ == "__main__":
    app()
