"""Two processes over which the layers of a model are spread (tensor parallel); run by test_tensor_parallel.py.

Each scenario is trained plainly and under recomputation, and compared on each rank.

    python -m tests.integrations.tensor_parallel_worker FOLDER
"""

from __future__ import annotations

import gc
import json
import sys
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from lightning_remat import Remat
from lightning_remat.runtime.memory import measure_peak
from tests.helpers.bits import difference_in_bits, random_streams
from tests.helpers.exact import EVERYTHING, recompute_all
from tests.helpers.quiet import quiet_collectives
from tests.helpers.ranks import rank, together, world
from tests.helpers.seed import seed_everything

WIDTH, HEADS, VOCABULARY, LENGTH = 32, 4, 64, 16
STEPS = 4


class Attention(nn.Module):
    """Heads are spread: each process has some of them, and all of the sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (p(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for p in (self.q, self.k, self.v))
        weights = (q @ k.transpose(-1, -2) / 4).softmax(-1)
        return self.out((weights @ v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, inplace: bool, dropout: float) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.act = nn.ReLU(inplace=True) if inplace else nn.GELU()
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.attention(self.first(x)))
        return x + self.drop(self.down(self.act(self.up(self.second(x)))))


class Model(nn.Module):
    """A small language model."""

    def __init__(self, depth: int = 3, inplace: bool = False, dropout: float = 0.1) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([Block(inplace, dropout) for _ in range(depth)])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def spread(model: Model, mesh: DeviceMesh, *, sequence: bool, local: bool = True, losses: bool = False) -> None:
    """Spread a model.

    Args:
        model: in place.
        mesh: over these processes.
        sequence: norms and dropout work on parts of the sequence, as DTensors; otherwise on plain copies.
        local: what layers hand on is plain; otherwise DTensors all the way.
        losses: logits stay spread over the vocabulary.
    """
    between = Shard(1) if sequence else Replicate()
    # Where dropout works on copies, every process must draw the same.
    inside: dict[str, Any] = {"use_local_output": local}
    for block in model.blocks:
        plan: dict[str, Any] = {
            "attention.out": RowwiseParallel(output_layouts=between, use_local_output=not sequence and local),
            "down": RowwiseParallel(output_layouts=between, use_local_output=not sequence and local),
            "up": ColwiseParallel(input_layouts=between, **inside),
        }
        for name in ("q", "k", "v"):
            plan[f"attention.{name}"] = ColwiseParallel(**inside)
        plan["attention"] = PrepareModuleInput(input_layouts=(between,), desired_input_layouts=(Replicate(),))
        if sequence:
            plan |= {"first": SequenceParallel(), "second": SequenceParallel()}
        parallelize_module(block, mesh, plan)
    outer: dict[str, Any] = {
        "embed": RowwiseParallel(
            input_layouts=Replicate(), output_layouts=between, use_local_output=not sequence and local
        ),
        "head": ColwiseParallel(
            input_layouts=between, output_layouts=Shard(-1) if losses else Replicate(), use_local_output=not losses
        ),
    }
    if sequence:
        outer["norm"] = SequenceParallel()
    parallelize_module(model, mesh, outer)


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """What is trained, and how."""

    remat: Callable[[], Remat]
    model: dict[str, Any] = field(default_factory=dict)
    spread: dict[str, Any] = field(default_factory=lambda: {"sequence": True})
    micro_batches: int = 1
    replays: bool = True
    less: float | None = None  # the peak is below that part of the plain one
    quiet: bool = False  # gloo's threads hold nothing, so that memory can be counted to the byte
    shard: Callable[[Model, DeviceMesh], None] | None = None  # what remains of each process's part, over others


def under(policy: Any, less: float | None = 0.95, **options: Any) -> Scenario:
    """A scenario under a fixed policy."""
    return Scenario(remat=lambda: Remat(policy), less=less, **options)


ROWS: dict[str, Any] = {"spread": {"sequence": False}}
LOSSES: dict[str, Any] = {"spread": {"sequence": True, "losses": True}}
IN_PLACE: dict[str, Any] = {
    "model": {"inplace": True},
    "spread": {"sequence": True, "local": False},
    "micro_batches": 2,
}

SCENARIOS = {
    "sequence parallel, full": under("full"),
    "sequence parallel, selective": under("selective", None),
    "sequence parallel, everything": under(recompute_all),
    "columns and rows, full": under("full", **ROWS),
    "columns and rows, everything": under(recompute_all, **ROWS),
    "loss parallel, everything": under(recompute_all, **LOSSES),
    "in place, selective": under("selective", None, **IN_PLACE),
    "in place, everything": under(recompute_all, quiet=True, **IN_PLACE),
    "verified": Scenario(remat=lambda: Remat("selective", verify=True)),
    "offloaded": Scenario(remat=lambda: Remat("offload_only", offload=EVERYTHING), replays=False),
    "offloaded and dropped": Scenario(remat=lambda: Remat(recompute_all, offload=EVERYTHING)),
    "budget": Scenario(remat=lambda: Remat(budget=1), less=0.95, quiet=True),
    "budget, accumulated": Scenario(remat=lambda: Remat(budget=1), micro_batches=2),
    "large budget": Scenario(remat=lambda: Remat(budget="1GiB"), replays=False),
}


def batches(part: int = 0) -> list[tuple[Tensor, Tensor]]:
    """The same for every process over which layers are spread."""
    generator = torch.Generator().manual_seed(5 + part)
    shape = (2, LENGTH)
    return [
        (
            torch.randint(VOCABULARY, shape, generator=generator),
            torch.randint(VOCABULARY, shape, generator=generator),
        )
        for _ in range(STEPS * 2)
    ]


def train(scenario: Scenario, mesh: DeviceMesh, remat: Remat | None) -> dict[str, Any]:
    """What a training leaves behind."""
    seed_everything(3)
    model = Model(**scenario.model)
    if scenario.shard is None:
        spread(model, mesh, **scenario.spread)
        data = iter(batches())
    else:
        spread(model, mesh["spread"], **scenario.spread)
        scenario.shard(model, mesh["sharded"])
        data = iter(batches(mesh["sharded"].get_local_rank()))
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2)
    losses, gradients, peaks, calls = [], [], [], []
    model.register_forward_hook(lambda *args: calls.append(1))
    losing = scenario.spread.get("losses", False)

    def micro_batch() -> None:
        x, y = next(data)

        def forward() -> Tensor:
            logits = model(x).flatten(0, 1)
            return F.cross_entropy(logits, y.flatten())

        if remat is None:
            loss = forward()
        else:
            with remat:
                loss = forward()
        loss.backward()
        losses.append(whole(loss.detach()))

    def step() -> None:
        for _ in range(scenario.micro_batches):
            if losing:
                with loss_parallel():
                    micro_batch()
            else:
                micro_batch()

    for number in range(STEPS):
        if number < STEPS - 2:
            step()
        else:
            peaks.append(measure_peak(step).peak_bytes)
        gradients.append([None if p.grad is None else whole(p.grad) for p in model.parameters()])
        optimizer.step()
        optimizer.zero_grad()
    return {
        "left": {
            "losses": losses,
            "gradients": gradients,
            "weights": [whole(p.detach()) for p in model.parameters()],
            "streams": random_streams(),
            "calls": len(calls),
        },
        "peaks": peaks,
    }


def whole(tensor: Tensor) -> Tensor:
    """What of it is here."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).clone()


