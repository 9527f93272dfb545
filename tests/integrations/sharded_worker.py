"""One of two processes whose parameters are sharded; test_sharded.py starts them and reads what they write.

Each scenario is run plainly and under recomputation, and compared on this rank. Usage: sharded_worker.py OUTPUT_FOLDER
"""

import json
import os
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    fully_shard,
)

from lightning_remat import ConfigurationError, Remat, RematCallback, RematStrategy, ReplayError
from lightning_remat.runtime.memory import measure_peak
from tests.helpers.exact import recompute_all
from tests.helpers.training import Lit, regression, regression_data, train

RANK = int(os.environ.get("LOCAL_RANK", "0"))


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


class Sharding(Lit):
    """A module that shards its network in ``configure_model``."""

    shard: Callable[[nn.Module, Any], None]

    def configure_model(self) -> None:
        if not any(isinstance(m, FSDPModule) for m in self.net.modules()):
            type(self).shard(self.net, self._device_mesh["data_parallel"])


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


class Kept(ModelParallelStrategy):
    """A user's own strategy."""


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
class Scenario:
    """What is compared with what: a network, sharded in one way, under policies that each name options."""

    net: Callable[[], nn.Module] = Net
    shard: Callable[[nn.Module, Any], None] = blocks
    module: type[Sharding] = Sharding
    options: dict[str, Any] = field(default_factory=dict)
    fsdp1: dict[str, Any] | None = None
    policies: dict[str, dict[str, Any]] = field(default_factory=lambda: FEW)
    callback: bool = False


POLICIES: dict[str, dict[str, Any]] = {
    "full": {"policy": "full"},
    "selective": {"policy": "selective"},
    "everything": {"policy": recompute_all},
    "budget": {"budget": 1},
}
FEW = {name: POLICIES[name] for name in ("full", "everything")}

FSDP2 = {
    "fsdp2": Scenario(policies=POLICIES),
    "fsdp2, verified": Scenario(policies={"everything": {"policy": recompute_all, "verify": True}}),
    "fsdp2, everything fits": Scenario(policies={"auto": {}}),
    "fsdp2, another policy on each rank": Scenario(policies={"both": {"policy": ["full", recompute_all][RANK]}}),
    "fsdp2, on one rank only": Scenario(policies={"one": {"policy": ["none", recompute_all][RANK]}}),
    "fsdp2, not resharded": Scenario(shard=partial(blocks, reshard_after_forward=False)),
    "fsdp2, always resharded": Scenario(shard=partial(blocks, reshard_after_forward=True)),
    "fsdp2, resharded to a part": Scenario(shard=partial(blocks, reshard_after_forward=1)),
    "fsdp2, shards in host memory": Scenario(shard=partial(blocks, offload_policy=CPUOffloadPolicy(pin_memory=False))),
    "fsdp2, nested": Scenario(shard=nested),
    "fsdp2, two modules in a unit": Scenario(shard=grouped),
    "fsdp2, prefetching": Scenario(shard=prefetching),
    "fsdp2, root not sharded": Scenario(shard=without_root),
    "fsdp2, not gathered in backward": Scenario(shard=lean_backward),
    "fsdp2, mixed precision": Scenario(shard=in_bf16, policies=POLICIES),
    "fsdp2, blocks in another precision": Scenario(shard=blocks_in_bf16),
    "fsdp2, frozen": Scenario(net=Frozen),
    "fsdp2, unused": Scenario(net=Unused),
    "fsdp2, shared": Scenario(net=Shared),
    "fsdp2, sides": Scenario(net=Sides, policies=POLICIES),
    "fsdp2, accumulated": Scenario(module=Accumulating, options={"accumulate_grad_batches": 2}, policies=POLICIES),
    "fsdp2, accumulated, gathered": Scenario(module=Staying, options={"accumulate_grad_batches": 2}),
    "fsdp2, manual optimization": Scenario(module=Manual),
    "fsdp2, callback": Scenario(callback=True),
}
FSDP1 = {
    "fsdp1": Scenario(fsdp1={}, policies=POLICIES),
    "fsdp1, verified": Scenario(fsdp1={}, policies={"everything": {"policy": recompute_all, "verify": True}}),
    "fsdp1, parameters resharded after backward only": Scenario(fsdp1={"sharding_strategy": "SHARD_GRAD_OP"}),
    "fsdp1, not sharded": Scenario(fsdp1={"sharding_strategy": "NO_SHARD"}),
    "fsdp1, prefetching": Scenario(fsdp1={"forward_prefetch": True}),
    "fsdp1, frozen": Scenario(fsdp1={}, net=Frozen),
    "fsdp1, unused": Scenario(fsdp1={}, net=Unused),
    "fsdp1, shared": Scenario(fsdp1={}, net=Shared),
    "fsdp1, sides": Scenario(fsdp1={}, net=Sides, policies=POLICIES),
    "fsdp1, accumulated": Scenario(fsdp1={}, options={"accumulate_grad_batches": 2}),
    "fsdp1, bf16-mixed": Scenario(fsdp1={}, options={"precision": "bf16-mixed"}, policies=POLICIES),
    "fsdp1, bf16-true": Scenario(fsdp1={}, options={"precision": "bf16-true"}),
    "fsdp1, flat parameters": Scenario(fsdp1={"use_orig_params": False}),
    "fsdp1, callback": Scenario(fsdp1={}, callback=True),
}
SCENARIOS = FSDP2 | FSDP1


