"""``lightning-remat plan``: right answers about small models, and words that help where it cannot answer."""

import re
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from lightning_remat import cli
from lightning_remat.runtime.estimate import Estimator
from lightning_remat.runtime.memory import measure_peak
from lightning_remat.runtime.target import Target, optimizers_named, optimizers_of
from tests.helpers import plan_targets

HERE = "tests.helpers.plan_targets"
MIB = 2**20


def run(*arguments: str, code: int = 0) -> str:
    """What the command prints; names beginning with a colon are those of the helpers."""
    named = [f"{HERE}{a}" if a.startswith(":") else a for a in arguments]
    result = CliRunner().invoke(cli.app, ["plan", *named], env={"COLUMNS": "160"})
    assert result.exit_code == code, result.output
    return result.output


def target(module: torch.nn.Module, optimizer: str = "none") -> Target:
    return Target(
        module=module,
        make_batch=plan_targets.one,
        step=plan_targets.squared,
        make_optimizers=optimizers_named(optimizer),
    )


# ---------------------------------------------------------------------- answers


def test_the_table_and_the_largest_batch() -> None:
    out = run(":Lit", "--batch", ":pair", "--memory", "64MiB", "--device", "cpu")
    rows = re.findall(r"│ +(\d+) │ +([\d.]+ [KM]iB) │ +(yes|no) │ +(.+?) │ +(\d*) │ +(.*?) │", out)
    sizes = [int(row[0]) for row in rows]
    assert sizes[:3] == [1, 2, 4]
    assert sizes == sorted(sizes)
    assert [row[2] for row in rows] == sorted((row[2] for row in rows), reverse=True)  # first yes, then no
    assert rows[-1][3].startswith("none fits")
    found = re.search(r"Largest batch: (\d+) with recomputation, at .* by estimate; (\d+) without", out)
    assert found is not None
    planned, plain = map(int, found.groups())
    assert planned > plain > 0
    assert {planned, plain} <= set(sizes)
    assert "optimizer SGD, as configure_optimizers says" in out
    assert "estimate" in out


def test_largest_batches_are_the_largest() -> None:
    """One sample more does not fit, both as it is and under a plan."""
    estimator = Estimator(target(plan_targets.Net()), 48 * MIB, "cpu")
    rows = estimator.table(64)
    for planned in (False, True):
        largest = estimator.largest(rows, 64, planned)
        here, beyond = estimator.at(largest), estimator.at(largest + 1)
        if planned:
            assert here.chosen is not None
            assert beyond.chosen is None
            assert beyond.smallest_bytes is not None
            assert beyond.smallest_bytes > estimator.budget
        else:
            assert here.plain_bytes <= estimator.budget < beyond.plain_bytes


def test_what_it_says_is_what_is_measured() -> None:
    """Peak of the step and of the optimizer's step, with what is there in between, on the CPU."""
    module = plan_targets.Net()
    fit = Estimator(target(module, "adamw"), 2**30, "cpu").at(8)
    optimizer = torch.optim.AdamW(module.parameters())
    batch = plan_targets.one(8)

    def train() -> None:
        plan_targets.squared(module, batch).backward()

    train()
    optimizer.step()
    optimizer.zero_grad()
    state = sum(t.numel() * t.element_size() for s in optimizer.state.values() for t in s.values())
    between = state + sum(p.numel() * p.element_size() for p in module.parameters()) + batch.nbytes
    assert fit.plain_bytes == pytest.approx(between + measure_peak(train).peak_bytes, rel=0.02)
    gradients = sum(p.numel() * p.element_size() for p in module.parameters())
    static = Estimator(target(module, "adamw"), 2**30, "cpu").static
    assert static.optimizer_state == pytest.approx(state, rel=0.001)
    assert static.gradients == gradients
    assert static.optimizer_scratch == pytest.approx(measure_peak(optimizer.step).peak_bytes, rel=0.05)


def test_on_a_gpu_the_optimizer_works_on_all_parameters_at_once() -> None:
    statics = {
        device: Estimator(target(plan_targets.Net(), "adamw"), 2**30, device).static for device in ("cpu", "cuda")
    }
    assert statics["cuda"].optimizer_scratch >= statics["cuda"].parameters > statics["cpu"].optimizer_scratch


def test_one_batch_size() -> None:
    fits = run(":Lit", "--batch", ":pair", "--memory", "1GiB", "--batch-size", "4")
    assert "A batch of 4 fits as it is" in fits
    plan = run(":Lit", "--batch", ":pair", "--memory", "64MiB", "--batch-size", "16", "--device", "cpu")
    assert "A batch of 16 fits with recomputation" in plan
    not_at_all = run(":Lit", "--batch", ":pair", "--memory", "64MiB", "--batch-size", "512")
    assert "A batch of 512 does not fit" in not_at_all


def test_a_model_whose_optimizer_alone_is_too_large() -> None:
    out = run(":Lit", "--batch", ":pair", "--memory", "20MiB")
    assert "Does not fit" in out
    assert "The optimizer's step alone takes" in out


def test_less_with_half_precision() -> None:
    whole, mixed, half = (
        Estimator(target(plan_targets.Net()), 2**30, "cuda", precision).at(32)
        for precision in ("32-true", "bf16-mixed", "bf16-true")
    )
    assert half.plain_bytes < mixed.plain_bytes < whole.plain_bytes
    assert half.plain_bytes == pytest.approx(whole.plain_bytes / 2, rel=0.05)


