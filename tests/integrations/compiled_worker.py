"""Two processes that train compiled models; test_compiled_ranks.py reads what they have found.

python -m tests.integrations.compiled_worker FOLDER
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import fully_shard

from lightning_remat import RematStrategy
from tests.helpers.ranks import rank, together, world
from tests.helpers.training import Lit, regression, train

BATCHES = 24  # the search for an activation budget ends within these
SECONDS = 900


class Block(nn.Module):
    """Wide inside, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 64), nn.Linear(64, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.dropout(torch.nn.functional.gelu(self.up(x)).sin().exp(), 0.2, True)
        out: Tensor = x + self.down(h.sigmoid())
        return out


class Net(nn.Module):
    """Three blocks and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block() for _ in range(3)))
        self.head = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.blocks(x))
        return out


class Silent(Lit):
    """Its step logs nothing, which Dynamo cannot follow."""

    def training_step(self, batch: Any, index: int) -> Tensor:
        return self.loss(self.net, batch)

    def on_before_backward(self, loss: Tensor) -> None:
        self.losses.append(loss.detach())


def one_block() -> Any:
    """The others are the tape's."""
    lit = Lit(Net(), regression)
    lit.net.blocks[1].compile()
    return lit


def whole() -> Any:
    """As Lightning takes it: its step runs the compiled forward."""
    return torch.compile(Silent(Net(), regression))


def broken() -> Any:
    """A graph break in the middle."""

    class Broken(Net):
        def forward(self, x: Tensor) -> Tensor:
            x = self.blocks(x)
            torch._dynamo.graph_break()
            out: Tensor = self.head(x)
            return out

    return torch.compile(Silent(Broken(), regression))


class Sharded(Lit):
    """Blocks are compiled, then sharded."""

    def configure_model(self) -> None:
        if self.sharded:
            return
        self.sharded = True
        for block in self.net.blocks:
            block.compile()
            fully_shard(block, mesh=self.device_mesh["data_parallel"])
        fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

    sharded = False


def sharded() -> Any:
    """FSDP 2."""
    return Sharded(Net(), regression)


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """What is trained, and how."""

    make: Callable[[], Any]
    remat: dict[str, Any]
    base: Any = DDPStrategy
    ours: Any = None  # our name for the same base
    options: dict[str, Any] = field(default_factory=dict)


class Fsdp2(ModelParallelStrategy):
    """All processes hold shards; by itself it takes them for tensor parallel."""

    def __init__(self) -> None:
        super().__init__(data_parallel_size=2, tensor_parallel_size=1)


BUDGET = {"budget": 30_000, "compiled": "budget"}

SCENARIOS = {
    "block, full": Scenario(make=one_block, remat={"policy": "full"}),
    "block, budget": Scenario(make=one_block, remat=BUDGET),
    "whole, full": Scenario(make=whole, remat={"policy": "full"}),
    "whole, budget": Scenario(make=whole, remat=BUDGET),
    "graph break, full, accumulated": Scenario(
        make=broken, remat={"policy": "full"}, options={"accumulate_grad_batches": 2}
    ),
    "FSDP 2, full": Scenario(make=sharded, remat={"policy": "full"}, base=Fsdp2, ours="fsdp2"),
    "FSDP 2, budget": Scenario(make=sharded, remat=BUDGET, base=Fsdp2, ours="fsdp2"),
}


class Data:
    """Batches of another size on each rank."""

    def __len__(self) -> int:
        return BATCHES

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(5 + rank())
        rows = 64 + 64 * rank()
        for _ in range(BATCHES):
            yield torch.randn(rows, 8, generator=generator), torch.randn(rows, 1, generator=generator)


PLAIN: dict[str, Any] = {}


def compare(scenario: Scenario) -> dict[str, Any]:
    """What differs between a plain training and one with recomputation."""

    def run(strategy: Any) -> Any:
        torch._dynamo.reset()
        return train(
            scenario.make,
            Data(),
            strategy=strategy,
            devices=world(),
            use_distributed_sampler=False,
            **scenario.options,
        )

    key = repr((scenario.make, scenario.options))
    plain = PLAIN.get(key) or PLAIN.setdefault(key, run(scenario.base()))
    ours = run(RematStrategy(base=scenario.ours or scenario.base, **scenario.remat))
    remat = ours.trainer.strategy.remat
    counters, shares = remat.counters, remat._compiled.shares
    return {
        "peaks": {} if shares is None else {str(share): peak for share, (peak, _) in shares.found.items()},
        "difference": ours.difference(plain),
        "replayed": ours.replayed_ops,
        "compilations": counters.compilations,
        "share": counters.activation_budget,
        "notes": counters.notes,
    }


def job() -> dict[str, Any]:
    """All scenarios on one rank."""
    torch.set_num_threads(1)
    # A budget that nothing fits, on purpose.
    warnings.filterwarnings("ignore", message=".*is not feasible|.*no plan was measured to fit")
    found = {name: compare(scenario) for name, scenario in SCENARIOS.items() if name in NAMES or not NAMES}
    distributed.destroy_process_group()
    return found


NAMES = sys.argv[2:]

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    (folder / "results.json").write_text(json.dumps(together(folder / "two", 2, job, SECONDS), indent=2))
