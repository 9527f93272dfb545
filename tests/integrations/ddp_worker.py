"""Two processes that train together; tests/integrations/test_ddp.py reads what they have found.

Each scenario is run plainly and under recomputation, and compared on each rank.

    python -m tests.integrations.ddp_worker FOLDER
"""

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_remat import RematCallback, RematStrategy
from tests.helpers.exact import recompute_all
from tests.helpers.ranks import rank, together
from tests.helpers.training import Lit, Net, regression, regression_data, train

SECONDS = 240


class Branching(nn.Module):
    """Of its two branches one is used, by batch and by rank; the other's parameters get no gradient there."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = Net()
        self.branches = nn.ModuleList([Net(width=8, depth=2), Net(width=8, depth=2)])
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        branch = self.branches[(self.calls + rank()) % 2]
        return self.trunk(x) + branch(x)


class Manual(Lit):
    """Backward inside the step, and so DDP's reduction inside the tape."""

    def __init__(self, net: nn.Module, loss: Any) -> None:
        super().__init__(net, loss)
        self.automatic_optimization = False

    def training_step(self, batch: Any, index: int) -> Tensor:
        loss = super().training_step(batch, index)
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return loss


class Kept(DDPStrategy):
    """A user's own strategy."""


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """What is compared with what."""

    ours: Callable[[], Any]
    plain: Callable[[], Any] = lambda: "ddp"
    net: Callable[[], nn.Module] = Net
    module: Callable[..., Any] = Lit
    callback: Callable[[], RematCallback] | None = None
    callbacks: Callable[[], list[Callback]] = list
    options: dict[str, Any] = field(default_factory=dict)
    replays: bool = True  # whether the last step recomputes anything


def with_options(**options: Any) -> dict[str, Any]:
    """The two sides of a scenario with options of DDP's."""
    return {
        "plain": lambda: DDPStrategy(**options),
        "ours": lambda: RematStrategy(base="ddp", policy=recompute_all, **options),
    }


SCENARIOS = {
    # Everything fits, so that by the last step there is no tape any more.
    "remat_ddp": Scenario(ours=lambda: "remat_ddp", options={"accumulate_grad_batches": 2}, replays=False),
    "remat on two devices": Scenario(ours=lambda: "remat", replays=False),
    "full": Scenario(ours=lambda: RematStrategy(base="ddp", policy="full"), options={"accumulate_grad_batches": 2}),
    "static_graph": Scenario(**with_options(static_graph=True)),
    # From the second epoch on: DDP itself fails if a static graph's first step is one that only accumulates.
    "static_graph, accumulated": Scenario(
        **with_options(static_graph=True),
        options={"max_epochs": 2},
        callbacks=lambda: [GradientAccumulationScheduler(scheduling={1: 2})],
    ),
    "find_unused_parameters": Scenario(**with_options(find_unused_parameters=True), net=Branching),
    "unused, accumulated": Scenario(
        **with_options(find_unused_parameters=True), net=Branching, options={"accumulate_grad_batches": 2}
    ),
    "gradients as bucket views": Scenario(**with_options(gradient_as_bucket_view=True)),
    "small buckets": Scenario(**with_options(bucket_cap_mb=0.001)),
    "another policy on each rank": Scenario(
        ours=lambda: RematStrategy(base="ddp", policy=["full", "selective"][rank()]),
        options={"accumulate_grad_batches": 2},
    ),
    "on one rank only": Scenario(ours=lambda: RematStrategy(base="ddp", policy=["none", recompute_all][rank()])),
    "manual optimization": Scenario(**with_options(), module=Manual),
    # Less than any plan needs: the one with the smallest peak.
    "budget": Scenario(ours=lambda: RematStrategy(base="ddp", budget=1), options={"accumulate_grad_batches": 2}),
    # Most memory is taken in the optimizer's step, which is a part of this one: no plan drops anything.
    "budget, manual optimization": Scenario(
        ours=lambda: RematStrategy(base="ddp", budget=1), module=Manual, replays=False
    ),
    "bf16-mixed": Scenario(
        ours=lambda: RematStrategy(base="ddp", policy="selective"), options={"precision": "bf16-mixed"}
    ),
    "callback": Scenario(
        plain=Kept, ours=Kept, callback=lambda: RematCallback(policy="full"), options={"accumulate_grad_batches": 2}
    ),
}


def data() -> Any:
    """Other batches on each rank."""
    batches = list(regression_data(8))
    return torch.utils.data.DataLoader(batches[rank() * 4 : rank() * 4 + 4], batch_size=None)


def compare(scenario: Scenario) -> dict[str, Any]:
    def run(strategy: Any, callback: RematCallback | None) -> Any:
        return train(
            lambda: scenario.module(scenario.net(), regression),
            data(),
            strategy=strategy,
            callbacks=lambda: [*scenario.callbacks(), *([callback] if callback else [])],
            devices=2,
            use_distributed_sampler=False,
            **scenario.options,
        )

    plain = run(scenario.plain(), None)
    callback = scenario.callback() if scenario.callback else None
    ours = run(scenario.ours(), callback)
    remat = callback.remat if callback else ours.trainer.strategy.remat
    return {
        "difference": ours.difference(plain),
        "replayed": remat.stats.replayed_ops,
        "policy": remat.policy,
        "blocks": len(remat.blocks),
        "ddp": isinstance(ours.trainer.strategy, DDPStrategy),
        "world": ours.trainer.world_size,
        "gradients": len(ours.gradients),
        "epochs": ours.trainer.current_epoch,
        "wrapped": isinstance(ours.module, DistributedDataParallel),
    }


def job() -> dict[str, Any]:
    """All scenarios on one rank."""
    torch.set_num_threads(1)
    results = {name: compare(scenario) for name, scenario in SCENARIOS.items()}
    distributed.destroy_process_group()
    return results


def main(folder: Path) -> None:
    """Two ranks."""
    (folder / "results.json").write_text(json.dumps(together(folder, 2, job, SECONDS)))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
