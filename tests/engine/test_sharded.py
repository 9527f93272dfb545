"""Sharded parameters in one process: what is kept where units meet, what is refused, and that nothing stays behind.

With several processes: tests/integrations/test_fsdp1.py and test_fsdp2.py.
"""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard

from lightning_remat import ConfigurationError, NoMemoryLeft, Offload, Remat, ReplayError
from tests.helpers.exact import recompute_all

pytestmark = pytest.mark.usefixtures("one_process")


class Block(nn.Module):
    """Leaves a result behind as well."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 8)
        self.down = nn.Linear(8, 4)
        self.left: Any = None

    def forward(self, x: Tensor) -> Tensor:
        self.left = torch.tanh(self.up(x))
        return self.down(self.left.sigmoid())


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block() for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def fsdp2() -> nn.Module:
    torch.manual_seed(1)
    net = Net()
    for layer in net.layers:
        fully_shard(layer)
    return fully_shard(net)


def fsdp1() -> nn.Module:
    """Without sharding: with one process there is none, and FSDP warns that it does without."""
    options: dict[str, Any] = {"sharding_strategy": ShardingStrategy.NO_SHARD, "use_orig_params": True}
    torch.manual_seed(1)
    net = Net()
    with warnings.catch_warnings():
        # One way of sharding among those that there are, as long as PyTorch has it.
        warnings.filterwarnings("ignore", "The `NO_SHARD` sharding strategy is deprecated", FutureWarning)
        for i, layer in enumerate(net.layers):
            net.layers[i] = FullyShardedDataParallel(layer, device_id=torch.device("cpu"), **options)
        return FullyShardedDataParallel(net, device_id=torch.device("cpu"), **options)


SHARDED = pytest.mark.parametrize("make", [fsdp2, fsdp1])


def gradients(net: nn.Module, remat: Remat | None, steps: int = 2) -> list[Tensor]:
    for _ in range(steps):
        if remat is None:
            loss = net(torch.ones(3, 4)).square().sum()
        else:
            with remat:
                loss = net(torch.ones(3, 4)).square().sum()
        loss.backward()
    return [getattr(p.grad, "_local_tensor", p.grad) for p in net.parameters() if p.grad is not None]


def attributes(net: nn.Module) -> list[Any]:
    """Everything that a step puts something into."""
    found: list[Any] = []
    for module in net.modules():
        tables = (
            "_forward_pre_hooks",
            "_forward_hooks",
            "_forward_hooks_always_called",
            "_forward_pre_hooks_with_kwargs",
        )
        found += [list(getattr(module, table)) for table in tables]
        owners = [getattr(module, "_handle", None)]
        if hasattr(module, "_get_fsdp_state"):
            owners += module._get_fsdp_state()._fsdp_param_groups
        found += [{n for n, v in vars(owner).items() if callable(v)} for owner in owners if owner is not None]
    return found


@SHARDED
@pytest.mark.parametrize("policy", ["full", "selective", recompute_all])
def test_gradients_are_those_of_the_plain_model(make: Any, policy: Any) -> None:
    remat = Remat(policy=policy)
    plain, ours = gradients(make(), None), gradients(make(), remat)
    assert len(plain) == len(ours) > 0
    assert all(torch.equal(a, b) for a, b in zip(plain, ours, strict=True))
    assert remat.stats.replayed_ops > 0
    assert len(remat.units) >= 3


@SHARDED
def test_nothing_stays_behind(make: Any) -> None:
    """After a step, and after one that fails."""
    net, remat = make(), Remat(policy=recompute_all)
    gradients(net, None, 1)  # FSDP finds out about itself
    before = attributes(net)
    gradients(net, remat)
    assert attributes(net) == before
    net.register_forward_hook(lambda *_: 1 / 0)
    before = attributes(net)
    with pytest.raises(ZeroDivisionError):
        gradients(net, remat)
    assert attributes(net) == before


def test_what_another_unit_reads_is_kept() -> None:
    """A result left behind in a block is there when the loss, outside of it, asks for it first."""
    net, remat = fsdp2(), Remat(policy=recompute_all)
    plain = fsdp2()
    for model in (net, plain):
        with remat if model is net else torch.enable_grad():
            loss = model(torch.ones(3, 4)).sum() + sum(layer.left.exp().cos().sum() for layer in model.layers)
        loss.backward()
    for a, b in zip(net.parameters(), plain.parameters(), strict=True):
        assert torch.equal(a.grad._local_tensor, b.grad._local_tensor)


def test_a_unit_that_is_not_gathered_raises() -> None:
    """Backward from what a block has left behind alone: FSDP does not gather the block for that."""
    net, remat = fsdp2(), Remat(policy=recompute_all)
    x = torch.ones(3, 4, requires_grad=True)
    with remat:
        net(x)
        left = net.layers[1].left
    with pytest.raises(ReplayError, match="not gathered"):
        left.sum().backward()


def test_parameters_that_were_changed_raise() -> None:
    net, remat = fsdp2(), Remat(policy=recompute_all)
    with remat:
        loss = net(torch.ones(3, 4)).sum()
    with torch.no_grad():
        for p in net.layers[2].parameters():
            p.add_(1)
    with pytest.raises(ReplayError, match="were changed between forward and backward"):
        loss.backward()


@SHARDED
def test_offload_is_refused(make: Any) -> None:
    remat = Remat(policy="full", offload=Offload("disk"))
    with pytest.raises(ConfigurationError, match="sharded"):
        remat.bind(make())
    remat.close()


def test_a_step_that_runs_out_of_memory_is_not_run_again() -> None:
    net, remat = fsdp2(), Remat(policy="full")
    calls = []

    def step() -> None:
        calls.append(1)
        with remat:
            net(torch.ones(3, 4))
            raise torch.OutOfMemoryError("made up")

    with pytest.raises(NoMemoryLeft, match="sharded"):
        remat.attempt(step, net)
    assert len(calls) == 1
