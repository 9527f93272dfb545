"""``with remat:`` in ``compute_loss`` of a Trainer of transformers: every bit of what it does without."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

from lightning_remat import ConfigurationError, Remat
from lightning_remat.runtime.memory import measure_peak
from tests.helpers.bits import difference_in_bits, random_streams
from tests.helpers.exact import EVERYTHING, recompute_all
from tests.helpers.seed import seed_everything

pytestmark = [
    pytest.mark.filterwarnings("ignore:policy='auto'. budget=1 B is not feasible"),  # asked for on purpose
    # Of the data loader: no accelerator on a machine without one.
    pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true:UserWarning"),
]


def model(**options: Any) -> GPT2LMHeadModel:
    """Random weights, dropout everywhere."""
    config = GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=2, use_cache=False, **options)
    return GPT2LMHeadModel(config)


def data(rows: int = 24) -> list[dict[str, Tensor]]:
    """Of different lengths: padded rows, and batches that differ."""
    generator = torch.Generator().manual_seed(5)
    rows_ = [torch.randint(0, 64, (16,), generator=generator) for _ in range(rows)]
    return [{"input_ids": row, "labels": row} for row in rows_]


class Recomputing(Trainer):
    """What the documentation says to write."""

    remat: Any = nullcontext()

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        with self.remat:
            return super().compute_loss(*args, **kwargs)


class RunningAgain(Recomputing):
    """With the step run again if memory runs out."""

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        step = super().training_step
        return self.remat.attempt(lambda: step(model, dict(inputs), num_items_in_batch), model)


class Watch(TrainerCallback):
    """Gradients before every step of the optimizer, and evaluations."""

    def __init__(self) -> None:
        self.gradients: list[dict[str, Tensor | None]] = []
        self.replayed = 0
        self.trainer: Any = None

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        named = model.named_parameters()
        self.gradients.append({n: None if p.grad is None else p.grad.clone() for n, p in named})
        if isinstance(self.trainer.remat, Remat):
            self.replayed += self.trainer.remat.stats.replayed_ops


def trained(
    folder: Path,
    remat: Remat | None,
    *,
    kind: type[Recomputing] = Recomputing,
    net: Callable[[], Any] = model,
    resume: str | None = None,
    more: dict[str, Any] | None = None,
    **options: Any,
) -> tuple[dict[str, Any], Watch]:
    """Train, and collect all that it leaves behind."""
    arguments: dict[str, Any] = {
        "output_dir": str(folder),
        "use_cpu": True,
        "max_steps": 4,
        "per_device_train_batch_size": 3,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }
    seed_everything(3)
    watch = Watch()
    trainer = kind(
        model=net(),
        args=TrainingArguments(**(arguments | options)),
        train_dataset=data(),
        callbacks=[watch],
        **(more or {}),
    )
    watch.trainer = trainer
    if remat is not None:
        trainer.remat = remat
    trainer.train(resume_from_checkpoint=resume)
    logs = [
        {k: v for k, v in entry.items() if "runtime" not in k and "per_second" not in k}
        for entry in trainer.state.log_history
    ]
    left = {
        "logs": logs,
        "gradients": watch.gradients,
        "state": {n: t.clone() for n, t in trainer.model.state_dict().items()},
        "optimizer": trainer.optimizer.state_dict(),
        "streams": random_streams(),
    }
    return left, watch


CASES: dict[str, dict[str, Any]] = {
    "as usual": {},
    "accumulated and clipped": {"gradient_accumulation_steps": 2, "max_grad_norm": 0.1},
    "smoothed labels": {"label_smoothing_factor": 0.1},
    "bf16": {"bf16": True, "gradient_accumulation_steps": 2},
    "evaluated": {"eval_strategy": "steps", "eval_steps": 2, "more": {"eval_dataset": data(6)}},
}

WAYS: dict[str, Callable[[], Remat]] = {
    "auto": lambda: Remat(),
    "full": lambda: Remat(policy="full"),
    "selective": lambda: Remat(policy="selective"),
    "recompute all": lambda: Remat(policy=recompute_all),
    "budget": lambda: Remat(budget=1),
    "offload": lambda: Remat(policy="full", offload=EVERYTHING),
}


PLANNED = ("accumulated and clipped",)
"""Cases that a plan is made for: that takes seconds, and a plan knows nothing of what the others add."""


@pytest.fixture(autouse=True)
def quiet() -> Any:
    """Transformers' own lines, and the variables that its Trainer sets for good."""
    before = dict(os.environ)
    transformers.logging.set_verbosity_error()
    yield
    transformers.logging.set_verbosity_warning()
    for name in set(os.environ) - set(before):
        del os.environ[name]


