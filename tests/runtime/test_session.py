"""Remat in a plain loop: meeting the model, budgets, warnings."""

import logging
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

from lightning_remat import ConfigurationError, Offload, Remat
from lightning_remat.sizes import format_bytes, parse_budget

X = torch.linspace(-1, 1, 512).reshape(64, 8)


def block() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))


class Model(nn.Module):
    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for b in self.blocks:
            x = x + b(x)
        return x


def step(remat: Remat, model: nn.Module) -> None:
    with remat:
        loss = model(X).square().sum()
    loss.backward()


def test_the_model_is_met_in_the_first_step() -> None:
    """Nobody handed it over; its blocks are watched at once."""
    remat = Remat(policy="full")
    assert remat.blocks == []
    step(remat, Model())
    assert remat.blocks == ["blocks.0", "blocks.1", "blocks.2"]
    assert remat.stats.replayed_ops > 0


def test_blocks_that_a_loop_calls_one_by_one() -> None:
    """No module is around them: each is a root, and a block."""
    model = Model()
    remat = Remat(policy="full")
    for _ in range(2):
        with remat:
            x = X
            for b in model.blocks:
                x = b(x)
            loss = x.sum()
        loss.backward()
        assert remat.stats.replayed_ops > 0
    assert len(remat.blocks) == 3


def test_another_model_is_met_as_well() -> None:
    """One engine, two models one after the other."""
    remat = Remat(policy="full")
    step(remat, Model(2))
    step(remat, Model(4))  # seen to be another
    second = Model(4)
    step(remat, second)
    step(remat, second)
    assert remat.blocks == [f"blocks.{i}" for i in range(4)]
    assert remat.stats.replayed_ops > 0


def test_a_step_without_blocks_says_so() -> None:
    """Under a policy that works on blocks."""
    weight = nn.Parameter(torch.ones(8))
    remat = Remat(policy="full")
    with pytest.warns(UserWarning, match="ran none.*blocks=.*selective"), remat:
        (X * weight).sin().sum().backward()


@pytest.mark.parametrize("budget", [0, -1, "0", "zero", "10 apples", "0%", "101%", 1.5, True, "", [1]], ids=str)
def test_a_budget_that_is_no_size_is_refused(budget: object) -> None:
    with pytest.raises(ConfigurationError, match=r"^budget=.*(give bytes|a share of the device)"):
        Remat(budget=budget)


def test_sizes() -> None:
    assert parse_budget("1KiB") == 1024
    assert parse_budget("1.5 GB") == 1_500_000_000
    assert parse_budget(7) == 7
    assert parse_budget("7") == 7
    assert parse_budget("80%") == 0.8
    assert parse_budget(None) is None
    assert format_bytes(1536) == "1.5 KiB"
    assert format_bytes(12) == "12 B"


@pytest.mark.parametrize("policy", ["full", "none", "selective"])
def test_a_budget_and_a_policy_contradict_each_other(policy: str) -> None:
    with pytest.raises(ConfigurationError, match="contradict"):
        Remat(policy=policy, budget="1GiB")


def test_verify_is_a_switch() -> None:
    with pytest.raises(ConfigurationError, match="verify='yes'"):
        Remat(verify="yes")


def test_auto_plans_what_the_budget_has_room_for(caplog: pytest.LogCaptureFixture) -> None:
    """The first step is lean and traced; then there is a plan, and it says so."""
    remat = Remat(budget="60KiB")
    model = Model()
    assert "the first step runs lean" in remat.summary
    with caplog.at_level(logging.INFO, logger="lightning_remat"):
        step(remat, model)
        assert remat.plan is None
        assert remat.stats.recorded_ops > 0
        model.zero_grad()
        for _ in range(3):
            step(remat, model)
            model.zero_grad()
    assert remat.policy == "auto"
    assert len(remat.blocks) == 3
    assert remat.plan is not None
    assert remat.plan.peak_bytes <= 60 * 1024 < remat.plan.static_bytes + remat.plan.plain.peak_bytes
    assert ["budget 60.0 KiB: predicted peak" in message for message in caplog.messages] == [True]
    assert caplog.messages[0] in remat.summary


