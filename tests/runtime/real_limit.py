"""A limit that is real: a training that plainly fails under it, and what becomes of it under ``strategy="remat"``.

    python -m tests.runtime.real_limit

On the CPU the limit is one of the operating system on the address space of a process (RLIMIT_AS), on CUDA the
allocator's (``set_per_process_memory_fraction``). Every training runs in a process of its own, on one thread, after a
whole training at full size on a throw-away copy: libraries then have their workspaces, and no other kernel is chosen
for want of room. The limit is counted from what the process has after that.

The rooms lie between the peak of plain training and that of per-block recomputation, both counted by `measure_peak`
over the whole of ``fit``, gradients and optimizer state included; one is far below. Plain training must fail in each.
Ours has no other option than its name, must give its weights, optimizer state and random stream in every bit, and must
say what is missing where nothing helps. The exit status is 1 if anything is otherwise.
"""

from __future__ import annotations

import ctypes
import gc
import hashlib
import json
import logging
import os
import resource
import subprocess
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.nn.functional as F
import typer
from lightning.pytorch import LightningModule
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_remat import RematStrategy
from lightning_remat.engine.out_of_memory import is_out_of_memory
from lightning_remat.runtime.memory import measure_peak
from tests.helpers.forks import ROOT, in_fork
from tests.helpers.seed import seed_everything
from tests.helpers.training import trainer_for

GLIBC = {
    # What is freed goes back to the operating system at once, so that address space is memory in use.
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TRIM_THRESHOLD_": "65536",
    "MALLOC_TOP_PAD_": "0",
    "OMP_NUM_THREADS": "1",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
}
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of the model, of its batches, and how many of these there are."""

    blocks: int = 8
    width: int = 64
    context: int = 128
    batch: int = 48
    vocabulary: int = 256
    steps: int = 4


# A batch that is large enough for tensors to be most of what a room holds: the limit counts Python's own objects, too,
# of which a training that is traced and planned takes about 10 MiB.
SMALL = Shape(blocks=4, width=32, context=64, batch=128, steps=3)


class Block(nn.Module):
    """Pre-norm transformer block with dropout, its attention in pieces: ``(B, T, width)`` to the same."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        """Attention, then two layers."""
        q, k, v = self.qkv(self.norm_1(x)).unflatten(-1, (3, 2, -1)).transpose(1, 3).unbind(2)
        future = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
        scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(future, -torch.inf)
        mixed = self.drop(scores.softmax(-1)) @ v
        x = x + self.drop(self.out(mixed.transpose(1, 2).flatten(2)))
        return x + self.drop(self.down(F.gelu(self.up(self.norm_2(x)))))


class GPT(LightningModule):
    """A language model."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed = nn.Embedding(shape.vocabulary, shape.width)
        self.blocks = nn.ModuleList(Block(shape.width) for _ in range(shape.blocks))
        self.head = nn.Linear(shape.width, shape.vocabulary)

    def training_step(self, tokens: Tensor, index: int) -> Tensor:
        """The next-token loss of ``(B, T + 1)``."""
        x = self.embed(tokens[:, :-1])
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens[:, 1:].flatten())

    def configure_optimizers(self) -> Any:
        """Adam."""
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def fit(shape: Shape, strategy: Any) -> tuple[Any, GPT]:
    """Train from a known seed."""
    seed_everything(1)
    model = GPT(shape)
    generator = torch.Generator().manual_seed(2)
    size = (shape.batch, shape.context + 1)
    batches = [torch.randint(shape.vocabulary, size, generator=generator) for _ in range(shape.steps)]
    deterministic = DEVICE == "cuda"
    trainer = trainer_for(strategy, accelerator=DEVICE, deterministic=deterministic, logger=False)
    trainer.fit(model, DataLoader(batches, batch_size=None))  # type: ignore[arg-type]  # a list is a dataset
    return trainer, model


def warm_up(shape: Shape) -> None:
    """Let libraries load and take their workspaces: a training at full size, and a tiny one of ours under a budget."""
    one = Shape(**{**asdict(shape), "steps": 1})
    fit(one, "auto")
    fit(Shape(blocks=2, width=8, context=8, batch=2, steps=3), RematStrategy(budget="1GiB"))
    gc.collect()
    if DEVICE == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    else:
        ctypes.CDLL(None).malloc_trim(0)


def allow(room: int) -> None:
    """From here on this process may take ``room`` bytes more than it has."""
    if DEVICE == "cuda":
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + room) / total)
        return
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + room
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def digest(trainer: Any, model: GPT) -> str:
    """Of weights, optimizer state and the random stream."""
    state = [*model.state_dict().values(), torch.get_rng_state()]
    for one in trainer.optimizers[0].state.values():
        state += [value for value in one.values() if isinstance(value, Tensor)]
    content = b"".join(t.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes() for t in state)
    return hashlib.sha256(content).hexdigest()


def training(shape: Shape, strategy: str, room: int | None) -> dict[str, Any]:
    """Train after a warm-up, in the room given; what came of it."""
    quiet()
    warm_up(shape)
    if room is not None:
        allow(room)
    chosen: Any = strategy
    found: dict[str, Any] = {"strategy": strategy, "room": room, "digest": None, "error": None, "kind": None}
    try:
        trainer, model = fit(shape, chosen)
        found["digest"] = digest(trainer, model)
        remat = getattr(trainer.strategy, "remat", None)
        if remat is not None:
            counters = getattr(remat, "counters", None)
            found["policy"] = remat.summary
            found["evictions"] = getattr(counters, "evictions", None)
            found["retries"] = getattr(counters, "retries", None)
    except (RuntimeError, MemoryError) as error:
        trace = traceback.format_exc() if not is_out_of_memory(error) else ""
        found.update(error=str(error), kind=type(error).__name__, out_of_memory=is_out_of_memory(error), trace=trace)
    except Exception as error:
        found.update(error=str(error), kind=type(error).__name__, out_of_memory=False, trace=traceback.format_exc())
    return found


