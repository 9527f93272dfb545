"""Remat in the Trainer of Hugging Face's transformers: three lines, and what they save.

python examples/huggingface_trainer.py
"""

from __future__ import annotations

import tempfile
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import transformers
from figures import save_figures
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from lightning_remat import Remat
from lightning_remat.runtime.memory import measure_peak

STEPS = 4


# --8<-- [start:recipe]
class RematTrainer(Trainer):
    remat: AbstractContextManager[Any] = nullcontext()

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        with self.remat:
            return super().compute_loss(*args, **kwargs)


# --8<-- [end:recipe]


class Measured(RematTrainer):
    """Notes the peak of the last step."""

    peak = 0

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        loss: list[Any] = []
        step = super().training_step
        self.peak = measure_peak(lambda: loss.append(step(*args, **kwargs))).peak_bytes
        return loss[0]


def train(remat: AbstractContextManager[Any], **options: Any) -> tuple[list[float], list[Tensor], int]:
    """Train a small GPT-2 with random weights, nothing downloaded; returns losses, weights, and the peak of a step."""
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=256, n_positions=128, n_embd=128, n_layer=6, n_head=4, use_cache=False)
    rows = torch.randint(0, 256, (4 * STEPS, 128))
    with tempfile.TemporaryDirectory() as folder:
        # --8<-- [start:use]
        trainer = Measured(
            model=GPT2LMHeadModel(config),
            args=TrainingArguments(
                output_dir=folder,
                max_steps=STEPS,
                per_device_train_batch_size=4,
                logging_steps=1,
                use_cpu=True,
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
                **options,
            ),
            train_dataset=[{"input_ids": row, "labels": row} for row in rows],
        )
        trainer.remat = remat
        trainer.train()
        # --8<-- [end:use]
    losses = [float(entry["loss"]) for entry in trainer.state.log_history if "loss" in entry]
    return losses, [p.detach() for p in trainer.model.parameters()], trainer.peak


def main() -> None:
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    plain_losses, plain_weights, plain_peak = train(nullcontext())
    remat = Remat(policy="full")
    losses, weights, peak = train(remat)
    equal = losses == plain_losses and all(map(torch.equal, weights, plain_weights))

    print("\n== With and without")
    print(f"plain: loss {plain_losses[-1]:.4f}, peak of a step {plain_peak / 2**20:.1f} MiB")
    print(f"remat: loss {losses[-1]:.4f}, peak of a step {peak / 2**20:.1f} MiB, blocks {', '.join(remat.blocks)}")
    print(f"losses and weights equal: {equal}")
    save_figures(plain_peak=plain_peak, full_peak=peak, equal=str(equal))


if __name__ == "__main__":
    main()
