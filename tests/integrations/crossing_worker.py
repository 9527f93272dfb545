"""Checkpoints that are written under one base and policy and read under others, by one process, two and four.

    python -m tests.integrations.crossing_worker FOLDER

Each base writes twice: by itself, and with recomputation. The next one reads and trains on, and is compared with the
same change of base without recomputation.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from lightning_remat.integrations.checkpoints import KEY
from tests.helpers.bases import BASES, Net, run
from tests.helpers.exact import recompute_all
from tests.helpers.ranks import together, world

SECONDS = 200


@dataclass(frozen=True, kw_only=True)
class Source:
    """Who writes."""

    base: str
    count: int
    remat: dict[str, Any]
    more: dict[str, Any] = field(default_factory=dict)


SMALLEST: dict[str, Any] = {"budget": 1}
FULL: dict[str, Any] = {"policy": "full"}
EVERYTHING: dict[str, Any] = {"policy": recompute_all}

SOURCES = {
    "single device": Source(base="single device", count=1, remat=SMALLEST),
    "ddp": Source(base="ddp", count=2, remat=FULL),
    "fsdp2": Source(base="fsdp2", count=2, remat=SMALLEST),
    "fsdp2, one file": Source(base="fsdp2", count=2, remat=SMALLEST, more={"save_distributed_checkpoint": False}),
    "tensor parallel": Source(base="tensor parallel", count=2, remat=EVERYTHING),
}

READERS: dict[tuple[str, int], tuple[tuple[str, dict[str, Any]], ...]] = {
    ("single device", 1): (("ddp", SMALLEST), ("fsdp2, one file", FULL)),
    ("ddp", 2): (("single device", FULL), ("fsdp2, one file", EVERYTHING)),
    ("fsdp2", 2): (("ddp", SMALLEST), ("single device", FULL), ("tensor parallel", EVERYTHING)),
    ("fsdp1", 2): (("ddp", FULL), ("single device", SMALLEST)),
    ("tensor parallel", 2): (("ddp", FULL), ("fsdp2", SMALLEST)),
    ("tensor parallel and fsdp2", 4): (("ddp", EVERYTHING), ("fsdp2", FULL)),
}
"""By base and number of processes: whose checkpoint is read, and what recomputes then."""


def rows(batch: int, rank: int) -> int:
    """Of a batch."""
    return 16 + 4 * rank


def write(folder: Path) -> dict[str, Any]:
    """Every source with so many processes, twice."""
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    for name, source in SOURCES.items():
        if source.count == world():
            losses = []
            for remat, by in ((None, "plain"), (source.remat, "ours")):
                result = run(BASES[source.base], remat, net=Net, rows=rows, more=source.more)
                result.trainer.save_checkpoint(folder / f"{name} {by}")
                losses.append(result)
            found[name] = {"difference": losses[1].difference(losses[0]), "replayed": losses[1].replayed_ops}
    end()
    return found


def read(folder: Path) -> dict[str, Any]:
    """Every reader with so many processes."""
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    for (name, count), changes in READERS.items():
        for source, remat in changes if count == world() else ():
            path = folder / source

            def goes_on(remat: dict[str, Any] | None, by: str, path: Path = path, base: str = name) -> Any:
                options = {"ckpt_path": f"{path} {by}"}
                return run(BASES[base], remat, net=Net, rows=rows, max_epochs=2, fit_options=options)

            plain, ours, without = goes_on(None, "plain"), goes_on(remat, "ours"), goes_on(None, "ours")
            found[f"{source} to {name}"] = {
                "ours": ours.difference(plain),
                "without": without.difference(plain),
                "replayed": ours.replayed_ops,
                "epochs": ours.trainer.current_epoch,
                "losses": [float(loss) for loss in ours.losses],
            }
    end()
    return found


def end() -> None:
    """Leave the others."""
    if distributed.is_initialized():
        distributed.destroy_process_group()


def learned(path: Path) -> bool:
    """Whether a checkpoint has what recomputation has learned."""
    file = path / "meta.pt" if path.is_dir() else path
    return KEY in torch.load(file, weights_only=False)


def main(folder: Path) -> None:
    """Writers first."""
    files = folder / "checkpoints"
    results: dict[str, Any] = {"written": {}, "read": {}}
    for count in (1, 2):
        results["written"][count] = together(folder / f"write {count}", count, partial(write, files), SECONDS)
    results["learned"] = {path.name: learned(path) for path in files.iterdir()}
    for count in (1, 2, 4):
        results["read"][count] = together(folder / f"read {count}", count, partial(read, files), SECONDS)
    (folder / "results.json").write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
