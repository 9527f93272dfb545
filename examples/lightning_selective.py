"""Remat in a Lightning project: one argument of the Trainer. What was kept and what ran again, and the same weights.

python examples/lightning_selective.py
"""

import lightning.pytorch as L
import torch
from byte_gpt import LitByteGPT, stdlib_batches
from figures import save_figures
from lightning.pytorch.strategies import Strategy
from rich.console import Console

from lightning_remat import RematStrategy
from lightning_remat.runtime.memory import measure_peak

BATCHES = 10


def fit(strategy: str | Strategy) -> tuple[LitByteGPT, int]:
    """Train; returns the module and the peak bytes of the whole of `fit`."""
    L.seed_everything(0)
    model = LitByteGPT(blocks=4, width=128, heads=4, context=128)
    trainer = L.Trainer(
        strategy=strategy,
        max_epochs=1,
        limit_train_batches=BATCHES,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    peak = measure_peak(lambda: trainer.fit(model, stdlib_batches(context=128, batch=4))).peak_bytes
    return model, peak


def main() -> None:
    torch.set_num_threads(1)
    plain, plain_peak = fit("auto")  # as the project was

    # --8<-- [start:strategy]
    # strategy="remat" is the short form, with the default policy.
    strategy = RematStrategy(policy="selective")  # keep matrix products and attention, compute the rest again
    # --8<-- [end:strategy]
    print("== Trained")
    ours, peak = fit(strategy)
    print(strategy.remat.summary)

    print("\n== Report")
    # --8<-- [start:report]
    # Which modules' activations were dropped, and what that cost. The first step is the one that is accounted for.
    Console().print(strategy.remat.report())
    # --8<-- [end:report]

    print("\n== Compared")
    # --8<-- [start:compare]
    equal = all(torch.equal(a, b) for a, b in zip(plain.parameters(), ours.parameters(), strict=True))
    print(f"peak of fit: {plain_peak / 2**20:.1f} MiB plainly, {peak / 2**20:.1f} MiB with the strategy")
    print(f"weights equal: {equal}")
    # --8<-- [end:compare]
    save_figures(batches=BATCHES, plain_peak=plain_peak, peak=peak, share=peak / plain_peak, equal=str(equal))


if __name__ == "__main__":
    main()
