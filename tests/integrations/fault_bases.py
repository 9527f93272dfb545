"""Every base, in a short training in which something can happen on one of the ranks; for fault_worker.py."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader

from lightning_remat import Remat, RematCallback, RematStrategy
from tests.helpers.bits import random_streams
from tests.helpers.ranks import rank, world
from tests.helpers.seed import seed_everything
from tests.helpers.training import Lit, regression, trainer_for
from tests.integrations.sharded_worker import Block, Net, OnCpu, blocks


def out_of_memory() -> None:
    """What CUDA's allocator raises."""
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB.")


def mistake() -> None:
    """The user's own."""
    raise ValueError("a mistake in the model")


def timed_out() -> None:
    """A collective that failed although all others live."""
    raise RuntimeError("[gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 1000ms for recv operation")


def either() -> None:
    """Two at once, of which neither is a consequence of the other."""
    if rank() == 0:
        raise RuntimeError("a mistake in the model")
    out_of_memory()


def killed() -> None:
    """As by the system when its memory runs out."""
    os.kill(os.getpid(), signal.SIGKILL)


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What happens, once, at which place of which step, on which ranks.

    Attributes:
        base: a function of this module that trains.
        options: of that.
        place: "forward", "backward", "optimizer step", "validation", "checkpoint", "all-gather", "exchange".
        step: counted from 1.
    """

    base: Callable[..., Any]
    place: str
    what: Callable[[], None] = out_of_memory
    ranks: tuple[int, ...] = (1,)
    count: int = 2
    step: int = 2
    options: dict[str, Any] = field(default_factory=dict)


class Trigger:
    """Lets the fault of a scenario happen when its place is reached."""

    fault: Fault | None = None
    step = 0

    @classmethod
    def at(cls, place: str) -> None:
        fault = cls.fault
        if fault is not None and place == fault.place and cls.step == fault.step and rank() in fault.ranks:
            cls.fault = None
            fault.what()


class Fails(torch.autograd.Function):
    """The identity, in which something happens."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        Trigger.at("forward")
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        Trigger.at("backward")
        return gradient


class Faulty(Net):
    """Something happens between its second and third block."""

    def forward(self, x: Tensor) -> Tensor:
        Trigger.at("stem")
        x = torch.nn.functional.gelu(self.stem(x))
        for i, layer in enumerate(self.layers):
            x = layer(x)
            if i == 1:
                x = Fails.apply(x)
        return self.head(self.norm(x))


class AdamW(torch.optim.AdamW):
    """Something happens when it steps."""

    def step(self, closure: Any = None) -> Any:
        loss = closure() if closure is not None else None
        Trigger.at("optimizer step")
        super().step()
        return loss


class Module(Lit):
    """Counts steps for the trigger, validates, and saves."""

    shard: Callable[[nn.Module, Any], None] | None = None

    def training_step(self, batch: Any, index: int) -> Tensor:
        Trigger.step = index + 1
        return super().training_step(batch, index)

    def validation_step(self, batch: Any, index: int) -> None:
        Trigger.at("validation")
        self.log("validated", self.loss(self.net, batch), sync_dist=True)

    def on_save_checkpoint(self, checkpoint: Any) -> None:
        Trigger.at("checkpoint")

    def configure_optimizers(self) -> Any:
        return AdamW(self.parameters(), lr=1e-2)


class Sharding(Module):
    """The same, sharded or spread."""

    def configure_model(self) -> None:
        if not any(isinstance(p, DTensor) for p in self.net.parameters()):
            assert type(self).shard is not None
            type(self).shard(self.net, self._device_mesh)


class Sharded(Sharding):
    @staticmethod
    def shard(net: nn.Module, mesh: Any) -> None:
        blocks(net, mesh["data_parallel"])


class Spread(Sharding):
    @staticmethod
    def shard(net: nn.Module, mesh: Any) -> None:
        spread(net, mesh["tensor_parallel"])