PLAIN: dict[str, dict[str, Any]] = {}


def compare(scenario: Scenario, mesh: DeviceMesh) -> dict[str, Any]:
    config = repr((scenario.model, scenario.spread, scenario.micro_batches, scenario.shard, scenario.quiet))
    remat = scenario.remat()
    with quiet_collectives() if scenario.quiet else nullcontext():
        plain = PLAIN.get(config) or PLAIN.setdefault(config, train(scenario, mesh, None))
        ours = train(scenario, mesh, remat)
    found = {
        "difference": difference_in_bits(plain["left"], ours["left"]),
        "replayed": remat.stats.replayed_ops,
        "peaks": (min(plain["peaks"]), min(ours["peaks"], default=None)),
        "predicted": None if remat.plan is None else remat.plan.chosen.peak_bytes,
        "verified": sorted(remat.verifier.checked) if remat.verifier else None,
        "different": sorted(remat.verifier.different) if remat.verifier else None,
    }
    remat.close()
    return found


# ---------------------------------------------------------------------- writes, and what is left behind


def spread_out(mesh: DeviceMesh) -> tuple[Tensor, Tensor]:
    """A weight and a bias."""
    weight = distribute_tensor(torch.linspace(-1, 1, 64).view(8, 8), mesh, [Shard(0)])
    bias = distribute_tensor(torch.linspace(-1, 1, 8), mesh, [Shard(0)])
    return nn.Parameter(weight), nn.Parameter(bias)


