"""A step on fake tensors says what the real one needs, and what it would need under a plan."""

import functools
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_remat import ConfigurationError, Remat
from lightning_remat.planning.fake.step import fake_trace
from lightning_remat.planning.planfile import PlanFile
from lightning_remat.planning.planner import Planner
from lightning_remat.planning.simulation import simulate
from lightning_remat.planning.trace import EXIT, NEED, RUN, SAVE, Trace
from lightning_remat.runtime.memory import measure_peak
from tests.helpers.bits import random_streams
from tests.planning.steps import CASES, Case, gpt2, resnet


@functools.cache
def traced(name: str) -> tuple[Case, Trace]:
    case = CASES[name]()
    return case, fake_trace(case[2], case[0], case[1])


def measured(case: Case, remat: Remat) -> int:
    """Peak bytes of a warm step with gradients that come into being in it."""
    model, batch, step = case

    def run() -> None:
        with remat:
            loss = step(model, batch)
        loss.backward()

    for _ in range(2):
        run()
        model.zero_grad(set_to_none=True)
    peak = measure_peak(run).peak_bytes
    model.zero_grad(set_to_none=True)
    return peak


def inside_blocks(trace: Trace, blocks: list[str]) -> list[bool]:
    """Policy ``full`` as a plan: all ops of a block but its last, which makes what leaves it."""
    place = [next((b for b in blocks if op.module == b or op.module.startswith(f"{b}.")), None) for op in trace.ops]
    return [
        here is not None and here == after for here, after in zip(place, [*place[1:], None], strict=True)
    ]  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_the_peak_of_a_plain_step_and_of_one_under_full(name: str) -> None:
    """Within 5 % of what is measured, both without recomputation and with all of it inside blocks."""
    case, trace = traced(name)
    plain = measured(case, Remat(policy="none"))
    assert plain > 14e6
    assert simulate(trace, [False] * len(trace.ops)).peak == pytest.approx(plain, rel=0.05)

    if name != "lstm":  # it has no blocks
        remat = Remat(policy="full")
        full = measured(case, remat)
        found = simulate(trace, inside_blocks(trace, remat.blocks))
        assert found.peak == pytest.approx(full, rel=0.05)
        assert len(found.replayed) == pytest.approx(remat.stats.replayed_ops, rel=0.02)


@pytest.mark.parametrize("name", ["gpt2", "resnet", "lstm", "encoder"])
def test_the_trace_is_that_of_a_real_step(name: str) -> None:
    """Op by op, value by value, who saved what, and in which order it is wanted: a plan for one fits the other."""
    (model, batch, step), trace = traced(name)
    remat = Remat(budget="100GiB")
    for _ in range(2):
        with remat:
            loss = step(model, batch)
        loss.backward()
        del loss
        model.zero_grad(set_to_none=True)
    assert remat.plan is not None
    real = remat.plan.trace
    assert [op.name for op in trace.ops] == [op.name for op in real.ops]
    assert [op.module for op in trace.ops] == [op.module for op in real.ops]
    assert trace.sequence == real.sequence
    assert trace.sizes == real.sizes
    assert trace.savers == real.savers
    kinds = (RUN, SAVE, NEED, EXIT)  # objects die in another order where a tape holds them for a moment
    assert [e for e in trace.events if e[0] in kinds] == [e for e in real.events if e[0] in kinds]


@pytest.mark.parametrize("name", ["gpt2", "resnet"])
def test_a_real_step_follows_a_plan_from_a_fake_one(name: str, tmp_path: Path) -> None:
    """And its peak is the predicted one."""
    case, trace = traced(name)
    planner = Planner(trace)
    result = planner.result(int(0.75 * planner.plain.peak_bytes))
    assert 0 < sum(result.chosen.drop) < len(trace.ops)
    PlanFile.of(result).save(tmp_path / "plan.json")
    remat = Remat(policy=str(tmp_path / "plan.json"))
    assert measured(case, remat) == pytest.approx(result.chosen.peak_bytes, rel=0.02)
    assert remat.stats.replayed_ops == len(simulate(trace, result.chosen.drop).replayed)


