"""Remat in a plain PyTorch loop: three lines more, no change to the model.

python examples/plain_pytorch.py
"""

import torch
from byte_gpt import ByteGPT, stdlib_batches

from lightning_remat import Remat
from lightning_remat.runtime.memory import measure_peak

STEPS = 8


def train(remat: Remat) -> tuple[list[float], int]:
    """Train from a fixed seed; returns the losses and the peak bytes of one more step."""
    torch.manual_seed(0)
    model = ByteGPT(blocks=6, width=128, heads=4, context=128)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batches = iter(stdlib_batches(context=128, batch=4))

    def step() -> float:
        with remat:  # activations made in here are dropped or kept as the policy says
            loss = model.loss(next(batches))
        loss.backward()  # may stand inside as well; dropped values are computed again one by one
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    losses = [step() for _ in range(STEPS)]
    return losses, measure_peak(step).peak_bytes


def main() -> None:
    plain_losses, plain_peak = train(Remat(policy="none"))
    remat = Remat(policy="full")
    losses, peak = train(remat)

    print(f"plain: loss {plain_losses[-1]:.6f}, peak {plain_peak / 2**20:.1f} MiB")
    print(f"remat: loss {losses[-1]:.6f}, peak {peak / 2**20:.1f} MiB, blocks {', '.join(remat.blocks)}")
    print(f"losses equal: {losses == plain_losses}")


if __name__ == "__main__":
    main()
