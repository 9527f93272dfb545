"""What is refused where parameters are sharded, what raises, and what a step takes; parts of sharded_worker.py."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from lightning_remat import Remat, ReplayError
from lightning_remat.runtime.memory import measure_peak
from tests.helpers.exact import recompute_all
from tests.helpers.quiet import quiet_collectives
from tests.integrations.sharded_nets import Net, Sharding, Sides


class OutOfMemory(Sharding):
    """Fails in its second batch, as often as it is run."""

    def training_step(self, batch: Any, index: int) -> Tensor:
        loss = super().training_step(batch, index)
        if index == 1:
            raise torch.OutOfMemoryError("made up")
        return loss


def sharded(net: nn.Module) -> nn.Module:
    for layer in net.layers:
        fully_shard(layer)
    fully_shard(net)
    return net


def leaked() -> str:
    """What a block has left behind is all that backward starts from, so that FSDP does not see that it begins."""
    net, remat = sharded(Sides()), Remat(policy=recompute_all)
    with remat:
        net(torch.ones(4, 8))
    try:
        net.layers[0].left.sum().backward()
    except ReplayError as error:
        return str(error)
    return "nothing"


def changed() -> str:
    """Two forward passes, and a step of the optimizer before the backward pass of the first."""
    net, remat = sharded(Net()), Remat(policy=recompute_all)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    with remat:
        first, second = net(torch.ones(4, 8)).sum(), net(torch.zeros(4, 8)).sum()
    second.backward()
    optimizer.step()
    try:
        first.backward()
    except ReplayError as error:
        return str(error)
    return "nothing"


def peaks() -> dict[str, Any]:
    """Peak memory of a step, plain and under recomputation, with what was predicted under a budget."""
    found: dict[str, Any] = {}
    for name, options in {"plain": None, "full": {"policy": "full"}, "budget": {"budget": 1}}.items():
        torch.manual_seed(1)
        net = sharded(Net(width=32, depth=8))
        remat = Remat(**options) if options else nullcontext()
        optimizer = torch.optim.SGD(net.parameters(), 0.1)

        def step() -> None:
            with remat:  # noqa: B023  # called in this round of the loop only
                loss = net(torch.ones(512, 8)).square().mean()  # noqa: B023  # likewise
            loss.backward()

        with quiet_collectives():
            for _ in range(4):
                step()
                optimizer.step()
                optimizer.zero_grad()
            found[name] = measure_peak(step).peak_bytes
        if name == "budget":
            found["predicted"], found["measured"] = remat.plan.peak_bytes, remat.measured_peak_bytes
            found["static"] = remat.plan.static_bytes
    return found
