"""Every base, and what happens where one of its processes fails or is killed; test_faults.py reads what they found.

Processes end here as programs do, with all that Python does then: an exit that waits for another one is a hang, too.

    python -m tests.integrations.fault_worker FOLDER [NAME ...]
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any

import torch
from torch import distributed

from lightning_remat.integrations import sharing
from tests.helpers.bits import difference_in_bits
from tests.helpers.ranks import together
from tests.integrations.fault_bases import (
    Fault,
    Trigger,
    callback,
    ddp,
    either,
    fsdp1,
    fsdp2,
    killed,
    loop,
    mistake,
    second,
    tensor_parallel,
    timed_out,
)

SECONDS = 60
"""Until all have ended, imports not counted; a group waits for half an hour."""


BUDGET: dict[str, Any] = {"ours": {"budget": 1, "share_plan": True}}
BUDGET: dict[str, Any] = {"ours": {"budget": 1, "share_plan": True}}
UNUSED: dict[str, Any] = {"strategy": {"find_unused_parameters": True}}
STATIC: dict[str, Any] = {"strategy": {"static_graph": True}}
SMALL: dict[str, Any] = {"strategy": {"bucket_cap_mb": 0.0001}}  # so that one has been sent
SAVING: dict[str, Any] = {"saving": "sometimes"}
ALWAYS: dict[str, Any] = {"saving": "always"}
TWICE: dict[str, Any] = {"accumulate_grad_batches": 2}
VALIDATED: dict[str, Any] = {"limit_val_batches": 1}
PARALLEL: dict[str, Any] = {"parallel": True}

GOES_ON = {
    "ddp, all forward": Fault(base=ddp, place="forward", ranks=(0, 1)),
    "tensor parallel, before communication": Fault(base=tensor_parallel, place="stem"),
    "loop, forward": Fault(base=loop, place="forward"),
    "loop, backward": Fault(base=loop, place="backward"),
    "tensor parallel loop, before communication": Fault(base=loop, place="stem", options=PARALLEL),
    "share_plan, forward": Fault(base=ddp, place="forward", options=BUDGET, step=3),
}
MEMORY = {
    "ddp, bucket sent, rank zero": Fault(base=ddp, place="backward", options=SMALL, ranks=(0,)),
    "ddp, optimizer step, rank zero": Fault(base=ddp, place="optimizer step", ranks=(0,)),
    "ddp, accumulated, optimizer step": Fault(base=ddp, place="optimizer step", options=TWICE),
    "ddp, find_unused_parameters, optimizer step": Fault(base=ddp, place="optimizer step", options=UNUSED),
    "ddp, static_graph, first backward": Fault(base=ddp, place="backward", options=STATIC, step=1),
    "ddp, validation": Fault(base=ddp, place="validation", options=VALIDATED),
    "callback, optimizer step": Fault(base=callback, place="optimizer step"),
    "fsdp1, first forward": Fault(base=fsdp1, place="forward", step=1),
    "fsdp1, backward": Fault(base=fsdp1, place="backward"),
    "fsdp1, optimizer step": Fault(base=fsdp1, place="optimizer step"),
    "fsdp2, first forward": Fault(base=fsdp2, place="forward", step=1),
    "fsdp2, backward": Fault(base=fsdp2, place="backward"),
    "fsdp2, optimizer step": Fault(base=fsdp2, place="optimizer step"),
    "fsdp2, validation": Fault(base=fsdp2, place="validation", options=VALIDATED),
    "fsdp2, forward, saved at errors": Fault(base=fsdp2, place="forward", options=ALWAYS),
    "tensor parallel, forward": Fault(base=tensor_parallel, place="forward"),
    "tensor parallel, backward": Fault(base=tensor_parallel, place="backward"),
    "tensor parallel, optimizer step": Fault(base=tensor_parallel, place="optimizer step"),
    "loop, optimizer step": Fault(base=loop, place="optimizer step"),
    "tensor parallel loop, forward": Fault(base=loop, place="forward", options=PARALLEL),
    "tensor parallel loop, backward": Fault(base=loop, place="backward", options=PARALLEL),
    "share_plan, optimizer step": Fault(base=ddp, place="optimizer step", options=BUDGET, step=3),
    "share_plan, exchange": Fault(base=ddp, place="exchange", options=BUDGET),
    "four, two of them": Fault(base=ddp, place="backward", options=SMALL, count=4, ranks=(1, 2)),
}
MISTAKES = {
    "ddp, forward": Fault(base=ddp, place="forward", what=mistake),
    "ddp, forward, saved at errors": Fault(base=ddp, place="forward", what=mistake, options=ALWAYS),
    "ddp, checkpoint": Fault(base=ddp, place="checkpoint", what=mistake, options=SAVING),
    "ddp, checkpoint, rank zero": Fault(base=ddp, place="checkpoint", what=mistake, options=SAVING, ranks=(0,)),
    "fsdp2, backward": Fault(base=fsdp2, place="backward", what=mistake),
    "fsdp2, checkpoint": Fault(base=fsdp2, place="checkpoint", what=mistake, options=SAVING),
    "loop, forward": Fault(base=loop, place="forward", what=mistake),
    "loop, forward, rank zero": Fault(base=loop, place="forward", what=mistake, ranks=(0,)),
    "loop, timed out": Fault(base=loop, place="forward", what=timed_out),
}
KILLED = {
    "ddp, backward, rank zero": Fault(base=ddp, place="backward", what=killed, ranks=(0,)),
    "ddp, backward, saved at errors": Fault(base=ddp, place="backward", what=killed, options=ALWAYS),
    "ddp, second training": Fault(base=second, place="forward", what=killed),
    "fsdp1, forward": Fault(base=fsdp1, place="forward", what=killed),
    "fsdp1, all-gather": Fault(base=fsdp1, place="all-gather", what=killed),
    "fsdp1, optimizer step": Fault(base=fsdp1, place="optimizer step", what=killed),
    "fsdp2, forward, rank zero": Fault(base=fsdp2, place="forward", what=killed, ranks=(0,)),
    "fsdp2, all-gather": Fault(base=fsdp2, place="all-gather", what=killed),
    "fsdp2, optimizer step": Fault(base=fsdp2, place="optimizer step", what=killed),
    "fsdp2, checkpoint": Fault(base=fsdp2, place="checkpoint", what=killed, options=SAVING),
    "fsdp2, one of four": Fault(base=fsdp2, place="forward", what=killed, count=4, ranks=(2,)),
    "tensor parallel, backward": Fault(base=tensor_parallel, place="backward", what=killed),
    "loop, forward": Fault(base=loop, place="forward", what=killed),
    "loop, forward, rank zero": Fault(base=loop, place="forward", what=killed, ranks=(0,)),
    "tensor parallel loop, backward": Fault(base=loop, place="backward", what=killed, options=PARALLEL),
    "share_plan, exchange": Fault(base=ddp, place="exchange", what=killed, options=BUDGET),
}
ALL_AT_ONCE = {
    "ddp, bucket sent": Fault(base=ddp, place="backward", options=SMALL, ranks=(0, 1)),
    "ddp, each for a reason of its own": Fault(base=ddp, place="optimizer step", what=either, ranks=(0, 1)),
    "ddp, saved at errors": Fault(base=ddp, place="forward", what=mistake, options=ALWAYS, ranks=(0, 1)),
    "fsdp2, backward": Fault(base=fsdp2, place="backward", ranks=(0, 1)),
    "fsdp2, saved at errors": Fault(base=fsdp2, place="optimizer step", what=mistake, options=ALWAYS, ranks=(0, 1)),
}
PARTS = {
    "goes on": GOES_ON,
    "memory": MEMORY,
    "mistakes": MISTAKES,
    "killed": KILLED,
    "all at once": ALL_AT_ONCE,
}


PATCHED = (
    (distributed, "all_gather", "all-gather"),
    (distributed, "all_gather_into_tensor", "all-gather"),
    (distributed, "all_gather_single", "all-gather"),
    (sharing, "_gathered", "exchange"),
)


def first(function: Callable[..., Any], place: str, *args: Any, **kwargs: Any) -> Any:
    """A function, before which something may happen."""
    Trigger.at(place)
    return function(*args, **kwargs)


def job(fault: Fault, folder: Path, goes_on: bool) -> dict[str, Any]:
    """One rank's part, and what it leaves behind."""
    torch.set_num_threads(1)
    for module, name, place in PATCHED:
        if hasattr(module, name):  # PyTorch has renamed some
            setattr(module, name, partial(first, getattr(module, name), place))
    started = monotonic()
    try:
        plain = fault.base(folder, True, **fault.options) if goes_on else None
        Trigger.fault, Trigger.step = fault, 0
        ours = fault.base(folder, False, **fault.options)
    except BaseException as error:
        KEPT.append(error)  # as by whoever prints it
        text = "\n".join([type(error).__name__, str(error), *getattr(error, "__notes__", ())])
        return {"ended": text, "seconds": monotonic() - started}
    distributed.destroy_process_group()
    difference = difference_in_bits(plain["left"], ours["left"]) if plain is not None else ["it has not happened"]
    return {"difference": difference, "retries": ours["retries"], "seconds": monotonic() - started}


KEPT: list[BaseException] = []


def main(folder: Path, names: list[str]) -> None:
    """Parts, or those of their scenarios that are named."""
    results: dict[str, Any] = {}
    for part, scenarios in PARTS.items():
        for number, (name, fault) in enumerate(scenarios.items()):
            if names and not {part, name} & set(names):
                continue
            place, started = folder / part / str(number), monotonic()
            results.setdefault(part, {})[name] = together(
                place,
                fault.count,
                lambda f=fault, p=place, g=part == "goes on": job(f, p, g),
                SECONDS,
                naturally=True,
            )
            print(f"=== {part}: {name}: {monotonic() - started:.1f} s", flush=True)
    (folder / "results.json").write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