def peak(shape: Shape, strategy: str) -> int:
    """The most bytes that ``fit`` takes at once."""
    quiet()
    warm_up(shape)
    chosen: Any = RematStrategy(policy="full") if strategy == "full" else strategy
    return measure_peak(lambda: fit(shape, chosen), DEVICE).peak_bytes


def quiet() -> None:
    """One thread, no advice."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")  # advice; what counts is written as JSON
    for name in ("lightning.pytorch", "lightning.fabric", "pytorch_lightning"):
        logging.getLogger(name).setLevel(logging.ERROR)


def in_process(job: str, *arguments: Any) -> Any:
    """Run ``peak`` or ``training`` in a process of its own: on the CPU a fork, on CUDA, which bears none, a new one.

    Raises:
        RuntimeError: it did not end as it should.
    """
    if DEVICE == "cpu":
        ended = in_fork(lambda: JOBS[job](*arguments))
        if ended.error or ended.signal:
            raise RuntimeError(f"{job}{arguments[1:]}: {ended.error or ended.signal}")
        return ended.value
    shape, *rest = arguments
    given = json.dumps({"job": job, "shape": asdict(shape), "rest": rest})
    command = [sys.executable, "-m", "tests.runtime.real_limit", "--job", given]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=os.environ | GLIBC)
    if done.returncode:
        raise RuntimeError(done.stderr[-3000:])
    return json.loads(done.stdout.splitlines()[-1])


JOBS: dict[str, Callable[..., Any]] = {"peak": peak, "training": training}


def examine(shape: Shape, shares: Sequence[float], below: float | None) -> dict[str, Any]:
    """Find the peaks, then train in each room.

    Returns what goes into the JSON file: the peaks, the rows of the table, and the faults.

    Args:
        shape: of everything.
        shares: of the way from the lean peak to the plain one, each a room.
        below: share of the lean peak, a room in which nothing can be trained; None: leave it out.
    """
    plain, lean = (int(in_process("peak", shape, strategy)) for strategy in ("auto", "full"))
    free = in_process("training", shape, "auto", None)
    rows: list[dict[str, Any]] = []
    faults: list[str] = []
    for share in shares:
        room = int(lean + share * (plain - lean))
        plainly, ours = (in_process("training", shape, strategy, room) for strategy in ("auto", "remat"))
        where = f"at {share:.0%}"
        rows += [{"where": where, **plainly}, {"where": where, **ours}]
        if plainly["digest"] is not None or not plainly["out_of_memory"]:
            faults.append(f"{where}: plain training did not run out of memory: {plainly}")
        if ours["digest"] is None:
            faults.append(f"{where}: ours ended with {ours['kind']}: {ours['error']}")
        elif ours["digest"] != free["digest"]:
            faults.append(f"{where}: ours gives other bits than plain training without a limit")
    if below is not None:
        ours = in_process("training", shape, "remat", int(below * lean))
        rows.append({"where": "below", **ours})
        if ours["kind"] != "NoMemoryLeft":
            faults.append(f"below: ours ended with {ours['kind']}, not with NoMemoryLeft: {ours['error']}")
    peaks = {"plain": plain, "lean": lean, "digest": free["digest"]}
    return {"device": DEVICE, "shape": asdict(shape), **peaks, "rows": rows, "faults": faults}


def table(found: dict[str, Any]) -> Table:
    """One row for each training."""
    mib = 2**20
    out = Table(
        title=f"Trainings under a real limit ({found['device']}): plain training takes {found['plain'] / mib:.0f} MiB, "
        f"per-block recomputation {found['lean'] / mib:.0f} MiB",
        title_justify="left",
    )
    for header in ("room", "MiB", "strategy", "evictions", "retries", "came of it"):
        out.add_column(header, justify="right" if header in ("MiB", "evictions", "retries") else "left")
    for row in found["rows"]:
        counts = [str(row.get(key, "")) for key in ("evictions", "retries")]
        result = f"weights {row['digest'][:12]}" if row["digest"] else escape(f"{row['kind']}: {row['error'][:300]}")
        out.add_row(row["where"], f"{row['room'] / mib:.0f}", row["strategy"], *counts, result)
    return out


def main(
    small: Annotated[bool, typer.Option(help="A small model.")] = False,
    share: Annotated[list[float], typer.Option(help="Of the way from lean to plain; may be repeated.")] = [  # noqa: B006 - typer copies it
        0.75,
        0.5,
        0.25,
    ],
    below: Annotated[float, typer.Option(help="A room far too small, as a share of the lean peak.")] = 0.25,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures here as well.")] = None,
    fail: Annotated[bool, typer.Option(help="End with status 1 if something is not as it should be.")] = True,
    job: Annotated[str | None, typer.Option(hidden=True)] = None,
) -> None:
    """Train under limits."""
    if any(os.environ.get(name) != value for name, value in GLIBC.items()):
        # The C library reads its settings when a process starts.
        os.execve(sys.executable, [sys.executable, "-m", "tests.runtime.real_limit", *sys.argv[1:]], os.environ | GLIBC)
    if job is not None:
        given = json.loads(job)
        print(json.dumps(JOBS[given["job"]](Shape(**given["shape"]), *given["rest"])))
        return
    found = examine(SMALL if small else Shape(), share, below)
    Console(width=150).print(table(found))
    for fault in found["faults"]:
        print(fault)
    if json_file:
        json_file.write_text(json.dumps(found, indent=2) + "\n")
    raise typer.Exit(fail and bool(found["faults"]))


if __name__ == "__main__":
    typer.run(main)
