"""What a pilot makes of measured peaks, of batches that need no tape, and of steps that run out of memory."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_remat import Remat
from lightning_remat.engine.planned import PlannedTape
from lightning_remat.runtime import measuring
from lightning_remat.runtime.memory import PeakResult
from lightning_remat.runtime.tuning.known import Known
from lightning_remat.runtime.tuning.resting import look
from tests.helpers.bits import difference_in_bits
from tests.helpers.loops import Loop, assert_same_training, run, usual
from tests.helpers.pilots import (
    MANY,
    NOTHING,
    PLENTY,
    SCARCE,
    Varying,
    batch,
    infeasible,
    net,
    pilot_of,
    planned,
    usual_without_copies,
)

LESS = 380_000
"""A budget between the least that the net takes with MANY rows and what it takes if all is kept."""


def distorted(monkeypatch: pytest.MonkeyPatch, what: Callable[[int], int]) -> list[int]:
    """Let measured peaks be other ones than predicted; returns those that were measured."""
    seen: list[int] = []
    true = measuring.Measurement.result

    def result(self: measuring.Measurement) -> PeakResult:
        found = true(self)
        seen.append(what(found.peak_bytes))
        return PeakResult(peak_bytes=seen[-1], timeline=found.timeline)

    monkeypatch.setattr(measuring.Measurement, "result", result)
    return seen


def root(remat: Remat) -> Known:
    return pilot_of(remat).known.roots[False]


# ---------------------------------------------------------------------- tuning


def test_usually_one_measured_step_is_all(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = distorted(monkeypatch, lambda peak: peak)
    remat = Remat(budget=LESS)
    assert_same_training(net, [batch(MANY)] * 8, remat=remat)
    assert remat.plan is not None
    assert sum(remat.plan.chosen.drop) > 0
    assert root(remat).tuner.settled
    assert len(root(remat).tuner.trials) == 1
    assert len(seen) <= 3  # more than one only where static memory has grown
    assert remat.counters.peak_bytes is not None
    assert remat.counters.peak_bytes <= LESS == remat.counters.budget_bytes
    assert remat.counters.kept_bytes
    assert any("predicted peak" in note for note in remat.counters.notes)


@pytest.mark.parametrize(
    "what",
    [lambda p: p * 9 // 8, lambda p: p + 20_000, lambda p: p * 3 // 4, lambda p: p + (40_000 if p > 280_000 else 0)],
    ids=["more", "an offset", "less", "a jump"],
)
def test_where_predictions_do_not_hold(what: Callable[[int], int], monkeypatch: pytest.MonkeyPatch) -> None:
    """After a few steps the plan fits by measure; results are the same throughout."""
    distorted(monkeypatch, what)
    remat = Remat(budget=LESS)
    assert_same_training(net, [batch(MANY)] * 12, remat=remat)
    known = root(remat)
    assert known.tuner.settled
    assert known.measured is not None
    assert known.static + known.measured.peak_bytes <= LESS
    assert len(known.tuner.trials) <= 6


@infeasible
def test_not_even_the_smallest_plan_fits_by_measure(monkeypatch: pytest.MonkeyPatch) -> None:
    distorted(monkeypatch, lambda peak: 5 * peak)
    remat = Remat(budget=LESS)
    assert_same_training(net, [batch(MANY)] * 12, remat=remat)
    assert remat.plan is not None
    assert remat.plan.chosen.peak_bytes == remat.plan.smallest.peak_bytes


def test_pressure_makes_plans_smaller_and_slack_larger_again() -> None:
    remat = Remat(budget=LESS)
    loop = Loop(net(), remat)
    for _ in range(6):
        usual_without_copies(loop, batch(MANY))
    before = root(remat).result
    assert before is not None
    pilot_of(remat).pressure(30_000)
    pilot_of(remat).pressure(10_000)
    for _ in range(3):
        usual_without_copies(loop, batch(MANY))
    after = root(remat).result
    assert after is not None
    assert after.chosen.peak_bytes <= before.chosen.peak_bytes - 40_000
    assert any("memory ran short" in note for note in remat.counters.notes)
    for _ in range(60):
        usual_without_copies(loop, batch(MANY))
    again = root(remat).result
    assert again is not None
    assert after.chosen.peak_bytes < again.chosen.peak_bytes <= before.chosen.peak_bytes
    assert planned(remat)


# ---------------------------------------------------------------------- a budget by default


def test_by_default_the_budget_is_what_the_device_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """Static memory and what is free, less the margin; it stays when what is free changes."""
    left = [340_000]
    asked: list[Any] = []

    def default_budget(static: int, device: torch.device, margin: object) -> int:
        asked.append(margin)
        return static + left[0]

    monkeypatch.setattr("lightning_remat.runtime.tuning.choosing.default_budget", default_budget)
    remat = Remat(margin="7%")
    loop = Loop(net(), remat)
    sizes = []
    for i in range(10):
        usual_without_copies(loop, batch(MANY))
        left[0] = 340_000 if i < 3 else 300_000 + 1000 * i
        if remat.plan is not None:
            sizes.append(remat.plan.chosen.peak_bytes)
    assert set(asked) == {"7%"}
    assert len(set(sizes)) == 1
    assert sizes[0] <= 340_000
    assert root(remat).result is not None
    assert sum(remat.plan.chosen.drop) > 0  # type: ignore[union-attr]  # a type error would be a failure as well


def test_nobody_knows_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_remat.runtime.tuning.choosing.default_budget", lambda *_: None)
    remat = Remat()
    assert_same_training(net, [batch(16)] * 6, remat=remat)
    assert remat.counters.budget_bytes is not None
    assert remat.counters.budget_bytes > 2**28


# ---------------------------------------------------------------------- steps without the tape


def shown(loop: Loop, x: Any) -> None:
    """A step whose batch is looked at before."""
    if loop.remat is not None:
        loop.remat.look_at(x)
    usual(loop, x)


def tapes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Counts dispatch modes that are entered."""
    entered: list[int] = []
    true = PlannedTape.__enter__

    def enter(self: Any) -> Any:
        entered.append(1)
        return true(self)

    monkeypatch.setattr(PlannedTape, "__enter__", enter)
    return entered


