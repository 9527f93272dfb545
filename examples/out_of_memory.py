"""Out of memory, and getting through it: a real limit on Linux, a few long batches, and the same weights in every bit.

python examples/out_of_memory.py

Every training runs in a process of its own, whose address space is limited once libraries are loaded.
"""

import hashlib
import logging
import multiprocessing
import os
import resource
import subprocess
import sys
import textwrap
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import lightning as L
import torch
from byte_gpt import LitByteGPT, stdlib_batches
from figures import save_figures

from lightning_remat import NoMemoryLeft, Remat

# --8<-- [start:batches]
SHORT, LONG = 64, 512  # tokens in a sequence
LENGTHS = [SHORT, SHORT, LONG, SHORT, LONG, LONG, SHORT, SHORT]  # of eight batches
ROOM = 45 * 2**20  # bytes that the limit leaves: enough for a short batch, far too few for a long one
TINY = 24 * 2**20  # not enough for a long batch, whatever is done
# --8<-- [end:batches]

# What is freed goes back to the operating system at once, so that the limit is one of memory in use.
STEADY = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}


def prepared(room: int) -> tuple[LitByteGPT, torch.utils.data.DataLoader[torch.Tensor]]:
    """A model from a fixed seed and its batches, under a limit of ``room`` bytes more than there are now (0: none)."""
    torch.set_num_threads(1)
    torch.manual_seed(0)  # the order of the data, too
    batches = iter(stdlib_batches(context=LONG, batch=4))
    data = [next(batches)[:, : length + 1] for length in LENGTHS]
    shape = {"blocks": 4, "width": 128, "heads": 4, "context": LONG}
    LitByteGPT(**shape).gpt.loss(data[2]).backward()  # libraries allocate their workspaces while there is room
    if room:
        # --8<-- [start:limit]
        with open("/proc/self/statm") as file:
            size = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (size + room, size + room))
        # --8<-- [end:limit]
    torch.manual_seed(0)
    return LitByteGPT(**shape), torch.utils.data.DataLoader(data, batch_size=None)  # type: ignore[arg-type] - a list


def digest(module: torch.nn.Module) -> str:
    """Of every bit of the weights."""
    return hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in module.parameters())).hexdigest()[:16]


def plain(room: int) -> dict[str, Any]:
    """Training without lightning-remat."""
    module, data = prepared(room)
    optimizer = module.configure_optimizers()
    for number, batch in enumerate(data, start=1):
        try:
            module.gpt.loss(batch).backward()
        except RuntimeError as error:
            return {"failed_at": number, "error": " ".join(str(error).split())}
        optimizer.step()
        optimizer.zero_grad()
    return {"weights": digest(module)}


def by_hand(room: int) -> dict[str, Any]:
    """The same loop with a policy, and steps that can be run again."""
    module, data = prepared(room)
    optimizer = module.configure_optimizers()
    rows = []
    # --8<-- [start:attempt]
    remat = Remat(policy="selective")

    def step(batch):
        with remat:
            loss = module.gpt.loss(batch)
        loss.backward()
        return loss.detach()

    for batch in data:
        loss = remat.attempt(partial(step, batch), module)  # the step, and what it changes
        optimizer.step()
        optimizer.zero_grad()
        # --8<-- [end:attempt]
        counters = remat.counters
        rows.append([batch.shape[1] - 1, loss.item(), counters.retries, counters.evictions, counters.evicted_bytes])
    return {"weights": digest(module), "rows": rows}