def whole(value: Any) -> Any:
    """Tensors as this rank has them."""
    if isinstance(value, Tensor):
        return getattr(value, "_local_tensor", value).detach().clone()
    if isinstance(value, dict):
        return {name: whole(v) for name, v in value.items()}
    return [whole(v) for v in value] if isinstance(value, (list, tuple)) else value


class Flat(Sharding):
    """Optimizers are to be given the flat parameters."""

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.trainer.model.parameters(), lr=self.lr)


def data() -> Any:
    """Other batches on each rank, the third of another size."""
    batches = list(regression_data(8))[RANK * 4 : RANK * 4 + 4]
    batches[2] = tuple(t[: 4 + RANK] for t in batches[2])
    return torch.utils.data.DataLoader(batches, batch_size=None)


def module_of(scenario: Scenario) -> Any:
    if scenario.fsdp1 is None:
        made = type(scenario.module.__name__, (scenario.module,), {"shard": staticmethod(scenario.shard)})
    else:
        made = type("Wrapped", (Flat if "use_orig_params" in scenario.fsdp1 else Lit,), {})
        made.configure_model = Lit.configure_model
    return made(scenario.net(), regression)


def run(scenario: Scenario, ours: dict[str, Any] | None, **fit_options: Any) -> Any:
    options: dict[str, Any] = {"save_distributed_checkpoint": True}
    base: Any = Kept
    if scenario.fsdp1 is not None:
        options, base = {"auto_wrap_policy": {Block, Side}, **scenario.fsdp1}, OnCpu
    elif scenario.callback is False:
        base = ModelParallelStrategy
    if scenario.fsdp1 is None:
        options |= {"data_parallel_size": 2, "tensor_parallel_size": 1}
    callbacks: list[Any] = []
    if ours is None or scenario.callback:
        strategy = base(**options)
        callbacks += [RematCallback(**ours)] if ours is not None else []
    else:
        strategy = RematStrategy(base=base, **ours, **options)
    result = train(
        lambda: module_of(scenario),
        data(),
        strategy=strategy,
        callbacks=lambda: callbacks,
        devices=2,
        use_distributed_sampler=False,
        fit_options=fit_options,
        **scenario.options,
    )
    for name in ("gradients", "state", "optimizers", "buffers"):
        setattr(result, name, whole(getattr(result, name)))
    result.remat = callbacks[0].remat if callbacks else getattr(strategy, "remat", None)
    return result


def compare(scenario: Scenario) -> dict[str, Any]:
    plain = run(scenario, None)
    found: dict[str, Any] = {}
    for name, options in scenario.policies.items():
        ours = run(scenario, options)
        found[name] = {
            "difference": ours.difference(plain),
            "replayed": ours.remat.stats.replayed_ops,
            "gradients": len(ours.gradients),
            "some": sum(g is not None for step in ours.gradients for g in step.values()),
            "blocks": ours.remat.blocks,
            "units": len(ours.remat.units),
            "different": sorted(ours.remat.verifier.different) if ours.remat.verifier else [],
        }
    return found


def resumed(scenario: Scenario, folder: Path) -> list[list[str]]:
    """Saved under one policy, and resumed under another, and plainly; and the other way round."""
    path = folder / "checkpoint"
    longer = replace(scenario, options={"max_epochs": 2})
    found = []
    for before in ({"policy": "full"}, None):
        run(scenario, before).trainer.save_checkpoint(path)
        plain = run(longer, None, ckpt_path=path)
        assert plain.trainer.current_epoch == 2
        assert plain.steps_run == 4
        found += [
            run(longer, after, ckpt_path=path).difference(plain) for after in ({"policy": recompute_all}, {"budget": 1})
        ]
    return found


def fails(module: type[Sharding], fsdp1: dict[str, Any] | None = None, **options: Any) -> str:
    """What a training ends with."""
    try:
        run(Scenario(module=module, fsdp1=fsdp1), options)
    except (RuntimeError, ConfigurationError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


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

        for _ in range(4):
            step()
            optimizer.step()
            optimizer.zero_grad()
        if name == "budget":
            found["predicted"], found["measured"] = remat.plan.peak_bytes, remat.measured_peak_bytes
            found["static"] = remat.plan.static_bytes
        found[name] = measure_peak(step).peak_bytes
    return found


def main(folder: Path, *names: str) -> None:
    torch.set_num_threads(1)
    chosen = {"fsdp2": FSDP2, "fsdp1": FSDP1}.get(names[0]) or {name: SCENARIOS[name] for name in names}
    results: dict[str, Any] = {name: compare(scenario) for name, scenario in chosen.items()}
    if chosen in (FSDP2, FSDP1):
        # A whole state that FSDP1 assembles on the CPU ends the process, plainly as well (torch 2.13): shards it is.
        scenario = FSDP2["fsdp2"] if chosen is FSDP2 else replace(FSDP1["fsdp1"], fsdp1={"state_dict_type": "sharded"})
        results["resumed"] = resumed(scenario, folder)
    if chosen is FSDP1:
        results["on the host"] = fails(Sharding, {"cpu_offload": True}, policy="full")
    if chosen is FSDP2:
        distributed.barrier()
        results |= {"leaked": leaked(), "changed": changed(), "peaks": peaks()}
        results["out of memory"] = fails(OutOfMemory, policy="full")
        results["offload"] = fails(Sharding, policy="full", offload="disk")
    (folder / f"{RANK}.json").write_text(json.dumps(results))
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
