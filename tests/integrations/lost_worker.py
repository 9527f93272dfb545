"""Processes that train together, of which one fails in a way that cannot be made right, or is killed.

python -m tests.integrations.lost_worker FOLDER
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any

import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, distributed, nn

from lightning_remat import RematStrategy
from tests.helpers.bits import difference_in_bits
from tests.helpers.ranks import rank, together, world
from tests.helpers.training import Lit, Net, regression, train
from tests.integrations.uneven_worker import Data, changing

SECONDS = 60
"""Until all have ended, imports not counted."""


def out_of_memory() -> None:
    """What CUDA's allocator raises."""
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB.")


def killed() -> None:
    """As by the system when its memory runs out."""
    os.kill(os.getpid(), signal.SIGKILL)


class Fails(torch.autograd.Function):
    """The identity, in which something happens."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, module: Failing) -> Tensor:
        ctx.module = module
        module.at("forward")
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.module.at("backward")
        return gradient, None


class Failing(nn.Module):
    """A network in whose middle something happens, once, in one call on one rank."""

    def __init__(self, scenario: Scenario) -> None:
        super().__init__()
        self.net = Net()
        self.scenario = scenario
        self.calls = 0

    def at(self, place: str) -> None:
        scenario = self.scenario
        if (rank(), self.calls, place) == (scenario.rank, scenario.call, scenario.place) and not TRIED:
            TRIED.append(self.calls)
            scenario.what()

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        x = self.net.stem(x)
        for i, layer in enumerate(self.net.layers):
            x = layer(x)
            if i == 1:
                x = Fails.apply(x, self)
        return self.net.head(x)


TRIED: list[int] = []


class Stepping(Lit):
    """Its optimizer may fail once the gradients are there."""

    def configure_optimizers(self) -> Any:
        net: Any = self.net

        class AdamW(torch.optim.AdamW):
            def _init_group(self, *args: Any) -> Any:
                net.at("optimizer step")
                return super()._init_group(*args)

        return AdamW(self.parameters(), lr=1e-2)


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """What happens where."""

    count: int
    what: Callable[[], None] = out_of_memory
    place: str
    rank: int = 1
    call: int = 3
    ddp: dict[str, Any] = field(default_factory=dict)


ENDS = {
    "optimizer step": Scenario(count=2, place="optimizer step"),
    "optimizer step of one of four": Scenario(count=4, place="optimizer step", rank=2),
    "backward of one of four, after a bucket": Scenario(count=4, place="backward", ddp={"bucket_cap_mb": 0.0001}),
    "killed in forward": Scenario(count=2, what=killed, place="forward"),
    "killed in backward": Scenario(count=4, what=killed, place="backward", rank=2),
    "rank zero killed": Scenario(count=2, what=killed, place="optimizer step", rank=0),
}
GOES_ON = {
    "forward of one of four": Scenario(count=4, place="forward", rank=3),
    "backward of one of four": Scenario(count=4, place="backward", rank=2),
}


def run(scenario: Scenario, strategy: Any, folder: Path) -> Any:
    """One training."""
    return train(
        lambda: Stepping(Failing(scenario), regression),
        Data(changing),
        strategy=strategy,
        devices=world(),
        use_distributed_sampler=False,
        default_root_dir=str(folder),
    )


def job(scenario: Scenario, folder: Path, plainly: bool) -> dict[str, Any]:
    """One rank's part, and what it leaves behind."""
    torch.set_num_threads(1)
    started = monotonic()
    try:
        if plainly:
            TRIED.append(0)  # nothing happens
            plain = run(scenario, DDPStrategy(**scenario.ddp), folder)
            TRIED.clear()
        ours = run(scenario, RematStrategy(base="ddp", **scenario.ddp), folder)
    except RuntimeError as error:
        text = "\n".join([type(error).__name__, str(error), *getattr(error, "__notes__", ())])
        return {"ended": text, "seconds": monotonic() - started}
    found = {"state": ours.state, "optimizers": ours.optimizers, "streams": ours.streams}
    expected = {name: getattr(plain, name) for name in found} if plainly else found
    distributed.destroy_process_group()
    return {
        "difference": difference_in_bits(expected, found),
        "retries": ours.trainer.strategy.remat.counters.retries,
        "seconds": monotonic() - started,
    }


def main(folder: Path) -> None:
    """All of them, one after the other."""
    results = {}
    for number, (name, scenario) in enumerate((ENDS | GOES_ON).items()):
        place = folder / str(number)
        plainly = name in GOES_ON
        results[name] = together(place, scenario.count, lambda s=scenario, f=place, p=plainly: job(s, f, p), SECONDS)
    (folder / "results.json").write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
