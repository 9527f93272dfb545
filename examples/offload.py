"""Offload to disk: what a step keeps leaves memory and comes back for backward, with and without recomputation.

python examples/offload.py [DIRECTORY]
"""

import logging
import os
import sys
import tempfile
import textwrap
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from byte_gpt import ByteGPT, stdlib_batches
from figures import save_figures

from lightning_remat import ConfigurationError, Offload, Remat
from lightning_remat.cli import app
from lightning_remat.runtime.memory import measure_peak

STEPS = 5
SHARE = 0.4  # of what a plain step takes at its peak, as a budget


def train(remat: Remat, between: Callable[[int], None] | None = None) -> tuple[list[float], int, int]:
    """Train from a fixed seed.

    Args:
        remat: the engine.
        between: called with the number of the step, between its forward and its backward.

    Returns:
        The losses, the peak of one more step, and what lies in memory between steps, in bytes.
    """
    torch.manual_seed(0)
    model = ByteGPT(blocks=6, width=128, heads=4, context=128)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batches = iter(stdlib_batches(context=128, batch=8))
    losses: list[float] = []

    def one(batch: torch.Tensor) -> torch.Tensor:
        with remat:
            loss = model.loss(batch)
        if between is not None:
            between(len(losses))
        loss.backward()
        return loss.detach()

    def step() -> None:
        batch = next(batches)
        # As a plain step, but for what goes wrong in it: then it is undone and run again.
        losses.append(remat.attempt(lambda: one(batch), model).item())
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(STEPS):
        step()
    peak = measure_peak(step).peak_bytes
    state = [t for s in optimizer.state.values() for t in s.values() if isinstance(t, torch.Tensor)]
    return losses, peak, sum(t.nbytes for t in [*model.parameters(), *state])


def measured(name: str, remat: Remat, plain: list[float] | None = None) -> dict[str, float]:
    """Train, and print a row."""
    losses, peak, static = train(remat)
    counters, steps = remat.counters, STEPS + 1
    remat.close()  # gives the disk space back
    equal = "" if plain is None else f"  losses equal: {losses == plain}"
    print(
        f"{name:22} peak {peak / 2**20:5.1f} MiB  out {counters.bytes_out / steps / 2**20:5.1f} MiB  "
        f"back {counters.bytes_in / steps / 2**20:5.1f} MiB  run again {remat.stats.replayed_ops:3} ops{equal}"
    )
    return {
        "peak": peak,
        "static": static,
        "out": counters.bytes_out // steps,
        "back": counters.bytes_in // steps,
        "again": remat.stats.replayed_ops,
        "hidden": counters.hidden if counters.hidden is not None else 1.0,
    }


def policies(directory: str) -> tuple[list[float], dict[str, float | str]]:
    """With and without recomputation."""
    print("== To a disk")
    plain, _, _ = train(Remat(policy="none"))
    found = {"none": measured("none", Remat(policy="none"), plain)}
    # --8<-- [start:to-disk]
    # 2 MiB wait to leave, or are back early: enough for the largest contents of this small model.
    disk = Offload(directory, in_flight="2MiB")
    options = {
        "full": Remat(policy="full"),
        "offload_only": Remat(policy="offload_only", offload=disk),
        "selective, offload": Remat(policy="selective", offload=disk),
        "full, offload": Remat(policy="full", offload=disk),
    }
    # --8<-- [end:to-disk]
    for name, remat in options.items():
        found[name] = measured(name, remat, plain)
    flat: dict[str, float | str] = {"steps": STEPS}
    for name, row in found.items():
        key = name.replace(", ", "_")
        flat |= {f"{key}_{what}": value for what, value in row.items()}
        flat[f"{key}_share"] = row["peak"] / found["none"]["peak"]
    return plain, flat


