"""Trainings under Lightning whose offload fails again and again, and which leave behind what plain training leaves."""

import json
import os
import random
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_remat import ConfigurationError, Offload, OffloadError, RematCallback, RematStrategy
from lightning_remat.engine.offload.disk import DiskPlace
from lightning_remat.runtime import offloading
from tests.helpers.disk import BROKEN, FULL, Held, broken, damage_all, threads, wait_for_threads
from tests.helpers.forks import run_module
from tests.helpers.training import Lit, Net, Result, regression, regression_data, train, trainer_for
from tests.integrations.chaos import SCENARIOS, compared
from tests.integrations.faults import Faults
from tests.integrations.test_ddp_failing import both

WAYS = pytest.mark.parametrize("way", ["strategy", "callback"])


def everything(directory: Path) -> Offload:
    """All that is kept leaves at once."""
    return Offload(directory, min_bytes=0, in_flight=1)


def with_offload(
    way: str, directory: Path, make: Callable[[], Any], data: Any, policy: Any = "offload_only", **options: Any
) -> tuple[Result, Any]:
    """Train; returns what was left behind, and the engine."""
    given = {name: options.pop(name) for name in ("retries",) if name in options}
    one: Any = (RematStrategy if way == "strategy" else RematCallback)(
        policy=policy, offload=everything(directory), **given
    )
    if way == "strategy":
        return train(make, data, strategy=one, **options), one.remat
    return train(make, data, callbacks=lambda: [one], **options), one.remat


def difference(plain: Result, ours: Result) -> list[str]:
    """All but gradients, which are collected in every try of a batch."""
    return [text for text in plain.difference(ours) if not text.startswith("gradients")]