def test_auto_without_a_budget() -> None:
    """The budget is what the device has."""
    remat = Remat()
    model = Model()
    assert "budget what the device has" in remat.summary
    for _ in range(3):
        step(remat, model)
        model.zero_grad()
    assert remat.plan is not None
    assert remat.counters.budget_bytes == remat.plan.budget_bytes > 2**20


def test_the_model_is_not_touched() -> None:
    """No attribute, hook or key is left after a step, also after one that failed."""
    model = Model()
    before = {name: {k: repr(v) for k, v in vars(m).items()} for name, m in model.named_modules()}
    keys = list(model.state_dict())
    remat = Remat(policy="full")
    step(remat, model)
    with pytest.raises(RuntimeError, match="shapes"), remat:
        model(X[:, :3])
    step(remat, model)
    model.zero_grad()
    assert {name: {k: repr(v) for k, v in vars(m).items()} for name, m in model.named_modules()} == before
    assert list(model.state_dict()) == keys


@pytest.mark.parametrize(
    "options",
    [
        {"policy": "full", "blocks": "layer.*"},
        {"policy": "selective", "blocks": "layer.*"},
        {"policy": {"layer.*": "full"}},
        {"policy": {"blocks.*": "full", "haed": "selective"}},
    ],
    ids=str,
)
def test_a_pattern_that_matches_nothing_in_a_plain_loop(options: dict[str, object]) -> None:
    """The model is met in the first step; the error comes at its end, before anything has been trained."""
    remat = Remat(**options)
    with pytest.raises(ConfigurationError, match=r"matches no submodule.*blocks\.0"), remat:
        Model()(X)


def test_a_report_can_be_printed_plainly() -> None:
    """As a table, also before the first step."""
    remat = Remat(policy="full")
    assert "no step yet" in str(remat.report())
    step(remat, Model())
    assert "blocks.*.1" in str(remat.report())


def test_blocks_by_class_that_a_loop_calls_one_by_one() -> None:
    """Each is a root of its own."""
    model = Model()
    remat = Remat(policy="full", blocks=nn.Sequential)
    with remat:
        x = X
        for b in model.blocks:
            x = b(x)
        loss = x.sum()
    loss.backward()
    assert remat.blocks == ["Sequential"] * 3
    assert remat.stats.replayed_ops > 0


def test_verification_waits_while_memory_is_measured() -> None:
    """It takes memory of its own, which would be counted as the plan's; it comes in the next step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 1))
    remat = Remat(policy="auto", budget=1, verify_every_n_steps=3)
    x, watched, verified = torch.linspace(-1, 1, 256 * 8).reshape(256, 8), [], []
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "policy='auto': budget=.* is not feasible")  # asked for on purpose
        for _ in range(9):
            with remat:
                watched.append(remat._pilot.watching)
                verified.append(remat.verifier in remat._active.observers)
                loss = model(x).square().mean()
            loss.backward()
            model.zero_grad(set_to_none=True)
    assert watched[0]
    assert not any(w and v for w, v in zip(watched, verified, strict=True))
    assert sum(verified) == 3
    assert remat.counters.verified > 0
    assert remat.counters.verified_different == 0


def test_fetching_is_no_replay(tmp_path: Path) -> None:
    """What is fetched counts as moved, at once, and neither as an op that runs again nor as its time."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(4)))
    place = Offload(tmp_path, min_bytes=0, in_flight=1)
    for policy, again in (("offload_only", False), ("full", True)):
        remat = Remat(policy=policy, offload=place)
        for _ in range(2):
            with remat:
                loss = model(torch.ones(64, 16)).square().mean()
            loss.backward()
        counters = remat.counters
        assert counters.bytes_in > 0
        assert counters.bytes_in >= counters.last_bytes_in > 0
        assert (counters.replayed_ops, counters.recompute_seconds) == (
            remat.stats.replayed_ops,
            remat.stats.replay_seconds,
        )
        assert (counters.replayed_ops > 0) is again
        assert remat._clock.fetch_seconds > 0
        remat.close()


def test_what_does_not_fit_names_the_policy_that_was_given(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 1))
    remat = Remat(policy="offload_only", budget=1, offload=tmp_path)

    def train() -> None:
        for _ in range(3):
            with remat:
                loss = model(torch.ones(64, 16)).square().mean()
            loss.backward()

    with pytest.warns(UserWarning, match="^policy='offload_only': budget=1 B is not feasible"):
        train()
    remat.close()
