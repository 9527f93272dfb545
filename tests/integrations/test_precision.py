"""Every precision of the trainer: what training leaves behind is the same in every bit, the scale included."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins import (
    BitsandbytesPrecision,
    MixedPrecision,
    TransformerEnginePrecision,
)
from torch import Tensor, nn

from lightning_remat import ConfigurationError, RematCallback, RematStrategy
from tests.helpers.bits import difference_in_bits
from tests.helpers.exact import EVERYTHING, recompute_all
from tests.helpers.training import Lit, Net, Result, regression, regression_data, train, trainer_for
from tests.integrations.faults import FaultMode, Faults, Tripping, faults_now

pytestmark = [
    pytest.mark.filterwarnings("ignore:policy='auto'. budget=1 B is not feasible"),  # asked for on purpose
    pytest.mark.filterwarnings("ignore:Memory ran out again and again"),  # likewise
    # A checkpoint in mid-epoch: the data, a list, begin anew in every run alike.
    pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended"),
]

SCALE = 2.0**20
"""Gradients in float16 overflow at this scale, and not at one that is some steps lower."""


def half(scale: float = SCALE) -> MixedPrecision:
    """``precision="16-mixed"`` on the CPU, where the trainer itself takes bfloat16."""
    return MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=2))


class Scales(Callback):
    """What the scaler holds after every batch."""

    def __init__(self) -> None:
        self.seen: list[dict[str, Any]] = []

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        if scaler is not None:
            self.seen.append(dict(scaler.state_dict()))


class Wide(nn.Module):
    """`Net` without the norms, whose running statistics some CPU kernels do not take in float16; some weights twice."""

    def __init__(self, width: int = 16, depth: int = 3) -> None:
        super().__init__()
        self.stem = nn.Linear(8, width)
        self.layers = nn.ModuleList([Part(width) for _ in range(depth)])
        self.head = nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for layer in [*self.layers, self.layers[0]]:
            x = layer(x)
        return self.head(x)


class Part(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.act = nn.ReLU(inplace=True)
        self.drop = nn.Dropout(0.2)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.drop(self.act(self.up(self.norm(x)))))


class InTurn(Lit):
    """Manual optimization: two optimizers in one step, the second on what the first has just changed."""

    def __init__(self, net: nn.Module, loss: Any) -> None:
        super().__init__(net, loss)
        self.automatic_optimization = False
        self.judge = nn.Sequential(nn.Linear(1, 16), nn.GELU(), nn.Linear(16, 1))

    def training_step(self, batch: Any, index: int) -> None:
        self.steps_run += 1
        x, _ = batch
        for optimizer in self.optimizers():
            loss = self.loss(self.net, batch) + self.judge(self.net(x)).square().mean()
            self.losses.append(loss.detach())
            optimizer.zero_grad()
            self.manual_backward(loss)
            self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
            optimizer.step()
            optimizer.zero_grad()

    def configure_optimizers(self) -> Any:
        return [torch.optim.Adam(self.net.parameters(), lr=1e-2), torch.optim.SGD(self.judge.parameters(), lr=1e-2)]


@dataclass(frozen=True, kw_only=True)
class Case:
    make: Callable[..., Any] = Lit
    net: Callable[[], nn.Module] = Wide
    batches: int = 6
    options: dict[str, Any] = field(default_factory=dict)
    scale: float | None = None  # with float16 and a scaler that begins with it


CASES = {
    "16-mixed": Case(scale=SCALE, batches=10),
    "16-mixed, no overflow": Case(scale=2.0, batches=4),
    "16-mixed, only overflows": Case(scale=2.0**60, batches=4),
    "16-mixed, running statistics": Case(net=Net, scale=SCALE),
    "16-mixed, accumulated and clipped": Case(
        scale=2.0**17, batches=12, options={"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}
    ),
    "16-mixed, clipped by value": Case(
        scale=SCALE, options={"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}
    ),
    "16-mixed, two optimizers": Case(make=InTurn, scale=SCALE, batches=8),
    "bf16-mixed": Case(options={"precision": "bf16-mixed"}),
    "bf16-mixed, running statistics": Case(net=Net, options={"precision": "bf16-mixed", "gradient_clip_val": 0.1}),
    "bf16-mixed, two optimizers": Case(make=InTurn, options={"precision": "bf16-mixed"}),
    "16-true": Case(options={"precision": "16-true"}),
    "16-true, accumulated": Case(options={"precision": "16-true", "accumulate_grad_batches": 2}),
    "bf16-true": Case(options={"precision": "bf16-true"}),
    "bf16-true, running statistics": Case(net=Net, options={"precision": "bf16-true"}),
    "64-true": Case(options={"precision": "64-true"}),
    "64-true, running statistics": Case(net=Net, options={"precision": "64-true", "accumulate_grad_batches": 2}),
    "64-true, two optimizers": Case(make=InTurn, options={"precision": "64-true"}),
}

WAYS: dict[str, Callable[[], dict[str, Any]]] = {
    "remat": lambda: {"strategy": "remat"},
    "full": lambda: {"policy": "full"},
    "selective": lambda: {"policy": "selective"},
    "recompute all": lambda: {"policy": recompute_all},
    "budget": lambda: {"strategy": RematStrategy(budget=1)},
    "offload": lambda: {"strategy": RematStrategy(policy="full", offload=EVERYTHING)},
    "callback": lambda: {"callback": RematCallback(policy="sqrt")},
}


def run(case: Case, *, callback: Callback | None = None, **given: Any) -> tuple[Result, list[dict[str, Any]]]:
    scales = Scales()
    options = dict(case.options)
    if case.scale is not None:
        options["plugins"] = [half(case.scale)]
    result = train(
        lambda: case.make(case.net(), regression),
        regression_data(case.batches),
        callbacks=lambda: [scales, *([callback] if callback else [])],
        **given,
        **options,
    )
    return result, scales.seen


PLAIN: dict[str, tuple[Result, list[dict[str, Any]]]] = {}


def plain(name: str) -> tuple[Result, list[dict[str, Any]]]:
    if name not in PLAIN:
        PLAIN[name] = run(CASES[name])
    return PLAIN[name]


# All that there is for the precisions as such, and what goes furthest for the rest.
PAIRS = [(name, way) for name in CASES for way in WAYS if "," not in name or way in ("recompute all", "budget")]


@pytest.mark.parametrize(("name", "way"), PAIRS)
def test_training_is_the_same_in_every_bit(name: str, way: str) -> None:
    """Losses, gradients, weights, buffers, optimizer state, random streams, and what the scaler holds."""
    expected, scales = plain(name)
    result, ours = run(CASES[name], **WAYS[way]())
    assert result.difference(expected) == []
    assert difference_in_bits(ours, scales) == []
    assert len(ours) == (0 if CASES[name].scale is None else CASES[name].batches)
    if way in ("full", "selective", "recompute all", "budget") and "two optimizers" not in name:
        assert result.replayed_ops > 0, "it was compared with itself"


@pytest.mark.parametrize("name", ["16-mixed", "16-mixed, accumulated and clipped", "16-mixed, two optimizers"])
def test_some_steps_overflowed_and_others_did_not(name: str) -> None:
    """The cases are what they are meant to be: the scale goes down, and up again."""
    _, scales = plain(name)
    values = [s["scale"] for s in scales]
    assert any(b < a for a, b in pairwise(values)), values
    assert any(b > a for a, b in pairwise(values)), values


class Failing(Lit):
    """Memory may run out in forward and backward, not in what comes after."""

    def training_step(self, batch: Any, index: int) -> Tensor:
        with faults_now().armed("forward"):
            return super().training_step(batch, index)

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        with faults_now().armed("backward"):
            super().backward(loss, *args, **kwargs)


class FailingInTurn(InTurn):
    """The same, where the first of two optimizers has stepped, and the scaler with it, when the second turn fails."""

    def training_step(self, batch: Any, index: int) -> None:
        with faults_now().armed("forward"):
            super().training_step(batch, index)

    def clip_gradients(self, *args: Any, **kwargs: Any) -> None:
        with faults_now().armed(None):
            super().clip_gradients(*args, **kwargs)

    def optimizers(self, *args: Any) -> Any:
        return [Unarmed(o) for o in super().optimizers(*args)]


class Unarmed:
    """An optimizer whose step does not fail; the closure-less step of manual optimization."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    def step(self) -> None:
        with faults_now().armed(None):
            self.optimizer.step()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.optimizer, name)