def recorded(call: Callable[[], Any]) -> tuple[Any, list[str]]:
    """What it returned, and what it warned of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = call()
    return found, [str(w.message) for w in caught if str(w.message).startswith("offload")]


@pytest.mark.parametrize(("name", "steps"), [(name, 200 if name == "Adam, clipped" else 25) for name in SCENARIOS])
@pytest.mark.parametrize("policy", ["offload_only", "full"])
def test_failures_at_random(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, steps: int, policy: str
) -> None:
    """Reads and writes that fail now and then: weights, optimizers, metrics, logged values and streams are the same."""
    monkeypatch.setattr(offloading, "_MOST_FAILURES", 1 << 30)
    numbers = random.Random(steps)
    for call in ("pwritev", "preadv"):
        broken(
            monkeypatch,
            call,
            lambda count: numbers.choice((FULL, BROKEN)) if count > 20 and numbers.randrange(60) == 0 else 0,
        )
    strategy = RematStrategy(policy=policy, offload=everything(tmp_path))
    (different, ours), _ = recorded(lambda: compared(name, steps, strategy, Faults()))
    assert different == []
    counters = ours.counters
    assert counters.offload_failures > steps // 25
    assert counters.out_of_memory == 0
    if policy == "offload_only":
        assert counters.retries > 0
        assert counters.bytes_in > 0


class Struck(Lit):
    """A disk that fails in some batches.

    Args:
        strike: called between forward and backward of these.
        batches: which; None: all.
    """

    def __init__(self, strike: Callable[[Any], object], batches: set[int] | None = None) -> None:
        super().__init__(Net(), regression)
        self.__dict__["strike"] = strike
        self.batches = batches
        self.__dict__["struck"] = []

    def on_before_backward(self, loss: Tensor) -> None:
        batch = self.trainer.fit_loop.total_batch_idx
        if (self.batches is None or batch in self.batches) and batch not in self.__dict__["struck"]:
            self.__dict__["struck"].append(batch)
            self.__dict__["strike"](self)


def place_of(remat: Any) -> DiskPlace:
    place = remat.offloading.mover.place
    assert isinstance(place, DiskPlace)
    return place


def engine_of(module: Any) -> Any:
    trainer = module.trainer
    if hasattr(trainer.strategy, "remat"):
        return trainer.strategy.remat
    return next(c for c in trainer.callbacks if isinstance(c, RematCallback)).remat


def damage(module: Any) -> None:
    damage_all(place_of(engine_of(module)))


@WAYS
def test_a_batch_that_lost_something_is_run_again(tmp_path: Path, way: str, caplog: Any) -> None:
    plain = train(lambda: Lit(Net(), regression), regression_data(6))
    (ours, remat), _ = recorded(lambda: with_offload(way, tmp_path, lambda: Struck(damage, {1, 4}), regression_data(6)))
    assert difference(plain, ours) == []
    counters = remat.counters
    assert (counters.retries, counters.retried_batches, counters.steps) == (2, 2, 6)
    assert counters.offload_failures >= 2
    messages = [r.message for r in caplog.records if "the same batch is run again, without offload" in r.message]
    assert len(messages) == 2


@WAYS
def test_after_the_third_batch_nothing_is_moved_any_more(tmp_path: Path, way: str) -> None:
    plain = train(lambda: Lit(Net(), regression), regression_data(8))
    (ours, remat), texts = recorded(lambda: with_offload(way, tmp_path, lambda: Struck(damage), regression_data(8)))
    assert difference(plain, ours) == []
    assert remat.counters.retries == 3
    assert sum("from now on nothing is moved" in text for text in texts) == 1


@WAYS
def test_without_retries_training_ends_with_the_error(tmp_path: Path, way: str) -> None:
    """It says what to do, and all is unwound."""
    with pytest.raises(OffloadError, match="clear them and run the batch again"):
        recorded(lambda: with_offload(way, tmp_path, lambda: Struck(damage, {1}), regression_data(4), retries=0))
    wait_for_threads()


class Irreversible(Struck):
    """Changes what no snapshot sees the old content of."""

    def training_step(self, batch: Any, index: int) -> Tensor:
        loss = super().training_step(batch, index)
        with torch.no_grad():
            self.net.head.bias.mul_(1.0)
        return loss


def test_a_step_that_cannot_be_undone_ends_training(tmp_path: Path) -> None:
    """No batch is skipped, and the error says why it ends and how to go on."""
    with pytest.raises(OffloadError, match="cannot be run again without offload: ") as caught:
        recorded(lambda: with_offload("strategy", tmp_path, lambda: Irreversible(damage, {1}), regression_data(4)))
    for part in ("what was read is not what was written", "Start again from the last", "No batch was skipped"):
        assert part in str(caught.value)
    wait_for_threads()


@WAYS
@pytest.mark.parametrize("name", ["preadv", "pwritev"])
def test_a_disk_that_does_not_answer(tmp_path: Path, way: str, name: str) -> None:
    plain = train(lambda: Lit(Net(), regression), regression_data(5))
    held = []

    def silence(module: Any) -> None:
        place_of(engine_of(module)).patience = 0.2
        held.append(Held(patch, name))

    with pytest.MonkeyPatch.context() as patch:
        try:
            (ours, remat), _ = recorded(
                lambda: with_offload(way, tmp_path, lambda: Struck(silence, {1}), regression_data(5))
            )
        finally:
            held[0].open.set()
    assert difference(plain, ours) == []
    assert remat.counters.retries == (name == "preadv")
    wait_for_threads()


@WAYS
def test_fit_twice_with_validation_in_between(tmp_path: Path, way: str) -> None:
    """The place is closed when training ends, and there is a new one when it goes on."""
    results = {}
    for ours in (False, True):
        one: Any = (RematStrategy if way == "strategy" else RematCallback)(
            policy="offload_only", offload=everything(tmp_path)
        )
        given: dict[str, Any] = {"strategy": one} if way == "strategy" else {"callbacks": lambda: [one]}  # noqa: B023 - called at once
        result = train(lambda: Lit(Net(), regression), regression_data(4), **(given if ours else {}), max_epochs=2)
        trainer, module = result.trainer, result.module
        if ours:
            wait_for_threads()
            assert threads() == []
            assert one.remat.offloading.mover is None
            first = one.remat.counters.bytes_out
            assert first > 0
        trainer.validate(Validated(module), regression_data(1), verbose=False)
        assert threads() == []
        trainer.fit_loop.max_epochs = 4
        trainer.fit(module, regression_data(4))
        if ours:
            wait_for_threads()
            assert one.remat.counters.bytes_out == 2 * first
            assert os.listdir(tmp_path) == []
        results[ours] = (module.losses, module.state_dict())
    for plain, other in zip(*(r[0] for r in results.values()), strict=True):
        assert torch.equal(plain, other)
    for key, value in results[False][1].items():
        assert torch.equal(value, results[True][1][key])


class Validated(Lit):
    def __init__(self, trained: Lit) -> None:
        super().__init__(trained.net, regression)

    def validation_step(self, batch: Any, index: int) -> None:
        regression(self.net, batch)


@WAYS
def test_validation_between_batches(tmp_path: Path, way: str) -> None:
    class Both(Struck):
        def validation_step(self, batch: Any, index: int) -> None:
            self.log("val", regression(self.net, batch))

    def data() -> dict[str, Any]:
        return {"fit_options": {"val_dataloaders": regression_data(2)}, "val_check_interval": 2}

    plain = train(lambda: Both(lambda module: None), regression_data(6), **data())
    (ours, _), _ = recorded(
        lambda: with_offload(way, tmp_path, lambda: Both(damage, {3}), regression_data(6), **data())
    )
    assert difference(plain, ours) == []


@WAYS
def test_host_memory_is_refused_at_setup_where_the_model_is_in_it(monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    one: Any = (RematStrategy if way == "strategy" else RematCallback)(policy="offload_only", offload="cpu")
    trainer = trainer_for(one) if way == "strategy" else trainer_for("auto", [one])
    module = Lit(Net(), regression)
    with pytest.raises(ConfigurationError, match=r'offload="cpu" makes no sense here.*use offload="disk"'):
        trainer.fit(module, regression_data())
    assert module.steps_run == 0


# ---- processes ----


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("offload")
    run_module("tests.integrations.offload_worker", str(folder))
    return json.loads((folder / "results.json").read_text())


def test_killed_in_the_middle_of_a_step(processes: dict[str, Any]) -> None:
    """Nothing is left, the space comes back, and a new training is as if nothing had been."""
    found = processes["killed"]
    assert found["signal"] == "SIGKILL"
    assert found["before"] == found["after"] == []
    assert found["taken"] > 0
    assert found["freed"]
    assert processes["again"] == {"different": [], "moved": True, "left": []}


def test_two_processes_share_a_directory(processes: dict[str, Any]) -> None:
    assert processes["shared"] == [{"different": [], "moved": True, "left": []}] * 2
    assert processes["together"]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return both(tmp_path_factory.mktemp("ranks"), script="offload_ddp_worker.py")


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("name", ["as plain DDP", "accumulated", "full", "small buckets"])
def test_each_rank_gives_what_plain_ddp_gives(ranks: list[dict[str, Any]], name: str, rank: int) -> None:
    found = ranks[rank][name]
    assert found["difference"] == []
    assert found["moved"] > 0
    assert found["retries"] == 0


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("name", ["lost", "lost, accumulated"])
def test_a_rank_that_lost_something_goes_on(ranks: list[dict[str, Any]], name: str, rank: int) -> None:
    """It undoes and runs its part again by itself; the other waits."""
    found = ranks[rank][name]
    assert found["difference"] == []
    assert found["retries"] == rank


def test_what_cannot_be_made_right_ends_on_both(tmp_path: Path) -> None:
    """Once gradients have been sent; soon, and both say why."""
    other, failed = both(tmp_path, "sent", script="offload_ddp_worker.py")
    assert failed.startswith("OffloadError")
    assert "communication with the other processes had begun" in failed
    assert "Start again from the last checkpoint" in failed
    assert "another process has ended, since what had left its device could not be had back. rank 1: " in other
