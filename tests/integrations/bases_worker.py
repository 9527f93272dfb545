"""Every base by two processes, and by four: what each of them gives by itself, and under recomputation.

    python -m tests.integrations.bases_worker FOLDER [BASE ...]

DDP's are in ddp_worker.py and uneven_worker.py. Sharded parameters have more in sharded_worker.py, and layers that are
spread in tensor_parallel_worker.py; here is what all have in common, and what they do together.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn

from tests.helpers.bases import BASES, Base, Net, Peak, engine, run
from tests.helpers.exact import recompute_all
from tests.helpers.quiet import quiet_collectives
from tests.helpers.ranks import peaks_of, together, world

SECONDS = 280
DEPTH = 3


def by_rank(batch: int, rank: int) -> int:
    """More rows on each further rank."""
    return 48 + 16 * rank


def changing(batch: int, rank: int) -> int:
    """Another number of rows in each batch, and other ones on each rank."""
    return 24 + 8 * ((batch + rank) % 3)


def sometimes(base: Base) -> nn.Module:
    """A branch within each block that processes with the first data never take; every second time, if all have that."""
    first, alone = base.data_rank() == 0, base.spread() == world()
    return Net(depth=DEPTH, taken=lambda times: times % 2 == 0 if alone else not first)


def plainly(base: Base) -> nn.Module:
    """Everybody takes every way."""
    return Net(depth=DEPTH)


@dataclass(frozen=True, kw_only=True)
class Way:
    """How a network is trained."""

    net: Callable[[Base], nn.Module] = plainly
    quiet: bool = False  # memory is counted, and so gloo's threads hold nothing of it
    rows: Callable[[int, int], int] = by_rank
    options: dict[str, Any] = field(default_factory=dict)
    policies: dict[str, dict[str, Any]]


FULL: dict[str, Any] = {"full": {"policy": "full"}}
NAMED: dict[str, Any] = FULL | {"selective": {"policy": "selective"}, "everything": {"policy": recompute_all}}
SMALLEST: dict[str, Any] = {"smallest": {"budget": 1}}  # no plan needs as little: the one with the smallest peak
ACCUMULATED: dict[str, Any] = {"net": sometimes, "rows": changing, "options": {"accumulate_grad_batches": 2}}


def everything(budget: int) -> dict[str, Way]:
    """All that is tried; under the budget not everything can be kept on the last rank, and a plan can be shared."""
    one = {"one plan": {"budget": budget, "share_plan": True}}
    return {
        "rows by rank": Way(quiet=True, policies=NAMED | SMALLEST | one),
        "sometimes, accumulated": Way(**ACCUMULATED, policies=NAMED | SMALLEST),
    }


SOME = {"sometimes": Way(net=sometimes, quiet=True, policies=FULL | SMALLEST)}

RUNS: dict[int, dict[str, dict[str, Way]]] = {
    2: {"fsdp1": everything(265_000), "fsdp2": everything(265_000), "tensor parallel": everything(170_000)},
    4: {"fsdp1": SOME, "fsdp2": SOME, "tensor parallel": SOME, "tensor parallel and fsdp2": everything(160_000)},
}
"""By number of processes and base: what is tried. DDP's is in uneven_worker.py."""


def compare(base: Base, way: Way) -> dict[str, Any]:
    """By policy, what differs from the base by itself on this rank, and what was computed again."""

    def training(remat: dict[str, Any] | None) -> tuple[Any, list[int]]:
        peak = Peak()
        with quiet_collectives() if way.quiet else nullcontext():
            callbacks = [peak] if way.quiet else []
            result = run(
                base, remat, net=lambda: way.net(base), rows=way.rows, callbacks=lambda: callbacks, **way.options
            )
        return result, peak.bytes

    plain, counted = training(None)
    found: dict[str, Any] = {}
    for name, options in way.policies.items():
        ours, falls_to = training(options)
        remat = engine(ours)
        found[name] = {
            "difference": ours.difference(plain),
            "replayed": ours.replayed_ops,
            "gradients": sum(g is not None for step in ours.gradients for g in step.values()),
            "units": len(remat.units),
            "ranks": [asdict(figures) for figures in remat.ranks],
            "notes": remat.counters.notes,
            "peaks": peaks_of(remat),
            "counted": (counted, falls_to),
            "world": ours.trainer.world_size,
        }
    return found


def job(names: list[str]) -> dict[str, Any]:
    """All bases on one rank, or some; by base and way."""
    torch.set_num_threads(1)
    found = {
        base: {name: compare(BASES[base], way) for name, way in ways.items()}
        for base, ways in RUNS[world()].items()
        if not names or base in names
    }
    distributed.destroy_process_group()
    return found


def main(folder: Path, *names: str) -> None:
    """Two ranks, then four."""
    results = {count: together(folder / str(count), count, partial(job, list(names)), SECONDS) for count in RUNS}
    (folder / "results.json").write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
