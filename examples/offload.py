"""Offload to disk: what a step keeps leaves memory and comes back for backward, with and without recomputation.

python examples/offload.py [DIRECTORY]
"""

import sys
import tempfile

import torch
from byte_gpt import ByteGPT, stdlib_batches

from lightning_remat import Offload, Remat
from lightning_remat.runtime.memory import measure_peak

STEPS = 4


def train(name: str, remat: Remat) -> tuple[list[float], int]:
    """Train from a fixed seed; returns the losses, and the peak of one more step."""
    torch.manual_seed(0)
    model = ByteGPT(blocks=6, width=128, heads=4, context=128)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batches = iter(stdlib_batches(context=128, batch=8))

    def step() -> float:
        with remat:
            loss = model.loss(next(batches))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    losses = [step() for _ in range(STEPS)]
    peak = measure_peak(step).peak_bytes
    counters = remat.counters
    hidden = "" if counters.hidden is None else f"{counters.hidden:.0%} hidden"
    moved = f"{counters.bytes_out / (STEPS + 1) / 2**20:5.1f} MiB moved a step {hidden}"
    remat.close()  # gives the disk space back
    print(f"{name:24} peak {peak / 2**20:6.1f} MiB   {moved}   loss {losses[-1]:.6f}")
    return losses, peak


def main() -> None:
    """Four ways to run the same training."""
    directory = sys.argv[1] if len(sys.argv) > 1 else tempfile.gettempdir()
    # 2 MiB wait to leave, or are back early: enough for the largest contents of this small model.
    disk = Offload(directory, in_flight="2MiB")
    plain, plain_peak = train("none", Remat(policy="none"))
    moved, moved_peak = train("offload_only", Remat(policy="offload_only", offload=disk))
    results = [
        (moved, moved_peak),
        train("selective and offload", Remat(policy="selective", offload=disk)),
        train("full and offload", Remat(policy="full", offload=disk)),
    ]
    print("losses equal:", all(losses == plain for losses, _ in results))
    print(f"nothing recomputed, and {moved_peak / plain_peak:.0%} of the peak")


if __name__ == "__main__":
    main()