def budgets(directory: str, plain: list[float], peak: int, static: int) -> dict[str, float | str]:
    """The same budget, with three choices of what may be done about it."""
    print("\n== Under a budget")
    # --8<-- [start:budget]
    budget = static + int(SHARE * peak)
    options = {
        "recompute": Remat(budget=budget),
        "recompute or move": Remat(budget=budget, offload=directory),
        "move": Remat(policy="offload_only", budget=budget, offload=directory),
    }
    # --8<-- [end:budget]
    print(f"budget {budget / 2**20:.1f} MiB, {static / 2**20:.1f} MiB of it there between steps")
    flat: dict[str, float | str] = {"budget": budget}
    for name, remat in options.items():
        losses, peak, _ = train(remat)
        assert remat.plan is not None  # of every budget, from the second step on
        chosen = remat.plan.chosen
        print(
            f"{name:18} predicted {remat.plan.peak_bytes / 2**20:5.1f} MiB  measured {(static + peak) / 2**20:5.1f} MiB"
            f"  run again {sum(chosen.drop):3} ops  moved {chosen.moved_bytes / 2**20:5.1f} MiB"
            f"  losses equal: {losses == plain}"
        )
        key = name.replace(" ", "_")
        flat |= {
            f"{key}_predicted": remat.plan.peak_bytes,
            f"{key}_measured": static + peak,
            f"{key}_run_again": sum(chosen.drop),
            f"{key}_moved": chosen.moved_bytes,
        }
        remat.close()
    return flat


def small_disk(directory: str, plain: list[float]) -> dict[str, float | str]:
    """What has no room stays."""
    print("\n== A disk that is too small")
    # --8<-- [start:small-disk]
    remat = Remat(policy="offload_only", offload=Offload(directory, disk_budget="8MiB", in_flight="2MiB"))
    # --8<-- [end:small-disk]
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        losses, peak, _ = train(remat)
    remat.close()
    for text in dict.fromkeys(str(warning.message) for warning in said):
        print("warning:", wrapped(text.replace(directory, "DIRECTORY")))
    print(f"peak {peak / 2**20:.1f} MiB; losses equal: {losses == plain}")
    return {"small_disk_peak": peak, "small_disk_refused": remat.counters.offload_refused}


def broken_disk(directory: str, plain: list[float]) -> dict[str, float | str]:
    """What comes back from a disk is compared with what went out."""
    print("\n== A disk that alters a byte")

    # --8<-- [start:alter]
    altered = []

    def alter(step: int) -> None:
        """Write over what has left: between forward and backward of the second step, once."""
        if step != 1 or altered:
            return
        for link in Path("/proc/self/fd").iterdir():
            if link.exists() and os.readlink(link).startswith(directory) and link.stat().st_size > 2**20:
                with open(link, "r+b") as file:  # it has no name any more; Linux still lets its own process open it
                    for at in range(0, link.stat().st_size, 2**16):
                        file.seek(at)
                        file.write(b"\xff")
                altered.append(link)
                return

    # --8<-- [end:alter]
    remat = Remat(policy="offload_only", offload=Offload(directory, in_flight="2MiB"))
    with log_printed(directory):
        losses, _, _ = train(remat, alter)
    remat.close()
    print(f"altered: {len(altered)} times; steps run again: {remat.counters.retries}; losses equal: {losses == plain}")
    return {"altered_failures": remat.counters.offload_failures, "altered_retries": remat.counters.retries}


def refused() -> None:
    """What cannot work is refused before the first step."""
    print("\n== Refused")
    options: list[dict[str, str]] = [{"offload": "/no/such/place"}, {"offload": "disk", "policy": "none"}]
    if not torch.accelerator.is_available():
        options.append({"offload": "cpu"})
    for option in options:
        try:
            Remat(**option)  # type: ignore[arg-type] - words, each for an option
        except ConfigurationError as error:
            print(wrapped(str(error)))


@contextmanager
def log_printed(directory: str) -> Iterator[None]:
    """What lightning-remat logs goes to the output, where it would go to standard error."""
    log = logging.getLogger("lightning_remat")
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: print("log:", wrapped(record.getMessage().replace(directory, "DIRECTORY")))  # type: ignore[method-assign] - the shortest handler
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)


def wrapped(text: str) -> str:
    """For a terminal."""
    return textwrap.fill(" ".join(text.split()), 100, break_long_words=False, subsequent_indent="  ")


def main() -> None:
    """Everything that the tutorial shows."""
    torch.set_num_threads(1)  # with all cores busy, plans move nothing: see the tutorial
    given = [argument for argument in sys.argv[1:2] if not argument.startswith("-")]
    directory = given[0] if given else tempfile.gettempdir()
    print("== bench-io")
    app(args=["bench-io", directory, "--size", "64MiB", "--fresh"], standalone_mode=False)
    print()
    plain, figures = policies(directory)
    figures |= budgets(directory, plain, int(figures["none_peak"]), int(figures["none_static"]))
    figures |= small_disk(directory, plain)
    figures |= broken_disk(directory, plain)
    refused()
    save_figures(**figures)


if __name__ == "__main__":
    main()