def spread(net: Any, mesh: Any) -> None:
    for layer in net.layers:
        layer.act = nn.ReLU()  # in place, PyTorch refuses it here
        parallelize_module(layer, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def batches(same: bool, count: int = 4) -> list[Any]:
    """Other ones on each rank, or the same."""
    generator = torch.Generator().manual_seed(5 + (0 if same else rank()))
    return [(torch.randn(6, 8, generator=generator), torch.randn(6, 1, generator=generator)) for _ in range(count)]


def fit(module: type[Module], strategy: Any, folder: Path, same: bool = False, **options: Any) -> dict[str, Any]:
    """A training under Lightning."""
    seed_everything(3)
    lit = module(Faulty(), regression)
    saving = options.pop("saving", None)
    place, always = folder / "checkpoints", saving == "always"
    callbacks: list[Any] = [ModelCheckpoint(place, every_n_train_steps=2, save_on_exception=always)] if saving else []
    callbacks += options.pop("others", [])
    trainer = trainer_for(
        strategy,
        callbacks,
        devices=world(),
        use_distributed_sampler=False,
        default_root_dir=str(folder),
        enable_checkpointing=bool(saving),
        num_sanity_val_steps=0,
        limit_val_batches=options.pop("limit_val_batches", 0),
        val_check_interval=2,
        **options,
    )
    loaders = [DataLoader(batches(same), batch_size=None), DataLoader(batches(same), batch_size=None)]
    seed_everything(4)
    trainer.fit(lit, *loaders)
    remat = getattr(trainer.strategy, "remat", None)
    return {
        "left": left(lit.net, lit.losses, [o.state_dict() for o in trainer.optimizers]),
        "retries": remat.counters.retries if remat is not None else None,
    }


def left(net: nn.Module, losses: list[Tensor], optimizers: Any) -> dict[str, Any]:
    """What a training leaves behind on this rank."""
    state = {name: local(t) for name, t in net.state_dict().items()}
    return {"state": state, "losses": losses, "optimizers": local(optimizers), "streams": random_streams()}


def local(value: Any) -> Any:
    if isinstance(value, Tensor):
        return (value.to_local() if isinstance(value, DTensor) else value).detach().clone()
    if isinstance(value, dict):
        return {name: local(v) for name, v in value.items()}
    return [local(v) for v in value] if isinstance(value, (list, tuple)) else value


def ddp(folder: Path, plainly: bool, strategy: Any = None, ours: Any = None, **options: Any) -> Any:
    made: Any = DDPStrategy if plainly else partial(RematStrategy, base="ddp", **(ours or {"policy": "full"}))
    return fit(Module, made(**(strategy or {})), folder, **options)


def callback(folder: Path, plainly: bool) -> Any:
    """A strategy of the user's own."""
    return fit(Module, DDPStrategy(), folder, others=[] if plainly else [RematCallback(policy="full")])


def second(folder: Path, plainly: bool) -> Any:
    """A training that a mistake ends on all, which the program gets over, and then another."""
    fault = Trigger.fault
    Trigger.fault = Fault(base=ddp, place="forward", what=mistake, ranks=(0, 1))
    try:
        ddp(folder, plainly)
    except ValueError:
        Trigger.fault = fault
    return ddp(folder, plainly)


def fsdp1(folder: Path, plainly: bool, **options: Any) -> Any:
    made: Any = OnCpu if plainly else partial(RematStrategy, base=OnCpu, policy="full")
    return fit(Module, made(auto_wrap_policy={Block}, state_dict_type="sharded"), folder, **options)


def fsdp2(folder: Path, plainly: bool, **options: Any) -> Any:
    made: Any = ModelParallelStrategy
    if not plainly:
        made = partial(RematStrategy, base="ModelParallelStrategy", policy="full")
    strategy = made(data_parallel_size=world(), tensor_parallel_size=1, save_distributed_checkpoint=True)
    return fit(Sharded, strategy, folder, **options)


def tensor_parallel(folder: Path, plainly: bool, **options: Any) -> Any:
    made: Any = ModelParallelStrategy
    if not plainly:
        made = partial(RematStrategy, base="ModelParallelStrategy", policy="full")
    strategy = made(data_parallel_size=1, tensor_parallel_size=world(), save_distributed_checkpoint=True)
    return fit(Spread, strategy, folder, same=True, **options)


def loop(folder: Path, plainly: bool, parallel: bool = False) -> Any:
    """A loop of one's own: layers are spread, or gradients are averaged by hand."""
    if not distributed.is_initialized():
        distributed.init_process_group("gloo", rank=rank(), world_size=world())
    seed_everything(3)
    net = Faulty()
    if parallel:
        spread(net, init_device_mesh("cpu", (world(),)))
    optimizer = AdamW(net.parameters(), lr=1e-2)
    remat = Remat("none" if plainly else "full")
    losses = []
    for number, batch in enumerate(batches(parallel), 1):
        Trigger.step = number

        def step(batch: Any = batch) -> Tensor:
            with remat:
                loss = regression(net, batch)
            loss.backward()
            if not parallel:
                for p in net.parameters():
                    distributed.all_reduce(p.grad)
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        losses.append(remat.attempt(step, net, optimizer))
    return {"left": left(net, losses, optimizer.state_dict()), "retries": remat.counters.retries}
