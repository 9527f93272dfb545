"""Four processes: layers are spread over two, and each part is sharded over two; run by test_both_parallel.py.

The language model of tensor_parallel_worker.py, trained plainly and under recomputation, and compared on each rank.

    python -m tests.integrations.both_parallel_worker FOLDER [SCENARIO ...]
"""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from lightning_remat import Remat, ReplayError
from tests.helpers.exact import recompute_all
from tests.helpers.ranks import rank, together, world
from tests.helpers.seed import seed_everything
from tests.integrations.tensor_parallel_worker import LOSSES, Model, Scenario, batches, compare, spread

SECONDS = 240


def blocks(model: Model, mesh: DeviceMesh, **options: Any) -> None:
    """A unit for each block, and one for the rest."""
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)


def parts(model: Model, mesh: DeviceMesh) -> None:
    """Units inside of units."""
    for block in model.blocks:
        fully_shard(block.attention, mesh=mesh)
    blocks(model, mesh)


def frozen(model: Model, mesh: DeviceMesh) -> None:
    """A block and a product of another are not trained."""
    model.blocks[1].requires_grad_(False)
    model.blocks[2].up.requires_grad_(False)
    blocks(model, mesh)


IN_BF16 = partial(blocks, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
STAYING = partial(blocks, reshard_after_forward=False)
OWN: list[Any] = ["full", "selective", "none", recompute_all]


def under(policy: Any, shard: Any = blocks, **options: Any) -> Scenario:
    """A scenario under a fixed policy."""
    return Scenario(remat=lambda: Remat(policy), shard=shard, **options)


SCENARIOS = {
    "everything": under(recompute_all, less=0.95),
    "losses": under(recompute_all, **LOSSES),
    "units in units": under(recompute_all, parts),
    "not resharded": under(recompute_all, STAYING),
    "frozen": under(recompute_all, frozen),
    "bf16": under(recompute_all, IN_BF16),
    "accumulated": under("full", micro_batches=2),
    "smallest": Scenario(remat=lambda: Remat(budget=1), shard=blocks, less=0.95),
    "another on each rank": Scenario(remat=lambda: Remat(OWN[rank()]), shard=blocks),
}


def changed(mesh: DeviceMesh) -> str:
    """An optimizer steps between forward and backward."""
    seed_everything(3)
    model = Model()
    spread(model, mesh["spread"], sequence=True)
    blocks(model, mesh["sharded"])
    remat = Remat(recompute_all)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    (x, _), *_ = batches()
    with remat:
        first, second = model(x).square().sum(), model(x).sum()
    second.backward()
    optimizer.step()
    try:
        first.backward()
    except ReplayError as error:
        return str(error)
    return "nothing"


def job(names: list[str]) -> dict[str, Any]:
    """Scenarios, on one rank."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", rank=rank(), world_size=world())
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("sharded", "spread"))
    found: dict[str, Any] = {name: compare(SCENARIOS[name], mesh) for name in names}
    found["changed"] = changed(mesh)
    distributed.destroy_process_group()
    return found


def main(folder: Path, *names: str) -> None:
    """Four ranks."""
    results = together(folder, 4, partial(job, list(names or SCENARIOS)), SECONDS)
    (folder / "results.json").write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