def written_within(mesh: DeviceMesh, remat: Remat | None) -> str:
    """What is raised where a DTensor that autograd has saved is changed in place within the step."""
    weight, bias = spread_out(mesh)

    def step() -> Tensor:
        h = (weight * 2).exp()
        y = h * h + bias
        h.add_(1)
        return y.sum()

    return said(step, remat, lambda: None)


def written_after(mesh: DeviceMesh, remat: Remat | None) -> str:
    """The same, after the step, for one that it has read and autograd has not saved."""
    weight, bias = spread_out(mesh)

    def write() -> None:
        with torch.no_grad():
            weight.add_(1)

    def step() -> Tensor:
        h = weight + 1
        return (h * h).sum() + bias.sum()

    return said(step, remat, write)


def said(step: Callable[[], Tensor], remat: Remat | None, then: Callable[[], None]) -> str:
    try:
        if remat is None:
            loss = step()
        else:
            with remat:
                loss = step()
        then()
        loss.backward()
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def left_behind(mesh: DeviceMesh) -> list[str]:
    """Storages that live on although nobody holds the loss, without the garbage collector's help."""
    weight, bias = spread_out(mesh)
    found = {}
    gc.collect()
    gc.disable()
    try:
        for policy in ("none", "selective", recompute_all):
            with Remat(policy):
                h = (weight * bias).exp()
                loss = (h @ weight).tanh().sum()
            found[str(policy)] = weakref.ref(h.to_local().untyped_storage())
            del h, loss
        return [policy for policy, reference in found.items() if reference() is not None]
    finally:
        gc.enable()


def out_of_memory(mesh: DeviceMesh) -> str:
    """One of the processes runs out of memory in the middle of a step, after collectives."""
    seed_everything(3)
    model = Model()
    spread(model, mesh, sequence=True)
    remat = Remat("full")
    x, y = batches()[0]

    def fail(*args: Any) -> None:
        if rank() == 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB.")

    model.blocks[1].register_forward_hook(fail)

    def step() -> None:
        with remat:
            loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        loss.backward()

    try:
        remat.attempt(step, model)
    except RuntimeError as error:
        return "\n".join([type(error).__name__, str(error), *getattr(error, "__notes__", ())])
    return "nothing"


def mesh_of_all() -> DeviceMesh:
    """All processes, in a row."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", rank=rank(), world_size=world())
    return init_device_mesh("cpu", (world(),))


def job(names: list[str]) -> dict[str, Any]:
    """Scenarios, on one rank."""
    mesh = mesh_of_all()
    found: dict[str, Any] = {name: compare(SCENARIOS[name], mesh) for name in names}
    found["written within"] = [written_within(mesh, r) for r in (None, Remat("none"), Remat(recompute_all))]
    found["written after"] = [written_after(mesh, r) for r in (None, Remat("none"), Remat(recompute_all))]
    found["left behind"] = left_behind(mesh)
    distributed.destroy_process_group()
    return found


def main(folder: Path, names: list[str]) -> None:
    """All scenarios, and the one that ends training."""
    results = {
        "scenarios": together(folder / "scenarios", 2, lambda: job(names), 240),
        "out of memory": together(folder / "end", 2, lambda: {"said": out_of_memory(mesh_of_all())}, 40),
    }
    (folder / "results.json").write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:] or list(SCENARIOS))
