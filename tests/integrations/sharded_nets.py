"""Networks, ways to shard them, and modules that train them, for the tests of sharded parameters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from tests.helpers.training import Lit


class Block(nn.Module):
    """Norm, two products, dropout; with an in-place activation, and a buffer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.act = nn.ReLU(inplace=True)
        self.drop = nn.Dropout(0.2)
        self.down = nn.Linear(2 * width, width)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x + self.down(self.drop(self.act(self.up(self.norm(x)))))


class Net(nn.Module):
    """A stem, blocks, a norm and a head."""

    def __init__(self, width: int = 16, depth: int = 3) -> None:
        super().__init__()
        self.stem = nn.Linear(8, width)
        self.layers = nn.ModuleList([Block(width) for _ in range(depth)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.nn.functional.gelu(self.stem(x))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class Frozen(Net):
    """The stem, a product of every block, and a whole block are not trained."""

    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            layer.up.requires_grad_(False)
        self.layers[1].requires_grad_(False)
        self.stem.requires_grad_(False)


class Unused(Net):
    """A block that no forward ever comes to, and one that only every second one does."""

    def __init__(self) -> None:
        super().__init__()
        self.layers.append(Block(16))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        x = torch.nn.functional.gelu(self.stem(x))
        for layer in self.layers[: 2 + self.calls % 2]:
            x = layer(x)
        return self.head(self.norm(x))


class Shared(Net):
    """One block called twice, and another's result taken by a way that is not its output."""

    def forward(self, x: Tensor) -> Tensor:
        x = torch.nn.functional.gelu(self.stem(x))
        x = self.layers[0](x)
        x = self.layers[1](x) * torch.sigmoid(x)
        x = self.layers[0](torch.tanh(x))
        x = x + self.layers[2](x)
        return self.head(self.norm(x))


class Side(nn.Module):
    """A block that leaves a tensor behind, to be added to the loss, as routers do."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.block = Block(width)
        self.gate = nn.Linear(width, width)
        self.left: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        weight = self.gate(x).softmax(-1)
        self.left = weight.square()
        return self.block(x * weight)


class Sides(nn.Module):
    """Reads what its blocks leave behind."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(8, 16)
        self.layers = nn.ModuleList([Side(16) for _ in range(3)])
        self.head = nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        extra = torch.zeros(())
        for layer in self.layers:
            x = layer(x)
            extra = extra + layer.left.exp().sigmoid().mean()
        return self.head(x) + extra


def blocks(net: nn.Module, mesh: Any, **options: Any) -> None:
    for layer in net.layers:
        fully_shard(layer, mesh=mesh, **options)
    fully_shard(net, mesh=mesh, **options)


def nested(net: nn.Module, mesh: Any) -> None:
    """A unit for each product inside a unit for each block."""
    for layer in net.layers:
        fully_shard(layer.up, mesh=mesh)
        fully_shard(layer.down, mesh=mesh)
        fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)


def grouped(net: nn.Module, mesh: Any) -> None:
    """One unit of two modules."""
    fully_shard([net.norm, net.head], mesh=mesh)
    blocks(net, mesh)


def prefetching(net: nn.Module, mesh: Any) -> None:
    blocks(net, mesh)
    net.layers[0].set_modules_to_forward_prefetch([net.layers[1]])
    net.layers[2].set_modules_to_backward_prefetch([net.layers[1]])


def without_root(net: nn.Module, mesh: Any) -> None:
    for layer in net.layers:
        fully_shard(layer, mesh=mesh)


def lean_backward(net: nn.Module, mesh: Any) -> None:
    """A unit that is not gathered in backward."""
    fully_shard(net.stem, mesh=mesh)
    net.stem.set_unshard_in_backward(False)
    blocks(net, mesh)


def in_bf16(net: nn.Module, mesh: Any) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in net.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(net, mesh=mesh, mp_policy=replace(policy, output_dtype=torch.float32))


def blocks_in_bf16(net: nn.Module, mesh: Any) -> None:
    """Casts on the way into and out of every unit."""
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.float32)
    for layer in net.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(net, mesh=mesh)


class Sharding(Lit):
    """A module that shards its network in ``configure_model``."""

    shard: Callable[[nn.Module, Any], None]

    def configure_model(self) -> None:
        if not any(isinstance(m, FSDPModule) for m in self.net.modules()):
            type(self).shard(self.net, self._device_mesh["data_parallel"])


class Accumulating(Sharding):
    """Two micro-batches for each step of the optimizer, the first of which reduces nothing."""

    resharding = True

    def training_step(self, batch: Any, index: int) -> Tensor:
        last = index % 2 == 1
        self.net.set_requires_gradient_sync(last)
        if not self.resharding:
            self.net.set_reshard_after_backward(last)
        return super().training_step(batch, index)


class Staying(Accumulating):
    """The same with parameters that stay gathered in between."""

    resharding = False


class Manual(Sharding):
    """Backward, reduction and two steps of the optimizer inside the tape."""

    def __init__(self, net: nn.Module, loss: Any) -> None:
        super().__init__(net, loss)
        self.automatic_optimization = False

    def training_step(self, batch: Any, index: int) -> Tensor:
        optimizer = self.optimizers()
        for _ in range(2):
            loss = super().training_step(batch, index)
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return loss


class Flat(Sharding):
    """Optimizers are to be given the flat parameters."""

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.trainer.model.parameters(), lr=self.lr)