@pytest.mark.parametrize("name", ["gpt2", "resnet", "lstm"])
def test_books_balance_under_any_plan(name: str) -> None:
    """When a step is over, nothing is left but gradients, whatever was dropped."""
    (model, _, _), trace = traced(name)
    gradients = sum(p.numel() * p.element_size() for p in model.parameters())
    for share in (0, 0.2, 0.8, 1):
        plan = [random.random() < share for _ in trace.ops]
        assert simulate(trace, plan, timeline=True).levels[-1] == gradients


def test_nothing_of_the_callers_is_touched() -> None:
    model, batch, step = resnet()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    objects = [id(p) for p in model.parameters()]
    streams = random_streams()
    fake_trace(step, model, batch)
    assert [id(p) for p in model.parameters()] == objects
    assert all(p.grad is None for p in model.parameters())
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert str(random_streams()) == str(streams)


def test_a_model_without_memory_has_the_same_trace() -> None:
    """Parameters on the meta device, as a laptop would build a large model."""
    model, batch, step = gpt2(layers=2)
    with torch.device("meta"):
        empty = gpt2(layers=2)[0]
    trace = fake_trace(step, model, batch)
    other = fake_trace(step, empty, batch)
    assert (trace.sequence, trace.sizes, trace.events) == (other.sequence, other.sizes, other.events)


def test_blocks_show_as_modules_and_borders() -> None:
    model, batch, step = gpt2(layers=2)
    trace = fake_trace(step, model, batch)
    modules = {op.module for op in trace.ops}
    assert {"transformer.h.0.attn", "transformer.h.1.mlp.c_fc", "transformer.ln_f"} <= modules
    assert [trace.ops[i].module.split(".ln")[0] for i in trace.borders[:2]] == ["transformer.h.0", "transformer.h.1"]
    assert len(trace.borders) == 3


class Asks(nn.Module):
    """Asks for the content of what ``about`` says."""

    def __init__(self, about: str) -> None:
        super().__init__()
        self.about = about
        self.linear = nn.Linear(4, 4)

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, lengths = batch
        h = self.linear(x)
        if self.about == "lengths":
            h = h[:, : int(lengths.max())]
            h = h[lengths > 1].relu() if bool((lengths > 1).any()) else h
            h = h.masked_select(torch.ones(3, 4, dtype=torch.bool).triu()).exp()
        elif self.about == "activations" and h.sum() > 0:
            h = h.relu()
        return h.sum()


def call(model: nn.Module, batch: Any) -> Any:
    return model(batch)


def test_questions_about_whole_numbers_are_answered() -> None:
    trace = fake_trace(call, Asks("lengths"), (torch.randn(3, 5, 4), torch.tensor([1, 3, 2])))
    (relu,) = [op for op in trace.ops if op.name == "aten.relu.default"]
    assert trace.nbytes[relu.outputs[0]] == 2 * 3 * 4 * 4
    (exp,) = [op for op in trace.ops if op.name == "aten.exp.default"]
    assert trace.nbytes[exp.outputs[0]] == 2 * 9 * 4


def test_questions_about_activations_are_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"none in an estimate \(aten\..*, in module ''\)"):
        fake_trace(call, Asks("activations"), (torch.randn(3, 5, 4), torch.tensor([1, 3, 2])))


def test_a_step_without_a_loss_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="returned a NoneType"):
        fake_trace(lambda model, batch: None, nn.Linear(2, 2), torch.ones(1, 2))
    with pytest.raises(ConfigurationError, match=r"returned a tensor of shape \(1, 2\)"):
        fake_trace(call, nn.Linear(2, 2), torch.ones(1, 2))