@pytest.mark.parametrize("name", CASES)
def test_training_gives_every_bit_of_the_plain_one(tmp_path: Path, name: str) -> None:
    """Logged losses and norms, gradients, weights, optimizer state and random streams."""
    plain, _ = trained(tmp_path, None, **CASES[name])
    for way, make in WAYS.items():
        if way == "budget" and name not in PLANNED:
            continue
        remat = make()
        ours, watch = trained(tmp_path, remat, **CASES[name])
        assert difference_in_bits(ours, plain) == [], way
        assert way in ("auto", "offload") or watch.replayed > 0, way
        assert way == "auto" or remat.blocks == [f"transformer.h.{i}" for i in range(2)], way
        remat.close()


def test_training_that_is_resumed_goes_on_in_the_same_bits(tmp_path: Path) -> None:
    """From its own checkpoint, under another policy."""

    def run(folder: Path, first: Remat | None, second: Remat | None) -> dict[str, Any]:
        trained(folder, first, save_strategy="steps", save_steps=2, max_steps=2, lr_scheduler_type="constant")
        resume = str(folder / "checkpoint-2")
        return trained(folder, second, resume=resume, max_steps=5, lr_scheduler_type="constant")[0]

    plain = run(tmp_path / "plain", None, None)
    assert difference_in_bits(run(tmp_path / "ours", Remat(policy="full"), Remat(policy="selective")), plain) == []


def test_its_own_checkpointing_is_refused_with_its_switch(tmp_path: Path) -> None:
    """Which the arguments of the Trainer may have turned on."""
    with pytest.raises(ConfigurationError, match="disable"):
        trained(tmp_path, Remat(policy="full"), activation_checkpointing=True)


@pytest.mark.parametrize("fails", ["forward", "backward"])
def test_a_step_that_runs_out_of_memory_is_run_again(tmp_path: Path, fails: str) -> None:
    """Accumulated gradients are neither lost nor counted twice."""
    failing: list[str] = []

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            trip("forward")
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            trip("backward")
            return grad

    def trip(where: str) -> None:
        if failing and failing[0] == where:
            del failing[0]
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB. (This is made up.)")

    def failing_model() -> Any:
        net = model()
        net.transformer.h[1].mlp.register_forward_hook(lambda module, args, out: Fails.apply(out))
        return net

    options = {"gradient_accumulation_steps": 2, "net": failing_model}
    plain, _ = trained(tmp_path, None, **options)
    failing += [fails] * 3
    remat = Remat(policy="full")
    ours, _ = trained(tmp_path, remat, kind=RunningAgain, **options)
    assert difference_in_bits(ours, plain) == []
    assert remat.counters.retries == 3
    assert not failing


def test_memory_falls() -> None:
    """The loss inside the tape, as the recipe has it, and blocks that were found."""

    def peak(policy: str) -> int:
        seed_everything(3)
        net = model().train()
        remat = Remat(policy=policy)
        batch = torch.randint(0, 64, (16, 16))

        def step() -> None:
            with remat:
                loss = net(input_ids=batch, labels=batch).loss
            loss.backward()

        step()
        return measure_peak(step).peak_bytes

    assert peak("full") < 0.6 * peak("none")
