"""One of two processes of which one runs out of memory; tests/integrations/test_ddp_failing.py starts them.

Each scenario is run without failures under plain DDP, and with failures under recomputation, and compared on this rank.
Usage: ddp_failing_worker.py OUTPUT_FOLDER [LAST], where LAST names a scenario that ends training on this rank.
"""

import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, distributed, nn

from lightning_remat import RematStrategy
from tests.helpers.training import Lit, Net, regression, regression_data, train

RANK = int(os.environ.get("LOCAL_RANK", "0"))


class Fails(torch.autograd.Function):
    """The identity, which runs out of memory in forward or backward when it is told to."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, module: "Failing") -> Tensor:
        ctx.module = module
        module.fail("forward")
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.module.fail("backward")
        return gradient, None


class Failing(nn.Module):
    """A network that runs out of memory in its middle.

    Args:
        failures: (rank, number of the call, place) of each.
    """

    def __init__(self, failures: tuple[tuple[int, int, str], ...]) -> None:
        super().__init__()
        self.net = Net()
        self.failures = [(call, place) for rank, call, place in failures if rank == RANK]
        self.calls = 0

    def fail(self, place: str) -> None:
        if (self.calls, place) in self.failures:
            FAILED.append((self.calls, place))
            if FAILED.count((self.calls, place)) == 1:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB.")

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        x = self.net.stem(x)
        for i, layer in enumerate(self.net.layers):
            x = layer(x)
            if i == 1:
                x = Fails.apply(x, self)
        return self.net.head(x)


FAILED: list[tuple[int, str]] = []


class Collective(Failing):
    """Talks to the others before it fails."""

    def forward(self, x: Tensor) -> Tensor:
        distributed.all_reduce(torch.ones(1))
        return super().forward(x)


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """What fails when, and under which options of DDP's."""

    failures: tuple[tuple[int, int, str], ...]
    strategy: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    net: Callable[..., nn.Module] = Failing


EARLY, LATE = ((1, 1, "forward"),), ((1, 3, "backward"),)
BOTH = ((1, 2, "forward"), (0, 3, "backward"), (1, 4, "backward"))

SCENARIOS = {
    "first forward": Scenario(failures=EARLY),
    "first backward": Scenario(failures=((1, 1, "backward"),)),
    "second backward": Scenario(failures=((1, 2, "backward"),)),
    "later backward": Scenario(failures=LATE),
    "rank zero": Scenario(failures=((0, 2, "forward"), (0, 3, "backward"))),
    "both ranks": Scenario(failures=BOTH),
    "forward, then backward of one batch": Scenario(failures=((1, 2, "forward"), (1, 2, "backward"))),
    "find_unused_parameters": Scenario(failures=BOTH, strategy={"find_unused_parameters": True}),
    "unused, accumulated": Scenario(
        failures=BOTH, strategy={"find_unused_parameters": True}, options={"accumulate_grad_batches": 2}
    ),
    "accumulated": Scenario(failures=BOTH, options={"accumulate_grad_batches": 2}),
    "bucket views": Scenario(failures=BOTH, strategy={"gradient_as_bucket_view": True}),
    "static_graph": Scenario(failures=BOTH, strategy={"static_graph": True}),
    "no broadcast of buffers": Scenario(failures=BOTH, strategy={"broadcast_buffers": False}),
    "bf16-mixed": Scenario(failures=BOTH, options={"precision": "bf16-mixed"}),
}

# These cannot be made right, and end training.
ENDS = {
    "static_graph, first step": Scenario(failures=((1, 1, "backward"),), strategy={"static_graph": True}),
    "after a collective in forward": Scenario(failures=((1, 2, "forward"),), net=Collective),
    "after a bucket has been sent": Scenario(failures=((1, 2, "backward"),), strategy={"bucket_cap_mb": 0.0001}),
}


def data() -> Any:
    """Other batches on each rank."""
    batches = list(regression_data(8))
    return torch.utils.data.DataLoader(batches[RANK * 4 : RANK * 4 + 4], batch_size=None)


def run(scenario: Scenario, strategy: Any, failures: tuple[tuple[int, int, str], ...], **options: Any) -> Any:
    FAILED.clear()
    return train(
        lambda: Lit(scenario.net(failures), regression),
        data(),
        strategy=strategy,
        devices=2,
        use_distributed_sampler=False,
        **scenario.options,
        **options,
    )


def compare(scenario: Scenario) -> dict[str, Any]:
    plain = run(scenario, DDPStrategy(**scenario.strategy), ())
    ours = run(scenario, RematStrategy(base="ddp", **scenario.strategy), scenario.failures)
    return {
        # Every try has its own call of on_after_backward, which is what collects gradients here.
        "difference": [text for text in ours.difference(plain) if not text.startswith("gradients")],
        "failed": sorted(set(FAILED)),
        "retries": ours.trainer.strategy.remat.counters.retries,
        "global_step": (ours.trainer.global_step, plain.trainer.global_step),
    }


def main(folder: Path, last: str | None) -> None:
    torch.set_num_threads(1)
    if last is not None:
        try:
            strategy = RematStrategy(base="ddp", **ENDS[last].strategy)
            run(ENDS[last], strategy, ENDS[last].failures, default_root_dir=str(folder))
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
