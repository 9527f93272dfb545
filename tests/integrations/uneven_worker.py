"""Two, then four processes whose batches, branches and plans differ; test_uneven.py reads what they have found.

Each scenario is run under plain DDP and under recomputation, and compared on each rank.

    python -m tests.integrations.uneven_worker FOLDER
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, distributed, nn

from lightning_remat import Remat, RematStrategy
from lightning_remat.integrations import sharing
from lightning_remat.runtime.tuning.pilot import Pilot
from tests.helpers.exact import recompute_all
from tests.helpers.ranks import peaks_of, rank, together, world
from tests.helpers.training import Lit, Net, regression, train

BATCHES = 6
SECONDS = 240


class Sometimes(nn.Module):
    """A branch that one rank never takes."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = Net(depth=4)
        self.branch = Net(depth=2)

    def forward(self, x: Tensor) -> Tensor:
        out = self.trunk(x)
        return out if rank() == 0 else out + self.branch(x)


def deep() -> nn.Module:
    """Small weights and many activations."""
    return Net(depth=6)


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """What is trained, and how."""

    remat: dict[str, Any]
    ddp: dict[str, Any] = field(default_factory=dict)
    net: Callable[[], nn.Module] = deep
    rows: Callable[[int, int], int] = lambda batch, rank: 24 + 8 * rank
    options: dict[str, Any] = field(default_factory=dict)
    replays: bool | None = True  # on every rank; None: on some


def changing(batch: int, rank: int) -> int:
    """Another number of rows in each batch, and other ones on each rank."""
    return 16 + 8 * ((batch + rank) % 3)


BETWEEN = 180_000  # bytes: everything fits on rank zero, and on no other
BUDGET: dict[str, Any] = {"budget": 1}  # less than any plan needs: the one with the smallest peak
UNUSED: dict[str, Any] = {"find_unused_parameters": True}

SCENARIOS = {
    "full": Scenario(remat={"policy": "full"}),
    "selective": Scenario(remat={"policy": "selective"}),
    "everything": Scenario(remat={"policy": recompute_all}, rows=changing),
    "budget": Scenario(remat=BUDGET),
    "budget, changing shapes": Scenario(remat=BUDGET, rows=changing),
    "budget, accumulated": Scenario(remat=BUDGET, options={"accumulate_grad_batches": 2}),
    "full, accumulated": Scenario(remat={"policy": "full"}, rows=changing, options={"accumulate_grad_batches": 2}),
    "budget, static_graph": Scenario(remat=BUDGET, ddp={"static_graph": True}),
    "budget, bucket views": Scenario(remat=BUDGET, ddp={"gradient_as_bucket_view": True}),
    "own plans": Scenario(remat={"budget": BETWEEN}, replays=None),
    "one plan": Scenario(remat={"budget": BETWEEN, "share_plan": True}),
    "one plan, other sequences": Scenario(remat=BUDGET | {"share_plan": True}, net=Sometimes, ddp=UNUSED),
    "unused on one rank": Scenario(remat={"policy": recompute_all}, net=Sometimes, ddp=UNUSED, rows=changing),
    "unused on one rank, budget": Scenario(remat=BUDGET, net=Sometimes, ddp=UNUSED),
    "unused on one rank, accumulated, bucket views": Scenario(
        remat={"policy": "full"},
        net=Sometimes,
        ddp=UNUSED | {"gradient_as_bucket_view": True},
        options={"accumulate_grad_batches": 2},
    ),
}


WITH_FOUR = ("full", "budget", "own plans", "one plan", "one plan, other sequences", "unused on one rank")
"""Those that are run with four processes as well; each of them plans by itself, and there may be two cores."""


class Data:
    """As many batches on each rank, of different sizes."""

    def __init__(self, rows: Callable[[int, int], int]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return BATCHES

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(5 + rank())
        for batch in range(BATCHES):
            rows = self.rows(batch, rank())
            yield torch.randn(rows, 8, generator=generator), torch.randn(rows, 1, generator=generator)


PLAIN: dict[str, Any] = {}


def compare(scenario: Scenario) -> dict[str, Any]:
    """What differs between a plain training and one with recomputation, and what the latter took."""

    def run(strategy: Any) -> Any:
        return train(
            lambda: Lit(scenario.net(), regression),
            Data(scenario.rows),
            strategy=strategy,
            devices=world(),
            use_distributed_sampler=False,
            **scenario.options,
        )

    config = repr((scenario.net, scenario.rows, scenario.ddp, scenario.options))
    plain = PLAIN.get(config) or PLAIN.setdefault(config, run(DDPStrategy(**scenario.ddp)))
    ours = run(RematStrategy(base="ddp", **scenario.remat, **scenario.ddp))
    remat = ours.trainer.strategy.remat
    plan = remat.plan
    return {
        "difference": ours.difference(plain),
        "replayed": ours.replayed_ops,
        "unused": [name for name, p in ours.module.named_parameters() if p.grad is None],
        "ranks": [asdict(figures) for figures in remat.ranks],
        "wish": wish_of(remat),
        "report": "" if plan is None else str(remat.report()),
        "notes": remat.counters.notes,
        "world": ours.trainer.world_size,
        "peaks": peaks_of(remat),
    }


def wish_of(remat: Remat) -> str | None:
    """The plan that this rank would follow by itself, as the figures of ranks name it."""
    if not isinstance(remat.pilot, Pilot) or remat.pilot.main is None:
        return None
    return sharing._digest(remat.pilot.chooser.wishes[remat.pilot.main.number])


def job() -> dict[str, Any]:
    """All scenarios on one rank."""
    torch.set_num_threads(1)
    names = SCENARIOS if world() == 2 else WITH_FOUR
    found = {name: compare(SCENARIOS[name]) for name in names}
    distributed.destroy_process_group()
    return found


def main(folder: Path) -> None:
    """Two ranks, then four."""
    results = {str(count): together(folder / str(count), count, partial(job), SECONDS) for count in (2, 4)}
    (folder / "results.json").write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
