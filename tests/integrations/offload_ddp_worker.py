"""One of two processes that train together with offload, of which one may lose what it has moved.

tests/integrations/test_offload_faults.py starts them. Each scenario is run under plain DDP and with offload, and
compared on this rank.

Usage: offload_ddp_worker.py OUTPUT_FOLDER [LAST], where LAST names a scenario that ends training.
"""

import json
import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from errno import EIO
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, distributed, nn

from lightning_remat import Offload, RematStrategy
from tests.helpers.training import Lit, Net, regression, regression_data, train

RANK = int(os.environ.get("LOCAL_RANK", "0"))
_read = os.preadv


class Disk:
    """Reads, which fail on one rank while :attr:`broken` is set."""

    broken = False

    @classmethod
    def read(cls, fd: int, buffers: Any, offset: int) -> int:
        if cls.broken:
            raise OSError(EIO, os.strerror(EIO))
        return _read(fd, buffers, offset)


class Breaks(torch.autograd.Function):
    """The identity, in whose backward the disk breaks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, breaks: bool) -> Tensor:
        ctx.breaks = breaks
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        Disk.broken = Disk.broken or ctx.breaks
        return gradient, None


class Breaking(nn.Module):
    """A network in whose middle the disk breaks, in backward of one call."""

    def __init__(self, call: int | None) -> None:
        super().__init__()
        self.net = Net()
        self.call = call
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        Disk.broken = False
        x = self.net.stem(x)
        for i, layer in enumerate(self.net.layers):
            x = layer(x)
            if i == 1:
                breaks = self.calls == self.call and TRIED.count(self.calls) < 1
                if breaks:
                    TRIED.append(self.calls)
                x = Breaks.apply(x, breaks)
        return self.net.head(x)


TRIED: list[int] = []


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """How, and in which call of the model reads begin to fail on rank 1."""

    call: int | None = None
    policy: str = "offload_only"
    strategy: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)


SCENARIOS = {
    "as plain DDP": Scenario(),
    "accumulated": Scenario(options={"accumulate_grad_batches": 2}),
    "full": Scenario(policy="full"),
    "small buckets": Scenario(strategy={"bucket_cap_mb": 0.0001}),
    "lost": Scenario(call=2),
    "lost, accumulated": Scenario(call=3, options={"accumulate_grad_batches": 2}),
}

ENDS = {"sent": Scenario(call=2, strategy={"bucket_cap_mb": 0.0001})}


def data() -> Any:
    """Other batches on each rank."""
    batches = list(regression_data(8))
    return torch.utils.data.DataLoader(batches[RANK * 4 : RANK * 4 + 4], batch_size=None)


def run(scenario: Scenario, strategy: Any, call: int | None) -> Any:
    TRIED.clear()
    make: Callable[[], Any] = lambda: Lit(Breaking(call if RANK == 1 else None), regression)  # noqa: E731 - a line
    return train(make, data(), strategy=strategy, devices=2, use_distributed_sampler=False, **scenario.options)


def with_offload(scenario: Scenario) -> RematStrategy:
    place = Offload(tempfile.gettempdir(), min_bytes=0, in_flight=1)
    return RematStrategy(base="ddp", policy=scenario.policy, offload=place, **scenario.strategy)


def compare(scenario: Scenario) -> dict[str, Any]:
    plain = run(scenario, DDPStrategy(**scenario.strategy), None)
    ours = run(scenario, with_offload(scenario), scenario.call)
    counters = ours.trainer.strategy.remat.counters
    # Every try has its own call of on_after_backward, which is what collects gradients here.
    different = [text for text in ours.difference(plain) if not text.startswith("gradients") or not counters.retries]
    return {"difference": different, "moved": counters.bytes_in, "retries": counters.retries}


def main(folder: Path, last: str | None) -> None:
    torch.set_num_threads(1)
    os.preadv = Disk.read  # type: ignore[assignment]  # this process ends with it
    if last is not None:
        try:
            run(ENDS[last], with_offload(ENDS[last]), ENDS[last].call)
            text = "no error"
        except RuntimeError as error:
            text = "\n".join([type(error).__name__, str(error), *getattr(error, "__notes__", ())])
        (folder / f"{RANK}.json").write_text(json.dumps(text))
        os._exit(0)  # the way a process ends when an error ends it, without waiting for the others
    results = {name: compare(scenario) for name, scenario in SCENARIOS.items()}
    (folder / f"{RANK}.json").write_text(json.dumps(results))
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else None)