def with_lightning(room: int) -> dict[str, Any]:
    """The same training under Lightning, with no option at all."""
    module, data = prepared(room)
    # --8<-- [start:lightning]
    trainer = L.Trainer(
        strategy="remat",  # the only thing that is there for memory
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    # --8<-- [end:lightning]
    try:
        trainer.fit(module, data)
    except NoMemoryLeft as error:
        return {"error": str(error)}
    counters = trainer.strategy.remat.counters
    found = {name: getattr(counters, name) for name in ("steps", "out_of_memory", "retried_batches", "evictions")}
    return {"weights": digest(module), **found}


def not_undone(room: int, told: bool) -> dict[str, Any]:
    """A step that steps the optimizer itself, with and without saying so."""
    module, data = prepared(room)
    optimizer = module.configure_optimizers()
    batches = list(data)
    remat = Remat(policy="selective")

    # --8<-- [start:two-batches]
    def step():
        for batch in batches[1:3]:  # a short one and a long one, with an optimizer step after each
            with remat:
                loss = module.gpt.loss(batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    # --8<-- [end:two-batches]
    changes = (module, optimizer) if told else (module,)
    try:
        remat.attempt(step, *changes)
    except NoMemoryLeft as error:
        return {"error": str(error), "irreversible": error.irreversible}
    return {"retries": remat.counters.retries}


def warm_up() -> None:
    """Let libraries be loaded that a plan takes; every process starts from here."""
    torch.set_num_threads(1)
    model, remat = LitByteGPT(blocks=2, width=8, heads=2, context=8).gpt, Remat(budget="1GiB")
    for _ in range(3):
        with remat:
            loss = model.loss(torch.zeros(1, 9, dtype=torch.int64))
        loss.backward()
    remat.close()


def in_process(training: Callable[..., dict[str, Any]], *args: Any) -> dict[str, Any]:
    """Run a training in a fork of this process, so that its limit ends with it. Adds what lightning-remat logged."""
    receiver, sender = multiprocessing.get_context("fork").Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=_run, args=(sender, training, args))
    process.start()
    sender.close()
    found: dict[str, Any] = receiver.recv()
    process.join()
    return found


def _run(sender: Any, training: Callable[..., dict[str, Any]], args: tuple[Any, ...]) -> None:
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign] - a list will do
    logging.getLogger("lightning_remat").addHandler(handler)
    logging.getLogger("lightning_remat").propagate = False
    for name in ("lightning.pytorch", "lightning.fabric", "pytorch_lightning", "lightning_fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)  # what Lightning says of devices
    warnings.simplefilter("ignore")  # advice about loggers, workers and budgets
    found = training(*args)
    sender.send({**found, "said": said})


def wrapped(text: str) -> str:
    """For a terminal."""
    return textwrap.fill(text, 100, subsequent_indent="  ", break_on_hyphens=False)


def main() -> None:
    """Run them, and compare."""
    warm_up()
    free = in_process(plain, 0)
    print("== Plainly")
    free = in_process(plain, 0)
    print("without a limit: weights", free["weights"])
    failed = in_process(plain, ROOM)
    print(wrapped(f"under the limit: batch {failed['failed_at']} of {len(LENGTHS)} fails: {failed['error']}"))

    print("\n== Attempt")
    hand = in_process(by_hand, ROOM)
    print("batch  tokens  loss      run again  evicted")
    before = [0, 0, 0]
    for number, (tokens, loss, *counted) in enumerate(hand["rows"], start=1):
        again, values, size = (now - then for now, then in zip(counted, before, strict=True))
        evicted = f"{values} values, {size / 2**20:.1f} MiB" if values else "-"
        print(f"{number:5}  {tokens:6}  {loss:.6f}  {again or '-':>9}  {evicted}")
        before = counted
    for text in hand["said"]:
        print(wrapped(f"log: {text}"))
    print("weights", hand["weights"], "- the same in every bit:", hand["weights"] == free["weights"])

    print("\n== Lightning")
    lit = in_process(with_lightning, ROOM)
    for text in lit["said"]:
        print(wrapped(f"log: {text}"))
    print(
        f"steps {lit['steps']}, out of memory {lit['out_of_memory']}, batches run again {lit['retried_batches']}, "
        f"values evicted {lit['evictions']}"
    )
    print("weights", lit["weights"], "- the same in every bit:", lit["weights"] == free["weights"])

    print("\n== Nothing fits")
    tiny = in_process(with_lightning, TINY)
    for line in tiny["error"].splitlines():
        print(wrapped(line))

    print("\n== Not undone")
    untold = in_process(not_undone, ROOM, False)
    print(wrapped(f"attempt(step, module): {untold['error']}"))
    told = in_process(not_undone, ROOM, True)
    print("attempt(step, module, optimizer): batches run again:", told["retries"])

    retries, evictions, evicted = hand["rows"][-1][2:]
    save_figures(
        batches=len(LENGTHS),
        long=LONG,
        short=SHORT,
        room=ROOM,
        tiny=TINY,
        failed_at=failed["failed_at"],
        retries=retries,
        evictions=evictions,
        evicted_bytes=evicted,
        first_evictions=next(row[3] for row in hand["rows"] if row[3]),
        retried_batches=lit["retried_batches"],
        same=str(free["weights"] == hand["weights"] == lit["weights"]),
    )


if __name__ == "__main__":
    if all(os.environ.get(name) == value for name, value in STEADY.items()):
        main()
    else:  # the C library reads these when a process starts
        sys.exit(subprocess.run([sys.executable, __file__, *sys.argv[1:]], env={**os.environ, **STEADY}).returncode)
