"""Remat in Lightning: one argument of the Trainer. Prints what was kept and what was computed again.

python examples/lightning_selective.py
"""

import lightning.pytorch as L
from byte_gpt import LitByteGPT, stdlib_batches
from rich.console import Console

from lightning_remat import RematStrategy


def main() -> None:
    L.seed_everything(0)
    model = LitByteGPT(blocks=4, width=128, heads=4, context=128)

    # strategy="remat" is the short form, with the default policy.
    strategy = RematStrategy(policy="selective")  # keep matrix products and attention, compute the rest again
    trainer = L.Trainer(
        strategy=strategy, max_epochs=1, limit_train_batches=10, logger=False, enable_checkpointing=False
    )
    trainer.fit(model, stdlib_batches(context=128, batch=4))

    # Which modules' activations were dropped, and what that cost. The first step is the one that is accounted for.
    Console().print(strategy.remat.report())


if __name__ == "__main__":
    main()
