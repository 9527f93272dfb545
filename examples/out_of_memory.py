"""Out of memory, and getting through it: a real limit on Linux, one long batch, and the same weights in every bit.

python examples/out_of_memory.py

Three trainings, each in a process of its own: without a limit, plainly under a limit (it fails), and under the limit
with strategy="remat", which has no other option.
"""

import os
import resource
import subprocess
import sys

import lightning as L
import torch
from byte_gpt import LitByteGPT, stdlib_batches

import lightning_remat  # noqa: F401 - registers the strategy "remat"

LONG, SHORT, AT, STEPS = 512, 64, 7, 10  # one batch of ten is eight times as long as the others
ROOM = 105 * 2**20  # bytes that the limit leaves; the long batch takes about three times as much
# What is freed goes back to the operating system at once, so that the limit is one of memory in use.
STEADY = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}


def model() -> LitByteGPT:
    """A GPT on bytes, with dropout."""
    return LitByteGPT(blocks=6, width=128, heads=4, context=LONG)


def train(strategy: str, room: int) -> None:
    """Train under a limit; print a digest of the weights, or that memory ran out."""
    torch.set_num_threads(1)
    torch.manual_seed(0)  # the order of the data, too
    batches = iter(stdlib_batches(context=LONG, batch=8))
    data = [next(batches)[:, : LONG if i == AT else SHORT] for i in range(STEPS)]
    model().gpt.loss(data[AT]).backward()  # libraries allocate their workspaces while there is room
    if room:
        with open("/proc/self/statm") as file:
            size = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (size + room, size + room))

    torch.manual_seed(0)
    module = model()
    trainer = L.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    try:
        trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=None))  # type: ignore[arg-type] - a list
    except RuntimeError as error:
        print("RESULT failed:", str(error).strip().splitlines()[0][:90])
        return
    weights = torch.cat([p.detach().flatten() for p in module.parameters()])
    counters = trainer.strategy.remat.counters if strategy == "remat" else None
    how = f" (batches run again: {counters.retries}, values evicted: {counters.evictions})" if counters else ""
    print("RESULT weights", hash(weights.numpy().tobytes()), how)


def main() -> None:
    """Run the three, and compare."""
    results = []
    for name, strategy, room in (("no limit", "auto", 0), ("plainly", "auto", ROOM), ('"remat"', "remat", ROOM)):
        command = [sys.executable, "-W", "ignore", __file__, strategy, str(room)]
        environment = {**os.environ, **STEADY, "PYTHONHASHSEED": "0"}
        output = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        lines = [line for line in output.stdout.splitlines() if line.startswith("RESULT")]
        results.append(lines[-1] if lines else output.stderr[-500:])
        print(f"{name:10}", results[-1].removeprefix("RESULT "))
    print("same weights:", results[0].split()[:3] == results[2].split()[:3])


if __name__ == "__main__":
    if len(sys.argv) > 1:
        train(sys.argv[1], int(sys.argv[2]))
    else:
        main()
