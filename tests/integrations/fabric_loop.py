"""Short trainings in a Fabric loop, with all that each of them leaves behind; run here by one process, or by two."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.fabric import Fabric
from torch import Tensor, nn

from lightning_remat import Remat
from tests.helpers.bits import difference_in_bits, random_streams
from tests.helpers.seed import seed_everything
from tests.helpers.training import Net

SETTINGS: dict[str, Any] = {"accelerator": "cpu", "devices": 1}


@dataclass
class Run:
    """What a training leaves behind; `fabric`, `model` and `remat` are for looking at."""

    fabric: Fabric
    model: Any
    remat: Remat | None
    replayed: int = 0
    left: dict[str, Any] = field(default_factory=dict)

    def difference(self, other: Run) -> list[str]:
        """Name everything in which two trainings differ by a bit."""
        return difference_in_bits(self.left, other.left)


@dataclass(frozen=True, kw_only=True)
class Loop:
    """A loop as users of Fabric write it.

    Attributes:
        net: builds the model.
        settings: of Fabric.
        accumulate: batches to a step of the optimizer.
        clip: the largest norm of gradients.
        bind: whether the engine is shown the model before the first step.
    """

    net: Callable[[], nn.Module] = Net
    settings: Callable[[], dict[str, Any]] = dict
    accumulate: int = 1
    clip: float | None = None
    bind: bool = False

    def run(self, remat: Remat | None, batches: Iterable[Any], launch: bool = False) -> Run:
        """Train from a known seed."""
        seed_everything(3)
        fabric = Fabric(**(SETTINGS | self.settings()))
        if launch:
            fabric.launch()
        module = self.net()
        model, optimizer = fabric.setup(module, torch.optim.AdamW(module.parameters(), lr=1e-2))
        done = Run(fabric, model, remat)
        if remat is not None and self.bind:
            remat.bind(model.module)
        seed_everything(4)
        losses: list[Tensor] = []
        gradients: list[dict[str, Any]] = []
        for number, (x, y) in enumerate(batches, 1):
            steps = number % self.accumulate == 0
            with fabric.no_backward_sync(model, enabled=not steps):
                with nullcontext() if remat is None else remat:
                    loss = (model(x) - y).square().mean()
                fabric.backward(loss / self.accumulate)
            losses.append(loss.detach().clone())
            done.replayed += remat.stats.replayed_ops if remat is not None else 0
            gradients.append({n: None if p.grad is None else p.grad.clone() for n, p in module.named_parameters()})
            if steps:
                if self.clip is not None:
                    fabric.clip_gradients(model, optimizer, max_norm=self.clip, error_if_nonfinite=False)
                optimizer.step()
                optimizer.zero_grad()
        scaler = getattr(fabric._precision, "scaler", None)
        done.left = {
            "losses": losses,
            "gradients": gradients,
            "state": {n: t.clone() for n, t in module.state_dict().items()},
            "optimizer": optimizer.state_dict(),
            "streams": random_streams(),
            "scaler": scaler.state_dict() if scaler is not None else None,
        }
        return done


def batches(count: int = 6, rank: int = 0, rows: int = 6) -> list[tuple[Tensor, ...]]:
    """The same for every run, and others on each rank."""
    generator = torch.Generator().manual_seed(5 + rank)
    return [
        (torch.randn(rows, 8, generator=generator), torch.randn(rows, 1, generator=generator)) for _ in range(count)
    ]