def tripping() -> Wide:
    net = Wide()
    for i, layer in enumerate(net.layers):
        net.layers[i] = Tripping(layer)
    return net


class NewBatch(Callback):
    """A batch that comes may fail again."""

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        faults_now().new_batch()


FAILING = {
    "automatic": (Failing, {}),
    "accumulated and clipped": (Failing, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}),
    "two optimizers": (FailingInTurn, {}),
}


@pytest.mark.parametrize("policy", ["auto", "full"])
@pytest.mark.parametrize("name", FAILING)
def test_a_batch_that_is_run_again_has_the_scale_that_it_had(name: str, policy: str) -> None:
    """Out of memory while gradients are scaled: the scaler is as it was, and steps that overflow are the same ones."""
    kind, options = FAILING[name]

    def trained(rate: float, strategy: Any) -> tuple[Result, list[dict[str, Any]], Faults]:
        scales, faults = Scales(), Faults(seed=7, rate=rate, most=2)
        with FaultMode(faults):
            result = train(
                lambda: kind(tripping(), regression),
                regression_data(10),
                strategy=strategy,
                callbacks=lambda: [NewBatch(), scales],
                plugins=[half()],
                **options,
            )
        return result, scales.seen, faults

    expected, scales, _ = trained(0.0, None)
    result, ours, faults = trained(0.02, RematStrategy(policy=policy, retries=5))
    result.steps_run = expected.steps_run  # what a module counts is put back; counted anyway are losses
    assert result.difference(expected) == []
    assert difference_in_bits(ours, scales) == []
    counters = result.trainer.strategy.remat.counters
    assert faults.happened
    assert counters.retries > 0


