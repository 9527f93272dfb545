"""Trainings with offload that are killed or share a directory; run by test_offload_faults.py.

    python -m tests.integrations.offload_worker FOLDER

Each training runs in a fork of this process, which has done imports and nothing else. Results: FOLDER/results.json.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_remat import Offload, RematStrategy
from tests.helpers.bits import difference_in_bits
from tests.helpers.forks import in_fork
from tests.helpers.training import Lit, Net, regression, regression_data, train

BATCHES = 8
ROWS = 512
WIDTH = 64


class Watched(Lit):
    """Calls something in the middle of backward."""

    def __init__(self, at: int, call: Callable[[Any], object]) -> None:
        super().__init__(Net(width=WIDTH), regression)
        self.at = at
        self.__dict__["call"] = call

    def training_step(self, batch: Any, index: int) -> Tensor:
        """The usual one, with a hook that is called in the middle of backward."""
        loss = super().training_step(batch, index)
        if index == self.at:
            self.net.layers[1].up.weight.register_hook(lambda grad: self.__dict__["call"](self) and None)
        return loss


def trained(directory: Path | None, at: int = -1, call: Callable[[Any], object] = bool) -> tuple[dict[str, Any], Any]:
    """Train, plainly where no directory is given; returns what is left behind, and the engine."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")  # advice on stderr; what counts is the outcome that is written
    strategy: Any = "auto"
    if directory is not None:
        strategy = RematStrategy(policy="offload_only", offload=Offload(directory, min_bytes=0, in_flight=1))
    data = regression_data(BATCHES, ROWS)
    result = train(lambda: Watched(at, call), data, strategy=strategy)
    left = {"losses": result.losses, "state": result.state, "optimizers": result.optimizers, "streams": result.streams}
    return left, getattr(strategy, "remat", None)


def ours(folder: Path, at: int = -1, call: Callable[[Any], object] = bool) -> dict[str, Any]:
    """Train with offload, and compare with ``folder/plain.pt``."""
    spill = folder / "spill"
    left, remat = trained(spill, at, call)
    plain = torch.load(folder / "plain.pt", weights_only=False)
    return {
        "different": difference_in_bits(plain, left)[:10],
        "moved": remat.counters.bytes_in > 0,
        "left": os.listdir(spill),
    }


def killed(folder: Path) -> dict[str, Any]:
    """A training that is killed when something of it is on the disk."""
    spill = folder / "spill"

    def free() -> int:
        room = os.statvfs(spill)
        return room.f_bfree * room.f_frsize

    def die(module: Any) -> None:
        place = module.trainer.strategy.remat.offloading.mover.place
        state = {"taken": place._depot.file.allocated(), "free": free(), "before": os.listdir(spill)}
        (folder / "state.json").write_text(json.dumps(state))
        os.kill(os.getpid(), signal.SIGKILL)

    ended = in_fork(lambda: ours(folder, 2, die))
    state = json.loads((folder / "state.json").read_text())
    return {
        "signal": ended.signal and ended.signal.name,
        "error": ended.error,
        "taken": state["taken"],
        "before": state["before"],
        "after": os.listdir(spill),
        # Others write to this file system, too, but not so much.
        "freed": free() >= state["free"] + state["taken"] // 2,
    }


def shared(folder: Path) -> tuple[list[Any], bool]:
    """Two trainings at the same time, each of which waits in the middle of a step until the other is there."""
    read, write = zip(os.pipe(), os.pipe(), strict=True)
    children = []
    for index in range(2):
        child = os.fork()
        if child == 0:

            def meet(module: Any, index: int = index) -> None:
                os.write(write[index], b".")
                assert os.read(read[1 - index], 1) == b"."
                (folder / f"met{index}").touch()

            try:
                found: Any = ours(folder, 2, meet)
            except BaseException as error:
                found = repr(error)
            (folder / f"shared{index}.json").write_text(json.dumps(found))
            os._exit(0)
        children.append(child)
    for child in children:
        os.waitpid(child, 0)
    results = [json.loads((folder / f"shared{index}.json").read_text()) for index in range(2)]
    return results, all((folder / f"met{index}").exists() for index in range(2))


def save_plain(folder: Path) -> None:
    """What plain training leaves behind."""
    torch.save(trained(None)[0], folder / "plain.pt")


def main(folder: Path) -> None:
    """All of them."""
    assert threading.active_count() == 1
    (folder / "spill").mkdir()
    reference = in_fork(lambda: save_plain(folder))
    assert reference.error is None, reference.error
    results: dict[str, Any] = {"killed": killed(folder)}
    again = in_fork(lambda: ours(folder))
    results["again"] = again.value or again.error
    results["shared"], results["together"] = shared(folder)
    (folder / "results.json").write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