def test_plain_modules_and_steps_and_the_meta_device() -> None:
    out = run(":Net", "--batch", ":one", "--memory", "1GiB", "--most", "2", "--meta")
    assert "optimizer AdamW, as nothing else was said" in out
    assert "a loss as forward returns it" in out
    assert "(more was not looked at)" in out
    out = run(":Net", "--batch", ":one", "--step", ":squared", "--optimizer", "none", "--memory", "1GiB", "--most", "2")
    assert "a loss as forward" not in out
    assert "optimizer none, as --optimizer says" in out


def test_example_input_array_stands_in_for_a_batch() -> None:
    assert "batches like example_input_array" in run(":WithExample", "--memory", "1GiB", "--most", "4")


def test_a_model_that_needs_two_samples() -> None:
    out = run(":Normed", "--batch", ":rows", "--memory", "1GiB", "--most", "4")
    assert re.findall(r"│ +(\d+) │ +[\d.]+ [KM]iB │ +yes", out) == ["2", "4"]


def test_a_lightning_configuration(tmp_path: Path) -> None:
    """Model, data, optimizer and precision, as LightningCLI reads them; the trainer's accelerator is not asked for."""
    file = tmp_path / "config.yaml"
    file.write_text(
        f"trainer: {{precision: bf16-mixed, accelerator: gpu}}\n"
        f"model: {{class_path: {HERE}.Lit, init_args: {{depth: 2}}}}\n"
        f"data: {{class_path: {HERE}.Data}}\n"
        "optimizer: {class_path: torch.optim.Adam, init_args: {lr: 0.01}}\n"
    )
    out = run("--config", str(file), "--memory", "1GiB", "--most", "4")
    assert "Lit on cuda, bf16-mixed" in out
    assert "samples from Data.train_dataloader" in out
    assert "optimizer Adam, as the configuration says" in out
    assert "SGD, as --optimizer" in run("--config", str(file), "--memory", "1GiB", "--most", "1", "--optimizer", "sgd")


def test_what_configure_optimizers_may_return() -> None:
    first, second = (torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1) for _ in range(2))
    shapes = [
        first,
        [first],
        ([first], ["schedule"]),
        {"optimizer": first},
        ({"optimizer": first}, {"optimizer": second}),
    ]
    for shape in shapes:
        module = torch.nn.Module()
        module.configure_optimizers = lambda shape=shape: shape
        found = optimizers_of(module)
        assert found[0] is first
        assert len(found) == (2 if shape is shapes[-1] else 1)


# ---------------------------------------------------------------------- words

GOOD = (":Lit", "--batch", ":pair", "--memory", "1GiB", "--most", "1")
ERRORS = {
    "no model": (["--memory", "1GiB"], "name the model either as package.module:Name or by --config"),
    "no colon": (["model.Net", "--memory", "1GiB"], "'model.Net': give a module and a name in it, with a colon"),
    "no module": (["no.where:Net", "--memory", "1GiB"], "there is no module 'no'. Run the command in the folder"),
    "no name": ([":Ne", "--memory", "1GiB"], "has no 'Ne'. Near it: Net"),
    "no factory": ([":nothing", "--memory", "1GiB"], "is of type int: name a module, or a class or function"),
    "arguments": ([":needs_arguments", "--memory", "1GiB"], "calling it without arguments failed with TypeError"),
    "no memory": ([":Lit", "--batch", ":pair"], "--memory is missing"),
    "memory": ([":Lit", "--batch", ":pair", "--memory", "lots"], "--memory='lots' is not a size: give bytes"),
    "share": ([":Lit", "--batch", ":pair", "--memory", "80%"], "a share of which device?"),
    "no batch": ([":Net", "--memory", "1GiB"], "there is nothing to make a batch of: give --batch"),
    "broken batch": ([*GOOD, "--batch", ":broken"], "called with 1 it failed with OSError: no such data"),
    "empty batch": ([*GOOD, "--batch", "builtins:str"], "called with 1 it returned no tensor"),
    "wrong batch": ([*GOOD, "--batch", ":one"], "a training step with 1 samples failed in the estimate"),
    "optimizer": ([*GOOD, "--optimizer", "adamv"], "--optimizer='adamv' is unknown; did you mean adam"),
    "precision": ([*GOOD, "--precision", "8"], "--precision='8' is unknown; there are 32-true"),
    "device": ([*GOOD, "--device", "tpu"], "--device='tpu': estimates are for cuda and cpu"),
    "by hand": ([":ByHand", *GOOD[1:]], "automatic_optimization=False"),
    "curious": ([":Curious", "--batch", ":one", *GOOD[3:]], "asks for the content of a tensor that has none"),
    "attached": ([":Attached", *GOOD[1:]], "It runs without a trainer"),
    "step": ([*GOOD, "--step", ":nothing"], "--step='tests.helpers.plan_targets:nothing' is of type int"),
    "no config": (["--config", "nowhere.yaml", "--memory", "1GiB"], "'nowhere.yaml' cannot be read"),
    "both": ([*GOOD, "--config", "x.yaml"], "not both"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_name_the_option_and_the_way_out(name: str) -> None:
    arguments, words = ERRORS[name]
    out = run(*arguments, code=2)
    assert words in " ".join(out.split())
    assert "Traceback" not in out


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("data: 3", "has no 'model:' section"),
        ("model: {depth: 3}", "does not say which class it is for"),
        (f"model: {{class_path: {HERE}.Lit, init_args: {{deep: 3}}}}", "'model:' cannot be built"),
        ("model: [", "is not YAML"),
    ],
)
def test_configurations_that_cannot_be_used(text: str, words: str, tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(text)
    assert words in run("--config", str(file), "--memory", "1GiB", code=2)