def test_sixteen_mixed_on_the_cpu_is_what_lightning_makes_of_it() -> None:
    """It takes bfloat16 there and says so; with recomputation as without."""
    for strategy in ("auto", "remat"):
        with pytest.warns(UserWarning, match="AMP with fp16 is not supported on CPU"):
            trainer = trainer_for(strategy, precision="16-mixed")
        assert trainer.precision == "bf16-mixed"


@pytest.mark.skipif(
    importlib.util.find_spec("transformer_engine") is not None, reason="the error is of the package that is missing"
)
@pytest.mark.parametrize("strategy", ["auto", "remat", "remat_ddp"])
def test_transformer_engine_without_its_package_is_lightnings_error(strategy: str) -> None:
    with pytest.raises(ModuleNotFoundError, match="transformer_engine"):
        trainer_for(strategy, precision="transformer-engine")


def test_a_checkpoint_brings_the_scale_along(tmp_path: Any) -> None:
    """Training that is resumed goes on at the scale that it had reached, under another policy too."""
    path = tmp_path / "half.ckpt"
    case = CASES["16-mixed"]

    def resumed(first: Any, second: Any) -> tuple[Result, list[dict[str, Any]]]:
        given = {"max_steps": 4, "max_epochs": -1}
        train_one = partial(run, Case(scale=case.scale, batches=10, options=given))
        begun, _ = train_one(strategy=first)
        begun.trainer.save_checkpoint(path)
        options = {"max_steps": 9, "max_epochs": -1}
        return run(Case(scale=2.0, batches=10, options=options), strategy=second, fit_options={"ckpt_path": str(path)})

    expected, scales = resumed("auto", "auto")
    result, ours = resumed(RematStrategy(policy="full"), RematStrategy(policy="selective"))
    assert result.difference(expected) == []
    assert difference_in_bits(ours, scales) == []


class TransformerEngine(TransformerEnginePrecision):
    """Lightning's plugin without its package, which is for CUDA only."""

    def __init__(self) -> None:
        self.weights_dtype = torch.bfloat16


class Bitsandbytes(BitsandbytesPrecision):
    """The same."""

    def __init__(self) -> None:
        self.dtype = torch.float32

    def convert_module(self, module: nn.Module) -> nn.Module:
        return module


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "transformer-engine": (TransformerEngine, r"precision='transformer-engine' .*past the dispatcher.*'bf16-mixed'"),
    "bitsandbytes": (Bitsandbytes, r"plugins=Bitsandbytes \(BitsandbytesPrecision\).*quantised.*'bf16-true'"),
}


@pytest.mark.parametrize("where", ["strategy", "callback"])
@pytest.mark.parametrize("name", REFUSED)
def test_a_precision_that_was_never_run_is_refused(name: str, where: str) -> None:
    """Before the first step, with the reason and the ways out, of which one is to recompute nothing."""
    make, message = REFUSED[name]

    def fit(policy: str) -> Lit:
        module = Lit(Wide(), regression)
        if where == "strategy":
            trainer = trainer_for(RematStrategy(policy=policy))
        else:
            trainer = trainer_for("auto", [RematCallback(policy=policy)])
        # In a trainer of its own, some of these ask for a strategy that only they go with.
        trainer.strategy.precision_plugin = make()
        trainer.fit(module, regression_data(2))
        return module

    with pytest.raises(ConfigurationError, match=message) as caught:
        fit("full")
    assert "policy='none'" in str(caught.value)


def test_a_refused_precision_without_recomputation_is_lightnings_business() -> None:
    """policy="none" is the way out that the message names."""
    trainer = trainer_for(RematStrategy(policy="none"))
    trainer.strategy.precision_plugin = Bitsandbytes()
    module = Lit(Wide(), regression)
    trainer.fit(module, regression_data(2))
    assert module.steps_run == 2
