"""A first look: one small GPT trained plainly, and in half of the memory. Prints the summary that Lightning shows.

python examples/start.py [--json FILE]
"""

import argparse
import json
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import lightning.pytorch as L
import torch
from byte_gpt import LitByteGPT, stdlib_batches

from lightning_remat import RematStrategy
from lightning_remat.runtime.memory import measure_peak

STEPS = 12
SHARE = 0.5  # of the plain peak
QUIET = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}


def model_and_data() -> tuple[LitByteGPT, torch.utils.data.DataLoader]:
    """The same weights and the same batches each time."""
    torch.manual_seed(0)
    return LitByteGPT(blocks=6, width=128, heads=4, context=128), stdlib_batches(context=128, batch=8)


def train_plainly() -> tuple[LitByteGPT, int]:
    """Lightning as it is; returns the model and the peak: parameters, and all that was allocated in training."""
    model, data = model_and_data()
    trainer = L.Trainer(accelerator="cpu", devices=1, max_steps=STEPS, **QUIET)
    allocated = measure_peak(lambda: trainer.fit(model, data)).peak_bytes
    return model, sum(p.nbytes for p in model.parameters()) + allocated


def train_within(budget: int) -> tuple[LitByteGPT, RematStrategy]:
    """The same under a budget: one argument more."""
    model, data = model_and_data()
    strategy = RematStrategy(budget=budget)  # strategy="remat": the same, with the memory that the device has
    trainer = L.Trainer(strategy=strategy, accelerator="cpu", devices=1, max_steps=STEPS, **QUIET)
    trainer.fit(model, data)
    return model, strategy


@contextmanager
def summary_on_stdout() -> Iterator[None]:
    """Lightning logs to standard error; here the summary, and nothing else, belongs to what is printed."""
    log = logging.getLogger("lightning.pytorch")
    before = log.handlers
    handler = logging.StreamHandler(sys.stdout)
    handler.addFilter(lambda record: record.getMessage().startswith("Recomputation"))
    log.handlers = [handler]
    try:
        yield
    finally:
        log.handlers = before


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()

    plain, plain_peak = train_plainly()
    print(f"Plain training: peak {plain_peak / 2**20:.1f} MiB\n")
    budget = int(SHARE * plain_peak)
    with summary_on_stdout():
        ours, strategy = train_within(budget)
    same = all(torch.equal(a, b) for a, b in zip(plain.parameters(), ours.parameters(), strict=True))
    print(f"\nWeights equal in every bit: {'yes' if same else 'no'}")

    if options.json is not None:
        figures = {
            "plain_peak_bytes": plain_peak,
            "budget_bytes": budget,
            "peak_bytes": strategy.remat.measured_peak_bytes,
            "predicted_peak_bytes": strategy.remat.plan.peak_bytes,
            "replayed_ops": strategy.remat.stats.replayed_ops,
            "recorded_ops": strategy.remat.stats.recorded_ops,
            "share": strategy.remat.measured_peak_bytes / plain_peak,
            "steps": STEPS,
            "same_weights": "yes" if same else "no",
        }
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
