"""Trainings that are ended by the operating system, and gone on with in a new process; run by test_killed.py.

    python -m tests.integrations.killed_worker FOLDER

Each training runs in a fork of this process, which has done imports and nothing else. Results: FOLDER/results.json.
"""

from __future__ import annotations

import io
import json
import logging
import os
import random
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.fabric.utilities import cloud_io
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import Tensor

from lightning_remat import RematStrategy
from tests.helpers.bits import difference_in_bits, random_streams
from tests.helpers.forks import Ended, in_fork
from tests.helpers.seed import seed_everything
from tests.helpers.training import Lit, Net, regression, trainer_for

BATCHES = 12
EPOCHS = 2
EVERY = 2
"""Batches between checkpoints."""
BUDGET = 95_000
"""Bytes: less than plain training takes, more than the smallest peak."""


class Data:
    """Batches in a fixed order, which can go on in the middle of an epoch."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(5)
        rows = (32, 8, generator), (32, 1, generator)
        self.batches = [tuple(torch.randn(a, b, generator=g) for a, b, g in rows) for _ in range(BATCHES)]
        self.position = 0

    def __len__(self) -> int:
        return BATCHES

    def __iter__(self) -> Iterator[Any]:
        self.position %= BATCHES  # Lightning does not ask for more than there are, so the end is not met
        while self.position < BATCHES:
            self.position += 1
            yield self.batches[self.position - 1]

    def state_dict(self) -> dict[str, int]:
        """Where it is."""
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on there."""
        self.position = state["position"]


class Streams(Callback):
    """Random streams are part of a checkpoint, as users make them."""

    def state_dict(self) -> dict[str, Any]:
        """PyTorch's, NumPy's and Python's."""
        return random_streams()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Kept until training begins: until then, Lightning itself may draw."""
        self.state = state

    def on_train_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Put them back."""
        if hasattr(self, "state"):
            torch.set_rng_state(self.state["torch"])
            np.random.set_state(tuple(self.state["numpy"]))  # type: ignore[arg-type]  # it is one of these tuples
            random.setstate(self.state["python"])


def die() -> None:
    """As `kill -9` does: no handler, no clean-up."""
    os.kill(os.getpid(), signal.SIGKILL)


class Mortal(Lit):
    """Dies in the middle of a batch: forward has run, backward not yet ended."""

    def __init__(self, at: int | None) -> None:
        super().__init__(Net(), regression)
        self.at = at

    def training_step(self, batch: Any, index: int) -> Tensor:
        """The usual one, with a hook that is called in the middle of backward."""
        loss = super().training_step(batch, index)
        if self.trainer.fit_loop.total_batch_idx == self.at:
            self.net.layers[1].up.weight.register_hook(lambda grad: die())
        return loss


class Noted(Callback):
    """What is known of a plan when training begins, and how long it takes to have one."""

    def __init__(self) -> None:
        self.planned_at_start: bool | None = None
        self.begun_at: int | None = None

    def on_train_batch_start(self, trainer: Any, pl_module: LightningModule, batch: Any, index: int) -> None:
        """Once, before the first batch."""
        if self.begun_at is None:
            remat = getattr(trainer.strategy, "remat", None)
            self.planned_at_start = remat is not None and remat.plan is not None
            self.begun_at = trainer.global_step


