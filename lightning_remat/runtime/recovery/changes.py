"""What users say that their step changes, sorted into a snapshot."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import Optimizer

from lightning_remat.errors import ConfigurationError
from lightning_remat.runtime.recovery.snapshot import Snapshot

Change: TypeAlias = nn.Module | Optimizer | GradScaler | LRScheduler
"""What a step may change; also what Fabric and Accelerate wrap around an optimizer."""


def snapshot_of(changes: Sequence[Change]) -> Snapshot:
    """A snapshot of all of them.

    Raises:
        ConfigurationError: one cannot be put back by this process alone.
    """
    modules = [c for c in changes if isinstance(c, nn.Module)]
    scalers = [c for c in changes if isinstance(c, GradScaler)]
    schedulers = [c for c in changes if isinstance(c, LRScheduler)]
    # Of wrappers the optimizer inside: it is what runs hooks before a step, and what has the state.
    optimizers = [
        getattr(c, "optimizer", c) for c in changes if not isinstance(c, (nn.Module, GradScaler, LRScheduler))
    ]
    for module in modules:
        if any(isinstance(m, DistributedDataParallel) for m in module.modules()):
            raise ConfigurationError(
                f"attempt(step, {type(module).__name__}): the model is a replica (DistributedDataParallel), and the "
                "other processes would not know that its step is run again. Run the step without attempt, with a "
                "smaller budget=; or train with Lightning's Trainer and RematStrategy(base='ddp'), which does this."
            )
        # Their gradients are collected by hooks; parameters of ZeRO's first stages have the second attribute.
        if any(type(m).__name__ == "DeepSpeedEngine" for m in module.modules()) or any(
            hasattr(p, "_hp_mapping") for p in module.parameters()
        ):
            raise ConfigurationError(
                f"attempt(step, {type(module).__name__}): DeepSpeed trains the model, and may have reduced gradients "
                "and counted the batch when the step fails, neither of which can be taken back. Run the step without "
                "attempt, with a smaller budget=."
            )
    return Snapshot(modules, optimizers, manual=bool(optimizers), scalers=scalers, schedulers=schedulers)
