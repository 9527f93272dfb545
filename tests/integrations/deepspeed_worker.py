"""Two processes that train under DeepSpeed; test_deepspeed.py reads what they have found. DeepSpeed must be installed.

    python -m tests.integrations.deepspeed_worker FOLDER

Lightning takes DeepSpeed on CUDA only, DeepSpeed itself also runs on the CPU. Here Lightning's checks for a CUDA device
are answered for it; all else is as it is.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

os.environ["DS_ACCELERATOR"] = "cpu"  # read when DeepSpeed is imported

import lightning.pytorch.strategies.deepspeed as lightnings
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.accelerators import CPUAccelerator
from torch import Tensor, distributed, nn

from lightning_remat import NoMemoryLeft, RematStrategy
from tests.helpers.bits import difference_in_bits, random_streams
from tests.helpers.exact import recompute_all
from tests.helpers.ranks import rank, together
from tests.helpers.seed import seed_everything
from tests.helpers.training import Net, regression

BATCHES = 6
SECONDS = 400

SCENARIOS: dict[str, dict[str, Any]] = {
    f"stage {stage}, {name}": {"stage": stage, **remat}
    for stage in (1, 2)
    for name, remat in {
        "everything": {"policy": recompute_all},
        "full": {"policy": "full"},
        "selective": {"policy": "selective"},
        "budget": {"budget": 1},
    }.items()
}


class _NoDevice(argparse.Namespace):
    """What Lightning hands to DeepSpeed, with -1 for the index of a device that has none."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**{name: -1 if value is None else value for name, value in given.items()})


def admit_the_cpu() -> None:
    """Let Lightning's strategy run where there is no CUDA device."""
    module: Any = lightnings
    module.CUDAAccelerator = CPUAccelerator
    module._validate_device_index_selection = lambda devices: None
    module.argparse = type("argparse", (), {"Namespace": _NoDevice})


class Lit(LightningModule):
    """Nothing but a network and its losses."""

    def __init__(self, fails_at: int = -1) -> None:
        super().__init__()
        self.net = Net(depth=4)
        self.losses: list[Tensor] = []
        self.fails_at = fails_at

    def training_step(self, batch: Any, index: int) -> Tensor:
        if index == self.fails_at:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB. (This is made up.)")
        loss = regression(self.net, batch)
        self.losses.append(loss.detach().clone())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Data:
    """Batches of another size on each rank."""

    def __len__(self) -> int:
        return BATCHES

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(5 + rank())
        for _ in range(BATCHES):
            rows = 8 + 4 * rank()
            yield torch.randn(rows, 8, generator=generator), torch.randn(rows, 1, generator=generator)


def train(strategy: Any, module: nn.Module) -> dict[str, Any]:
    """What a training leaves behind."""
    trainer = Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=2,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        accumulate_grad_batches=2,
        gradient_clip_val=0.5,
        default_root_dir=sys.argv[1],
    )
    trainer.fit(module, Data())
    weights = {name: p.detach().clone() for name, p in module.named_parameters()}
    return {"losses": module.losses, "weights": weights, "streams": random_streams()}


def job() -> dict[str, Any]:
    """All scenarios on one rank."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    admit_the_cpu()
    options = {"process_group_backend": "gloo", "logging_batch_size_per_gpu": 8}
    found: dict[str, Any] = {}
    plain: dict[int, Any] = {}
    for name, scenario in SCENARIOS.items():
        stage = scenario["stage"]
        make = partial(RematStrategy, lightnings.DeepSpeedStrategy, **scenario, **options)
        if stage not in plain:
            seed_everything(3)
            plain[stage] = train(lightnings.DeepSpeedStrategy(stage=stage, **options), Lit())
        seed_everything(3)
        strategy = make()
        ours = train(strategy, Lit())
        found[name] = {
            "difference": difference_in_bits(ours, plain[stage]),
            "replayed": strategy.remat.stats.replayed_ops,
        }
    seed_everything(3)
    try:
        train(make(), Lit(fails_at=2))
        found["failed"] = "did not"
    except NoMemoryLeft as error:
        found["failed"] = str(error)
    distributed.destroy_process_group()
    return found


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    (folder / "results.json").write_text(json.dumps(together(folder / "two", 2, job, SECONDS), indent=2))
