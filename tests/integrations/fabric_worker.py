"""Two processes that train together in a Fabric loop; test_fabric.py reads what they have found.

python -m tests.integrations.fabric_worker FOLDER
"""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.strategies import DDPStrategy
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_remat import ConfigurationError, Remat
from tests.helpers.exact import recompute_all
from tests.helpers.ranks import rank, together
from tests.helpers.training import Net
from tests.integrations.fabric_loop import Loop, batches

SECONDS = 240


class Branching(nn.Module):
    """Of its two branches one is used, by batch and by rank."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = Net()
        self.branches = nn.ModuleList([Net(width=8, depth=2), Net(width=8, depth=2)])
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.trunk(x) + self.branches[(self.calls + rank()) % 2](x)


def ddp(**options: Any) -> Callable[[], dict[str, Any]]:
    return lambda: {"strategy": DDPStrategy(process_group_backend="gloo", **options)}


LOOPS = {
    "ddp": Loop(settings=lambda: {"strategy": "ddp"}, accumulate=2),
    "bound, clipped": Loop(settings=ddp(), bind=True, clip=0.1),
    "bf16-mixed": Loop(settings=lambda: {"strategy": "ddp", "precision": "bf16-mixed"}, accumulate=2),
    "static_graph": Loop(settings=ddp(static_graph=True)),
    "find_unused_parameters": Loop(settings=ddp(find_unused_parameters=True), net=Branching, accumulate=2),
    "gradients as bucket views": Loop(settings=ddp(gradient_as_bucket_view=True)),
}

WAYS: dict[str, Callable[[], Remat]] = {
    "full": lambda: Remat(policy="full"),
    "selective": lambda: Remat(policy="selective"),
    "recompute all": lambda: Remat(policy=recompute_all),
    "budget": lambda: Remat(budget=1),
    "another on each rank": lambda: Remat(policy=["full", "selective"][rank()]),
}


def compare(loop: Loop) -> dict[str, Any]:
    """By way, what differs and how much was computed again."""
    data = batches(6, rank(), rows=6 + 2 * rank())  # other sizes on each rank
    plain = loop.run(None, data, launch=True)
    found: dict[str, Any] = {}
    for name, make in WAYS.items():
        ours = loop.run(make(), data, launch=True)
        assert isinstance(ours.model._forward_module, DistributedDataParallel)
        found[name] = {"difference": ours.difference(plain), "replayed": ours.replayed}
        assert ours.fabric.world_size == 2
    return found


def attempted() -> str:
    """What running a replica's step again by one process alone comes to."""
    run = LOOPS["ddp"].run(None, batches(1, rank()), launch=True)
    try:
        Remat(policy="full").attempt(lambda: None, run.model)
    except ConfigurationError as error:
        return str(error)
    return ""


def job() -> dict[str, Any]:
    """All loops on one rank."""
    torch.set_num_threads(1)
    # Fabric is told that it was started from outside.
    os.environ.update(LT_ACCELERATOR="cpu", LT_DEVICES="2", LT_CLI_USED="0")
    results: dict[str, Any] = {name: compare(loop) for name, loop in LOOPS.items()}
    results["attempt"] = attempted()
    distributed.destroy_process_group()
    return results


def main(folder: Path) -> None:
    """Two ranks."""
    (folder / "results.json").write_text(json.dumps(together(folder, 2, job, SECONDS)))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
