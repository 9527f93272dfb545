"""A Hugging Face model, random weights and nothing downloaded: its own checkpointing off, a policy around it instead.

python examples/tutorial_huggingface.py
"""

import hashlib
import tempfile
import textwrap
from typing import Any

import torch
import transformers
from byte_gpt import stdlib_batches
from figures import save_figures

from lightning_remat import ConfigurationError, Remat
from lightning_remat.runtime.memory import measure_peak

STEPS, LENGTH = 4, 128


def model() -> transformers.PreTrainedModel:
    """A small Llama with the same random weights every time."""
    torch.manual_seed(0)
    # --8<-- [start:model]
    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        attention_dropout=0.1,
        use_cache=False,  # a cache of keys and values is for generating text
    )
    llama = transformers.LlamaForCausalLM(config).train()
    # --8<-- [end:model]
    return llama


def train(llama: transformers.PreTrainedModel, remat: Remat) -> tuple[list[float], int]:
    """Train on bytes; returns the losses and the peak bytes of one more step."""
    optimizer = torch.optim.AdamW(llama.parameters(), lr=1e-3)
    torch.manual_seed(1)
    batches = iter(stdlib_batches(context=LENGTH, batch=4))

    # --8<-- [start:step]
    def step() -> float:
        tokens = next(batches)
        with remat:
            loss = llama(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    # --8<-- [end:step]
    losses = [step() for _ in range(STEPS)]
    return losses, measure_peak(step).peak_bytes


def with_its_own() -> transformers.PreTrainedModel:
    """The model with the checkpointing that comes with it."""
    llama = model()
    # The switch has a new name since transformers 5.24, which warns of the old one.
    switch = getattr(llama, "activation_checkpointing_enable", None) or llama.gradient_checkpointing_enable
    switch()
    return llama


# --8<-- [start:trainer]
class RecomputingTrainer(transformers.Trainer):
    """The Trainer of transformers, with recomputation around its steps."""

    def __init__(self, *args: Any, remat: Remat, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.remat = remat

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        with self.remat:
            return super().compute_loss(*args, **kwargs)

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        step = super().training_step
        return self.remat.attempt(lambda: step(model, dict(inputs), num_items_in_batch), model)
        # --8<-- [end:trainer]


def train_by_trainer(make: Any, **options: Any) -> str:
    """Train by a Trainer; returns a digest of the weights."""
    torch.manual_seed(1)
    rows = [
        row for batch, _ in zip(stdlib_batches(context=LENGTH, batch=4), range(STEPS), strict=False) for row in batch
    ]
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            folder, max_steps=STEPS, per_device_train_batch_size=4, use_cpu=True, dataloader_pin_memory=False,
            save_strategy="no", logging_strategy="no", report_to="none", disable_tqdm=True,
        )  # fmt: skip
        data = [{"input_ids": row, "labels": row} for row in rows]
        trainer = make(model=model(), args=arguments, train_dataset=data, **options)
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()
    bits = b"".join(p.detach().numpy().tobytes() for p in trainer.model.parameters())
    return hashlib.sha256(bits).hexdigest()[:16]


def main() -> None:
    """Refused with its own checkpointing on, then four ways to train, then its own Trainer."""
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    print("== Both at once")
    # --8<-- [start:refused]
    try:
        train(with_its_own(), Remat(policy="full"))
    except ConfigurationError as error:
        print(textwrap.fill(str(error), 100, subsequent_indent="  "))
    # --8<-- [end:refused]

    print("\n== One at a time")
    llama = model()
    remat = Remat(policy="selective")
    rows = {
        "plain": train(model(), Remat(policy="none")),
        "its own": train(with_its_own(), Remat(policy="none")),
        "full": train(model(), Remat(policy="full")),
        "selective": train(llama, remat),
    }
    plain, plain_peak = rows["plain"]
    figures: dict[str, float | str] = {"steps": STEPS}
    for name, (losses, peak) in rows.items():
        print(f"{name:10} peak {peak / 2**20:5.1f} MiB  loss {losses[-1]:.6f}  losses equal: {losses == plain}")
        key = name.replace(" ", "_")
        figures |= {f"{key}_peak": peak, f"{key}_share": peak / plain_peak, f"{key}_equal": str(losses == plain)}
    print("blocks:", ", ".join(remat.blocks))

    print("\n== By its Trainer")
    plainly = train_by_trainer(transformers.Trainer)
    # --8<-- [start:by-trainer]
    remat = Remat(policy="full")
    ours = train_by_trainer(RecomputingTrainer, remat=remat)  # hands `remat=` to the Trainer
    # --8<-- [end:by-trainer]
    print(f"weights: {plainly} by Trainer, {ours} with recomputation of {remat.stats.replayed_ops} ops a step")
    print("the same in every bit:", plainly == ours)
    save_figures(**figures)


if __name__ == "__main__":
    main()