def half_written(name: str, direct: bool) -> None:
    """Die half-way through the write of checkpoint ``name``.

    Args:
        name: of the file.
        direct: the write goes to the file itself, as that of a simpler writer would, so that half a checkpoint is what
            stays. Otherwise it is Lightning's own, which dies before it gives the file its name.
    """
    save = cloud_io.torch.save

    def halved(checkpoint: Any, file: Any, *args: Any, **kwargs: Any) -> None:
        if NEXT.get("name") != name:
            save(checkpoint, file, *args, **kwargs)
            return
        whole = io.BytesIO()
        save(checkpoint, whole, *args, **kwargs)
        half = whole.getvalue()[: whole.tell() // 2]
        if direct:
            Path(NEXT["path"]).write_bytes(half)
        else:
            file.write(half)
        die()

    cloud_io.torch.save = halved  # type: ignore[assignment]  # this process ends with it


NEXT: dict[str, str] = {}
"""The checkpoint that is being written."""


class Checkpoints(ModelCheckpoint):
    """Says which file comes next."""

    def _save_checkpoint(self, trainer: Any, filepath: str) -> None:
        NEXT.update(name=Path(filepath).name, path=filepath)
        super()._save_checkpoint(trainer, filepath)


def train(folder: Path, ours: bool, die_at: int | None = None, resume: Path | None = None) -> dict[str, Any]:
    """Train, or go on; writes all that is left behind to ``folder/left.pt``."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")  # nobody reads what a killed process says
    for name in ("lightning.pytorch", "pytorch_lightning"):
        logging.getLogger(name).setLevel(logging.ERROR)
    seed_everything(3)
    module, noted = Mortal(die_at), Noted()
    saving = Checkpoints(folder, "{step:03d}", every_n_train_steps=EVERY, save_top_k=-1)
    trainer = trainer_for(
        RematStrategy(budget=BUDGET) if ours else "auto",
        [Streams(), noted, saving],
        max_epochs=EPOCHS,
        enable_checkpointing=True,
    )
    seed_everything(4)
    options: dict[str, Any] = {} if resume is None else {"ckpt_path": str(resume), "weights_only": False}
    trainer.fit(module, Data(), **options)
    left = {
        "state": dict(module.state_dict()),
        "optimizers": [o.state_dict() for o in trainer.optimizers],
        "streams": random_streams(),
        "step": (trainer.global_step, trainer.current_epoch),
        "metrics": dict(trainer.callback_metrics),
    }
    torch.save(left, folder / "left.pt")
    return {"begun_at": noted.begun_at, "planned_at_start": noted.planned_at_start, "steps": len(module.losses)}


def newest_whole(folder: Path) -> tuple[Path | None, list[str]]:
    """The newest checkpoint that can be read, and those that cannot."""
    broken = []
    for path in sorted(folder.glob("step=*.ckpt"), reverse=True):
        try:
            torch.load(path, weights_only=False)
        except Exception:
            broken.append(path.name)
        else:
            return path, broken
    return None, broken


def killed_and_resumed(folder: Path, plain: Path, end: Callable[[Path], Any]) -> dict[str, Any]:
    """Run ``end``, which must be killed, and go on in another process from the newest whole checkpoint."""
    folder.mkdir()
    first = in_fork(lambda: end(folder))
    path, broken = newest_whole(folder)
    again = in_fork(lambda: train(folder, True, resume=path)) if path is not None or first.signal else Ended()
    found: dict[str, Any] = {
        "signal": first.signal and first.signal.name,
        "error": first.error or again.error,
        "resumed_from": path and path.name,
        "broken": broken,
        **(again.value or {}),
    }
    if not found["error"] and (folder / "left.pt").exists():
        left, expected = (torch.load(one / "left.pt", weights_only=False) for one in (folder, plain))
        found["different"] = difference_in_bits(expected, left)[:10]
    return found


def main(folder: Path) -> None:
    """All of them."""
    plain = folder / "plain"
    plain.mkdir()
    reference = in_fork(lambda: train(plain, ours=False))

    def writing(direct: bool) -> Callable[[Path], Any]:
        def end(where: Path) -> Any:
            half_written("step=008.ckpt", direct)
            return train(where, True)

        return end

    results = {
        "plain": {"error": reference.error, **(reference.value or {})},
        # The first batch is traced, the second planned for, those after it measured.
        "tuning": killed_and_resumed(folder / "tuning", plain, lambda where: train(where, True, die_at=3)),
        "epoch": killed_and_resumed(folder / "epoch", plain, lambda where: train(where, True, die_at=17)),
        "half a file": killed_and_resumed(folder / "half", plain, writing(True)),
        "writing": killed_and_resumed(folder / "writing", plain, writing(False)),
    }
    (folder / "results.json").write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
