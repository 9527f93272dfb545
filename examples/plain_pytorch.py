"""Remat in a plain PyTorch loop: three lines more, no change to the model; checked, and beside torch.utils.checkpoint.

python examples/plain_pytorch.py
"""

import torch
from byte_gpt import ByteGPT, stdlib_batches
from figures import save_figures
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lightning_remat import Remat
from lightning_remat.runtime.memory import measure_peak

STEPS = 8


class CheckpointedGPT(ByteGPT):
    """The same model, with torch.utils.checkpoint written into its forward."""

    # --8<-- [start:checkpointed]
    def forward(self, tokens: Tensor) -> Tensor:
        x = self.drop(self.embed(tokens) + self.position[: tokens.shape[1]])
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)  # to take out: x = block(x)
        return self.head(self.norm(x))

    # --8<-- [end:checkpointed]


def train(remat: Remat, kind: type[ByteGPT] = ByteGPT) -> tuple[list[float], list[Tensor], int]:
    """Train from a fixed seed; returns the losses and the weights, and the peak bytes of one more step."""
    torch.manual_seed(0)
    model = kind(blocks=6, width=128, heads=4, context=128)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batches = iter(stdlib_batches(context=128, batch=4))

    # --8<-- [start:step]
    def step() -> float:
        with remat:  # activations made in here are dropped or kept as the policy says
            loss = model.loss(next(batches))
        loss.backward()  # may stand inside as well; dropped values are computed again one by one
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    # --8<-- [end:step]

    losses = [step() for _ in range(STEPS)]
    weights = [p.detach().clone() for p in model.parameters()]
    return losses, weights, measure_peak(step).peak_bytes


def same_bits(ones: list[Tensor], others: list[Tensor]) -> bool:
    """Compare byte by byte, so that NaN equals NaN and 0.0 does not equal -0.0."""
    return all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(ones, others, strict=True))


def three_lines() -> tuple[list[float], list[Tensor], int, int]:
    print("== Three lines")
    # --8<-- [start:compare]
    plain_losses, plain_weights, plain_peak = train(Remat(policy="none"))
    remat = Remat(policy="full")
    losses, weights, peak = train(remat)

    print(f"plain: loss {plain_losses[-1]:.6f}, peak {plain_peak / 2**20:.1f} MiB")
    print(f"remat: loss {losses[-1]:.6f}, peak {peak / 2**20:.1f} MiB, blocks {', '.join(remat.blocks)}")
    print(f"losses equal: {losses == plain_losses}; weights equal: {same_bits(weights, plain_weights)}")
    # --8<-- [end:compare]
    return plain_losses, plain_weights, plain_peak, peak


def checked(plain_losses: list[float]) -> dict[str, float | str]:
    print("\n== Checked")
    # --8<-- [start:verify]
    remat = Remat(policy="full", verify=True)
    losses, _, _ = train(remat)
    found = remat.verifier
    print(f"verify=True: {len(found.checked)} kinds of op checked, {len(found.different)} different")

    remat = Remat(policy="full", verify_every_n_steps=3)
    again, _, _ = train(remat)
    counters = remat.counters
    print(f"verify_every_n_steps=3: {counters.verified} comparisons, {counters.verified_different} different")
    # --8<-- [end:verify]
    print(f"losses equal: {losses == again == plain_losses}")
    return {
        "kinds": len(found.checked),
        "verified": counters.verified,
        "verified_different": counters.verified_different,
    }


def from_checkpoint(plain_losses: list[float], peak: int) -> dict[str, float | str]:
    print("\n== From torch.utils.checkpoint")
    losses, _, before = train(Remat(policy="none"), CheckpointedGPT)
    print(f"torch.utils.checkpoint: peak {before / 2**20:.1f} MiB, losses equal: {losses == plain_losses}")
    remat = Remat(policy="full")
    losses, _, both = train(remat, CheckpointedGPT)
    print(
        f"both at once:           peak {both / 2**20:.1f} MiB, losses equal: {losses == plain_losses}, "
        f"ops that lightning-remat ran again: {remat.stats.replayed_ops}"
    )
    print(f"taken out, policy full: peak {peak / 2**20:.1f} MiB")
    return {"checkpoint_peak": before, "both_peak": both, "both_replayed": remat.stats.replayed_ops}


def main() -> None:
    torch.set_num_threads(1)
    plain_losses, _, plain_peak, peak = three_lines()
    verified = checked(plain_losses)
    migrated = from_checkpoint(plain_losses, peak)
    save_figures(plain_peak=plain_peak, full_peak=peak, full_share=peak / plain_peak, **verified, **migrated)


if __name__ == "__main__":
    main()
