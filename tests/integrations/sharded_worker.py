"""Two processes whose parameters are sharded; test_fsdp1.py and test_fsdp2.py read what they have found.

Each scenario is run plainly and under recomputation, and compared on each rank.

    python -m tests.integrations.sharded_worker FOLDER fsdp1|fsdp2|SCENARIO ...
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import distributed, nn
from torch.distributed.fsdp import CPUOffloadPolicy

from lightning_remat import ConfigurationError, RematCallback, RematStrategy
from tests.helpers.bases import OnCpu, local
from tests.helpers.exact import recompute_all
from tests.helpers.ranks import rank, together
from tests.helpers.training import Lit, regression, regression_data, train
from tests.integrations.sharded_ends import OutOfMemory, changed, leaked, peaks
from tests.integrations.sharded_nets import (
    Accumulating,
    Block,
    Flat,
    Frozen,
    Manual,
    Net,
    Sharding,
    Shared,
    Side,
    Sides,
    Staying,
    Unused,
    blocks,
    blocks_in_bf16,
    grouped,
    in_bf16,
    lean_backward,
    nested,
    prefetching,
    without_root,
)

SECONDS = 500  # for all scenarios together, on a busy machine; plain FSDP takes a third of it


class Kept(ModelParallelStrategy):
    """A user's own strategy."""


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """What is compared with what: a network, sharded in one way, under policies that each name options."""

    net: Callable[[], nn.Module] = Net
    shard: Callable[[nn.Module, Any], None] = blocks
    module: type[Sharding] = Sharding
    options: dict[str, Any] = field(default_factory=dict)
    fsdp1: dict[str, Any] | None = None
    policies: dict[str, Any] = field(default_factory=lambda: FEW)
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
    "fsdp2, another policy on each rank": Scenario(
        policies={"both": lambda: {"policy": ["full", recompute_all][rank()]}}
    ),
    "fsdp2, on one rank only": Scenario(policies={"one": lambda: {"policy": ["none", recompute_all][rank()]}}),
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


def data() -> Any:
    """Other batches on each rank, the third of another size."""
    batches = list(regression_data(8))[rank() * 4 : rank() * 4 + 4]
    batches[2] = tuple(t[: 4 + rank()] for t in batches[2])
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
        setattr(result, name, local(getattr(result, name)))
    result.remat = callbacks[0].remat if callbacks else getattr(strategy, "remat", None)
    return result


def compare(scenario: Scenario) -> dict[str, Any]:
    plain = run(scenario, None)
    found: dict[str, Any] = {}
    for name, options in scenario.policies.items():
        ours = run(scenario, options() if callable(options) else options)
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


def same_as_plainly(results: dict[str, dict[str, Any]], scenario: Scenario) -> None:
    """Of one rank: no policy makes a difference, all of them were tried, and those that recompute did."""
    assert results.keys() == scenario.policies.keys()
    for policy, found in results.items():
        assert found["difference"] == [], policy
        assert found["gradients"] >= 4
        assert found["some"] > 0
        assert found["different"] == []
        if policy not in ("auto", "one"):
            assert found["units"] >= 3
            assert found["replayed"] > 0


def job(folder: Path, names: list[str]) -> dict[str, Any]:
    """All scenarios on one rank."""
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
    distributed.destroy_process_group()
    return results


def main(folder: Path, *names: str) -> None:
    """Two ranks."""
    results = together(folder, 2, partial(job, folder, list(names)), SECONDS)
    (folder / "results.json").write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