@pytest.mark.parametrize("budget", [None, PLENTY])
def test_from_the_fifth_step_on_there_is_no_tape(budget: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.optim import optimizer as optimizers

    hooks = dict(optimizers._global_optimizer_pre_hooks)
    entered = tapes(monkeypatch)
    remat = Remat(budget=budget)
    off = []

    def step(loop: Loop, x: Tensor) -> None:
        shown(loop, x)
        if loop.remat is not None:
            off.append(pilot_of(remat).off)

    assert_same_training(net, [batch(MANY)] * 9, step, remat=remat)
    assert off == [False] * 4 + [True] * 5
    assert len(entered) == 3
    assert remat.counters.steps == 9
    assert remat.stats.recorded_ops == remat.stats.replayed_ops == 0
    assert optimizers._global_optimizer_pre_hooks == hooks
    assert remat.counters.notes[-1] == "everything can be kept: steps run without the tape"


def test_where_batches_are_not_shown() -> None:
    """With a budget of the user's the tape stays, so that a larger batch is met; without one it goes."""
    explicit, default = Remat(budget=PLENTY), Remat()
    for remat in (explicit, default):
        assert_same_training(net, [batch()] * 7, remat=remat)
    assert planned(explicit)
    assert not pilot_of(explicit).off
    assert pilot_of(default).off


@pytest.mark.parametrize(
    "other",
    [batch(2 * MANY), batch(MANY).reshape(2, -1, 8), (batch(MANY),)],
    ids=["larger", "more dimensions", "another structure"],
)
def test_another_batch_brings_the_tape_back(other: Any) -> None:
    """For that step; a smaller one does not."""
    remat = Remat(budget=PLENTY)
    off: list[bool] = []

    def step(loop: Loop, x: Any) -> None:
        shown(loop, x)
        if loop.remat is not None:
            off.append(pilot_of(remat).off)

    batches = [batch(MANY)] * 6 + [batch(MANY // 2), other, batch(MANY), other, other, other, other]

    class Flat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net()

        def forward(self, x: Tensor) -> Any:
            return self.net(x.reshape(-1, 8))

    assert_same_training(Flat, batches, step, remat=remat)
    assert off[:9] == [False] * 4 + [True] * 3 + [False, True]
    assert off[-1]


def test_a_larger_batch_that_does_not_fit_has_a_plan() -> None:
    """The tape is there for it, every time."""
    remat = Remat(budget=LESS)
    batches = [batch(n) for n in [64] * 6 + [MANY, 64, MANY, 64, MANY, MANY, 64]]
    assert_same_training(net, batches, shown, remat=remat)
    pilot = pilot_of(remat)
    assert not pilot.off
    assert remat.plan is not None
    assert sum(remat.plan.chosen.drop) > 0
    assert remat.plan.peak_bytes <= LESS


def test_steps_of_two_kinds_on_batches_of_one_kind() -> None:
    """Both fit, and both were seen."""
    remat = Remat(budget=PLENTY)
    assert_same_training(lambda: Varying(2), [batch()] * 16, shown, remat=remat)
    assert pilot_of(remat).off


def test_gradients_that_are_there_already_are_another_kind_of_step() -> None:
    def accumulated(loop: Loop, x: Tensor) -> None:
        if loop.remat is not None:
            loop.remat.look_at(x)
        loop.backward(loop.loss(x))
        loop.note()
        if loop.steps > 5 and loop.steps % 2 == 0:
            return
        loop.update()

    remat = Remat(budget=PLENTY)
    assert_same_training(net, [batch()] * 24, accumulated, remat=remat)
    assert len(pilot_of(remat).known.roots) == 2
    assert pilot_of(remat).off


def test_what_batches_look_like() -> None:
    """Structure and sizes of tensors in whatever holds them, within bounds."""
    x = torch.zeros(2, 3)
    assert look({"a": [x, (x,)], "b": 7}) == look({"a": [x + 1, (x,)], "b": 8})
    assert look({"a": x}) != look({"b": x})
    assert look(x) != look(x.double())
    assert look([x]) != look((x,))
    assert look(x[:1])[1] == (1, 3)  # type: ignore[index]  # None would be a failure as well
    assert look([x] * 5000) is None
    assert look(x.to_sparse()) is None
    nested: Any = x
    for _ in range(30):
        nested = [nested]
    assert look(nested) is None


# ---------------------------------------------------------------------- out of memory


def again(remat: Remat, loop: Loop, fail_at: dict[int, int], x: Tensor, words: list[str | None]) -> None:
    """A step that fails so many times, before its backward, and is undone."""
    remat.look_at(x)
    for _ in range(fail_at.get(loop.steps, 0)):
        state = torch.get_rng_state()
        buffers = {n: b.clone() for n, b in loop.model.named_buffers()}
        loop.loss(x)
        loop.losses.clear()
        torch.set_rng_state(state)
        for n, b in loop.model.named_buffers():
            b.copy_(buffers[n])
        words.append(pilot_of(remat).tighten(5_000))
    usual(loop, x)


@infeasible
@pytest.mark.parametrize(
    ("budget", "at", "times"),
    [(PLENTY, 1, 2), (PLENTY, 2, 1), (PLENTY, 8, 2), (LESS, 1, 1), (LESS, 2, 2), (LESS, 8, 1), (NOTHING, 4, 1)],
)
def test_less_and_less_and_then_as_before(budget: Any, at: int, times: int) -> None:
    """Traced, measured, by plan, or without the tape: the step is tried again with less, and the next has a plan."""
    remat = Remat(budget=budget)
    words: list[str | None] = []

    def step(loop: Loop, x: Tensor) -> None:
        if loop.remat is None:
            usual(loop, x)
        else:
            again(remat, loop, {at: times}, x, words)

    plain = run(net, [batch(MANY)] * 22, usual)
    ours = run(net, [batch(MANY)] * 22, step, remat)
    assert difference_in_bits(plain.seen, ours.seen) == []
    smallest = at == 1 or budget == NOTHING
    assert len(words) == times
    assert words[0] is not None
    assert ("fixed policy" in words[0]) == smallest
    if times == 2:
        assert (words[1] is None) == smallest
    assert planned(remat) or (at == 1 and pilot_of(remat).off)
    assert any("out of memory" in note for note in remat.counters.notes)
    if at > 1 and budget == PLENTY:
        # It did not fit, so it is not tried again at once.
        assert not pilot_of(remat).off


@infeasible
def test_a_larger_shape_that_failed_is_learned_from_the_lean_step() -> None:
    remat = Remat(budget=LESS)
    words: list[str | None] = []
    loop = Loop(net(), remat)
    for n in (64, 64, 64, MANY, 64, MANY, 64):
        loop.steps += 1
        again(remat, loop, {4: 1}, batch(n), words)
    assert words[0] is not None
    assert "smallest peak" in words[0]
    assert planned(remat)
    assert len(pilot_of(remat).known.all) == 2
    known = pilot_of(remat).known.all[1]
    assert known.result is not None
    assert known.static + known.result.chosen.peak_bytes <= LESS
    # The plan of the shape that fitted is what it was.
    assert root(remat).keeps_all


@infeasible
def test_memory_that_is_short_under_every_plan() -> None:
    """In the end no more plans are made, and the leanest policy stays."""
    remat = Remat(budget=SCARCE)
    loop = Loop(net(), remat)
    words: list[str | None] = []
    usual(loop, batch(MANY))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(6):
            loop.steps += 1
            again(remat, loop, dict.fromkeys(range(9), 2), batch(MANY), words)
    assert sum("again and again" in str(w.message) for w in caught) == 1
    assert pilot_of(remat).given_up
    usual(loop, batch(MANY))
    assert remat.policy == "auto"
    assert remat.stats.replayed_ops > 0


def test_a_plan_from_a_file(tmp_path: Any) -> None:
    """Its lean half, then a fixed policy, then nothing; after two failures the lean half stays."""
    first = Remat(budget=LESS)
    assert_same_training(net, [batch(MANY)] * 4, remat=first)
    first.save_plan(tmp_path / "plan.json")
    remat = Remat(str(tmp_path / "plan.json"))
    pilot: Any = remat._pilot
    loop = assert_same_training(net, [batch(MANY)] * 2, remat=remat)
    by_plan = remat.stats.recorded_ops
    for words in ("smallest peak", "fixed policy"):
        loop.loss(batch(MANY))
        assert words in pilot.tighten(1000)
    loop.loss(batch(MANY))
    assert pilot.tighten(1000) is None
    usual(loop, batch(MANY))
    assert remat.stats.recorded_ops == by_plan
    loop.loss(batch(MANY))
    assert "smallest peak" in pilot.tighten(None)
    for _ in range(2):
        usual(loop, batch(MANY))
        assert remat.stats.recorded_ops > by_plan
