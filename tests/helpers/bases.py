"""One network under each of the bases that several processes can train it with, so that the same is asked of all.

The rank of a process's *data* is that of its replica: processes over which layers are spread have the same batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from lightning_remat import Remat, RematStrategy
from lightning_remat.runtime.memory import Recorder
from tests.helpers.ranks import rank, world
from tests.helpers.training import Lit, Result, regression, train

BATCHES = 6


class Block(nn.Module):
    """Norm, two products, dropout, an activation in place, a buffer; and a branch that not everybody takes."""

    def __init__(self, width: int, taken: Callable[[int], bool] | None) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.drop = nn.Dropout(0.2)
        self.act = nn.ReLU(inplace=True)
        self.down = nn.Linear(2 * width, width)
        self.taken = taken
        self.branch = nn.Linear(width, width) if taken else None
        self.times = 0
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.times += 1
        self.calls += 1
        out = self.down(self.act(self.drop(self.up(self.norm(x)))))
        if self.branch is not None and self.taken is not None and self.taken(self.times):
            out = out + torch.sigmoid(self.branch(torch.tanh(x)))
        return x + out


class Net(nn.Module):
    """A stem, blocks, a norm and a head."""

    def __init__(self, width: int = 32, depth: int = 4, taken: Callable[[int], bool] | None = None) -> None:
        super().__init__()
        self.stem = nn.Linear(8, width)
        self.layers = nn.ModuleList([Block(width, taken) for _ in range(depth)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.nn.functional.gelu(self.stem(x))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def spread(net: Net, mesh: Any) -> None:
    """The products of each block over the processes of a mesh."""
    for layer in net.layers:
        parallelize_module(layer, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def shard(net: Net, mesh: Any) -> None:
    """A unit for each block, and one for the rest."""
    for layer in net.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)
    for module in net.modules():
        if isinstance(module, FSDPModule):
            # What one process has no gradient for is reduced as zeros; otherwise their sums would not match.
            module.set_reduce_scatter_unused_params(True)


_placed: WeakSet[nn.Module] = WeakSet()  # Lightning calls configure_model more than once


class Placed(Lit):
    """Spreads and shards its network as the strategy's mesh says."""

    accumulating = False

    def configure_model(self) -> None:
        mesh = self._device_mesh
        if mesh is None or self.net in _placed:
            return
        _placed.add(self.net)
        if mesh["tensor_parallel"].size() > 1:
            spread(self.net, mesh["tensor_parallel"])
        if mesh["data_parallel"].size() > 1:
            shard(self.net, mesh["data_parallel"])

    def training_step(self, batch: Any, index: int) -> Tensor:
        if self.accumulating and isinstance(self.net, FSDPModule):
            # Lightning leaves it to the module which of its batches are reduced.
            self.net.set_requires_gradient_sync(index % 2 == 1)
        return super().training_step(batch, index)


class OnCpu(FSDPStrategy):
    """Lightning refuses ``FSDPStrategy`` itself where there is no GPU, and names no device for the CPU."""

    def _setup_model(self, model: nn.Module) -> nn.Module:
        return FullyShardedDataParallel(
            model,
            cpu_offload=self.cpu_offload,
            mixed_precision=self.mixed_precision_config,
            sharding_strategy=self.sharding_strategy,
            device_id=torch.device("cpu"),
            **self.kwargs,
        )


@dataclass(frozen=True, kw_only=True)
class Base:
    """A strategy of Lightning's, and what it needs."""

    strategy: Any
    options: Callable[[], dict[str, Any]] = dict
    module: type[Lit] = Lit
    spread: Callable[[], int] = lambda: 1  # over how many processes a layer is spread

    def data_rank(self) -> int:
        """Which data this process has."""
        return rank() // self.spread()


def model_parallel(spread: Callable[[], int]) -> Base:
    """Layers over as many processes, and what remains of these for shards."""
    return Base(
        strategy=ModelParallelStrategy,
        options=lambda: {"data_parallel_size": world() // spread(), "tensor_parallel_size": spread()},
        module=Placed,
        spread=spread,
    )


BASES = {
    "single device": Base(strategy="single_device"),
    "ddp": Base(strategy=DDPStrategy, options=lambda: {"find_unused_parameters": True}),
    "fsdp1": Base(strategy=OnCpu, options=lambda: {"auto_wrap_policy": {Block}}),
    "fsdp2": model_parallel(lambda: 1),
    "tensor parallel": model_parallel(world),
    "tensor parallel and fsdp2": model_parallel(lambda: 2),
}


class Data:
    """As many batches on each rank, with rows by batch and rank."""

    def __init__(self, rows: Callable[[int, int], int], data_rank: int) -> None:
        self.rows = rows
        self.rank = data_rank

    def __len__(self) -> int:
        return BATCHES

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(5 + self.rank)
        for batch in range(BATCHES):
            rows = self.rows(batch, self.rank)
            yield torch.randn(rows, 8, generator=generator), torch.randn(rows, 1, generator=generator)


class Peak(Callback):
    """Counts what the last batches take, from their beginning to the end of backward, one by one.

    Attributes:
        bytes: above what was there at the beginning.
    """

    def __init__(self) -> None:
        self.bytes: list[int] = []
        self._recorder: Recorder | None = None

    def on_train_batch_start(self, trainer: Trainer, module: Any, batch: Any, index: int) -> None:
        if index >= BATCHES - 2:
            self._recorder = Recorder()
            self._recorder.start()

    def on_after_backward(self, trainer: Trainer, module: Any) -> None:
        if self._recorder is not None:
            self._recorder.stop()
            self.bytes.append(self._recorder.result().peak_bytes)
            self._recorder = None


def local(value: Any) -> Any:
    """Tensors as this process has them."""
    if isinstance(value, Tensor):
        return (value.to_local() if isinstance(value, DTensor) else getattr(value, "_local_tensor", value)).clone()
    if isinstance(value, dict):
        return {name: local(v) for name, v in value.items()}
    return [local(v) for v in value] if isinstance(value, (list, tuple)) else value


def run(
    base: Base,
    remat: dict[str, Any] | None,
    *,
    net: Callable[[], nn.Module] = Net,
    rows: Callable[[int, int], int],
    more: dict[str, Any] | None = None,
    **options: Any,
) -> Result:
    """Train under a base.

    Args:
        base: which.
        remat: options of RematStrategy; None: the base by itself.
        net: makes the network.
        rows: of a batch, by its number and the rank of the data.
        more: options of the strategy.
        **options: of the trainer, and more of :func:`~tests.helpers.training.train`.
    """
    strategy: Any = base.strategy
    given = {**base.options(), **(more or {})}
    if remat is not None:
        strategy = RematStrategy(base=strategy, **given, **remat)
    elif isinstance(strategy, str):
        strategy = "auto"
    else:
        strategy = strategy(**given)
    accumulating = options.get("accumulate_grad_batches", 1) > 1
    made = type("Made", (base.module,), {"accumulating": accumulating})
    result = train(
        lambda: made(net(), regression),
        Data(rows, base.data_rank()),
        strategy=strategy,
        devices=world(),
        use_distributed_sampler=False,
        **options,
    )
    for name in ("gradients", "state", "optimizers", "buffers"):
        setattr(result, name, local(getattr(result, name)))
    return result


def engine(result: Result) -> Remat:
    """What recomputed."""
    found: Remat = result.trainer.strategy.remat
    return found