def test_lazy_modules_and_modules_that_cannot_be_copied_are_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"'weight' has no shape yet"):
        fake_trace(call, nn.LazyLinear(2), torch.ones(1, 2))
    model = nn.Linear(2, 2)
    model.file = open(__file__)  # type: ignore[assignment] # noqa: SIM115 - what a logger might hold
    try:
        with pytest.raises(ConfigurationError, match=r"Linear cannot be copied"):
            fake_trace(call, model, torch.ones(1, 2))
    finally:
        model.file.close()


def test_what_runs_without_gradients_is_memory_but_no_op() -> None:
    def step(model: nn.Module, x: Tensor) -> Tensor:
        with torch.no_grad():
            target = model(x).exp()
        return (model(x) - target).square().sum()

    linear = nn.Linear(256, 256)
    trace = fake_trace(step, linear, torch.randn(512, 256))
    assert [op.name for op in trace.ops] == [
        "aten.addmm.default", "aten.sub.Tensor", "aten.pow.Tensor_Scalar", "aten.sum.default",
    ]  # fmt: skip
    # The target and both results of the linear layer, the difference, and what backward makes of it.
    assert simulate(trace, [False] * 4).peak >= 3 * 512 * 256 * 4


def test_in_place_ops_take_over_the_storage() -> None:
    def step(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).mul_(2).relu_().sum()

    trace = fake_trace(step, nn.Linear(4, 4), torch.randn(2, 4))
    linear, double, relu = trace.ops[:3]
    assert double.writes == linear.outputs[0]
    assert relu.writes == double.outputs[0]
    assert trace.nbytes[relu.outputs[0]] == trace.nbytes[linear.outputs[0]] == 32
    assert [kind for kind, *_ in trace.events][:3] == [RUN, RUN, RUN]


def test_another_devices_kernels_without_the_device() -> None:
    """Fused attention and dropout as on CUDA, names of the device included, and less memory for it."""
    model, batch, step = CASES["encoder"]()

    def on_cuda(model: nn.Module, tokens: Tensor) -> Tensor:
        tokens = tokens.to("cuda").cuda()
        return step(model, tokens) + torch.zeros((), device="cuda:0")

    there = fake_trace(on_cuda, model, batch, device="cuda")
    here = fake_trace(step, model, batch)
    names = [op.name for op in there.ops]
    assert there.device == "cuda"
    assert names.count("aten._scaled_dot_product_efficient_attention.default") == 3
    assert names.count("aten.native_dropout.default") == 9
    assert "aten.bernoulli_.float" not in names
    plain = [simulate(trace, [False] * len(trace.ops)).peak for trace in (there, here)]
    assert plain[0] < 0.7 * plain[1]
    # The registrations are gone.
    assert "aten.bernoulli_.float" in [op.name for op in fake_trace(step, model, batch).ops]


def test_half_precision_takes_flash_attention_and_keeps_norms_wide() -> None:
    model, batch, step = CASES["encoder"]()

    def half(model: nn.Module, tokens: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return step(model, tokens)

    trace = fake_trace(half, model, batch, device="cuda")
    names = [op.name for op in trace.ops]
    assert names.count("aten._scaled_dot_product_flash_attention.default") == 3
    norm = next(op for op in trace.ops if op.name == "aten.native_layer_norm.default")
    assert trace.nbytes[norm.outputs[0]] == 8 * 128 * 128 * 4


def test_seconds_are_estimated_for_the_device() -> None:
    """Larger products take longer, and the CPU longer than a GPU."""
    seconds = {}
    for width in (512, 2048):
        for device in ("cpu", "cuda"):
            trace = fake_trace(lambda m, x: m(x).sum(), nn.Linear(width, width), torch.randn(4096, width), device)
            seconds[width, device] = trace.ops[0].seconds
    assert seconds[2048, "cuda"] > 8 * seconds[512, "cuda"]
    assert seconds[512, "cpu"] > 8 * seconds[512, "cuda"]
