"""Running a step again: how often, with what put back, and how it ends."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import pytest
import torch

from lightning_remat import Remat
from lightning_remat.errors import NoMemoryLeft
from lightning_remat.runtime.counters import MOST_NOTES, Counters
from lightning_remat.runtime.recovery.retry import Retry, comes_through

OUT = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.")


class Way:
    """Has so many tighter tries to offer."""

    def __init__(self, tighter: int = 9) -> None:
        self.tighter = tighter
        self.asked: list[int | None] = []
        self.well = 0
        self.ends: list[tuple[BaseException, int, str | None]] = []

    def tighten(self, asked: int | None) -> tuple[str, bool]:
        self.asked.append(asked)
        self.tighter -= 1
        return "with less", self.tighter >= 0

    def settled(self) -> None:
        self.well += 1

    def give_up(self, error: BaseException, tries: int, why: str | None) -> NoMemoryLeft:
        self.ends.append((error, tries, why))
        return NoMemoryLeft(f"{tries} tries, {why}")


class Counter:
    """A number that a step changes."""

    def __init__(self, irreversible: bool = False) -> None:
        self.value = self.taken = 0
        self.calls: list[str] = []
        self.irreversible = irreversible

    def take(self) -> None:
        self.calls.append("take")
        self.taken = self.value

    def why_not(self) -> str | None:
        return "it is gone" if self.irreversible else None

    def restore(self, *, leave: frozenset[str] = frozenset()) -> None:
        self.calls.append(f"restore, but not {set(leave)}" if leave else "restore")
        self.value = self.taken

    def release(self) -> None:
        self.calls.append("release")


def failing(counter: Counter, times: int, error: BaseException = OUT) -> Callable[[], str]:
    left = [times]

    def step() -> str:
        counter.value += 1
        if left[0]:
            left[0] -= 1
            raise error
        return "done"

    return step


@pytest.fixture
def retry() -> Retry:
    return Retry(3, Counters())


def test_a_step_that_goes_well(retry: Retry) -> None:
    way, counter = Way(), Counter()
    assert retry.run(failing(counter, 0), way, [counter]) == "done"
    assert counter.calls == ["take", "release"]
    assert (way.asked, way.well) == ([], 0)
    assert retry.counters == Counters()


def test_a_step_is_undone_and_run_again(retry: Retry) -> None:
    way, counter = Way(), Counter()
    assert retry.run(failing(counter, 2), way, [counter]) == "done"
    assert counter.value == 1
    assert counter.calls == ["take", "restore", "restore", "release"]
    assert way.asked == [2 * 1024**2, 2 * 1024**2]
    assert way.well == 1
    counters = retry.counters
    assert (counters.out_of_memory, counters.retries, counters.retried_batches) == (2, 2, 1)


def test_a_step_counts_once(retry: Retry) -> None:
    """Where backward failed, forward had counted it."""

    def step() -> None:
        retry.counters.steps += 1
        if len(way.asked) < 2:
            raise torch.OutOfMemoryError("no")

    way = Way()
    retry.run(step, way, [])
    assert retry.counters.steps == 1


def test_the_number_of_tries_is_bounded(retry: Retry) -> None:
    way, counter = Way(), Counter()
    with pytest.raises(NoMemoryLeft, match="4 tries") as caught:
        retry.run(failing(counter, 99), way, [counter])
    assert caught.value.__cause__ is OUT
    assert counter.value == 0, "what the last try did is undone as well"
    assert retry.counters.retries == 3
    assert retry.run(failing(counter, 0), way, [counter]) == "done", "and the next batch is another one"


def test_nothing_tighter_is_left(retry: Retry) -> None:
    """The same is tried again; a switch of the function that raises by itself stays at the last time."""
    way, counter = Way(tighter=1), Counter()
    assert retry.run(failing(counter, 3), way, [counter]) == "done"
    assert counter.calls == ["take", "restore", "restore", "restore, but not {'value'}", "release"]
    assert counter.value == 1


def test_what_cannot_be_undone_is_not_run_again(retry: Retry) -> None:
    way, counter = Way(), Counter(irreversible=True)
    with pytest.raises(NoMemoryLeft, match="1 tries, it is gone"):
        retry.run(failing(counter, 1), way, [counter])
    assert counter.value == 1


def test_other_errors_pass_at_once(retry: Retry) -> None:
    way, counter = Way(), Counter()
    error = ValueError("out of memory slots")
    with pytest.raises(ValueError, match="slots") as caught:
        retry.run(failing(counter, 1, error), way, [counter])
    assert caught.value is error
    assert counter.calls == ["take", "release"]
    assert retry.counters.out_of_memory == 0


def test_what_is_not_ours_passes_at_once(retry: Retry) -> None:
    way, counter = Way(), Counter()
    with pytest.raises(torch.OutOfMemoryError) as caught:
        retry.run(failing(counter, 1), way, [counter], ours=lambda error: False)
    assert caught.value is OUT
    assert way.asked == []


def test_no_retries() -> None:
    retry, way, counter = Retry(0, Counters()), Way(), Counter()
    with pytest.raises(torch.OutOfMemoryError) as caught:
        retry.run(failing(counter, 1), way, [counter])
    assert caught.value is OUT
    assert counter.calls == []


def test_a_step_may_say_itself_when_it_begins(retry: Retry) -> None:
    """What comes before is done once more, but not undone."""
    way, counter = Way(), Counter()
    step = failing(counter, 1)

    def late() -> str:
        counter.value += 100
        retry.take()
        return step()

    assert retry.run(late, way, [counter], deferred=True) == "done"
    assert counter.calls.count("take") == 1
    assert counter.value == 201, "twice what comes before, once the step"


def test_a_failure_before_that_ends_it(retry: Retry) -> None:
    way, counter = Way(), Counter()
    with pytest.raises(NoMemoryLeft, match="1 tries, memory ran out before the step itself had begun"):
        retry.run(failing(counter, 1), way, [counter], deferred=True)
    assert way.asked == []


def test_a_step_inside_a_step_belongs_to_it(retry: Retry) -> None:
    way, counter = Way(), Counter()
    inner = failing(counter, 1)
    assert retry.run(lambda: retry.run(inner, way, [counter]), way, [counter]) == "done"
    assert counter.calls == ["take", "restore", "release"]
    assert retry.counters.retried_batches == 1


def test_nothing_of_a_failed_try_is_alive_when_it_is_undone(retry: Retry) -> None:
    """Its traceback would hold the tensors of every frame."""
    alive: list[weakref.ref[torch.Tensor]] = []

    class Looks(Counter):
        def restore(self, *, leave: frozenset[str] = frozenset()) -> None:
            assert alive[-1]() is None
            super().restore(leave=leave)

    def step() -> None:
        big = torch.zeros(10)
        alive.append(weakref.ref(big))
        if len(alive) == 1:
            raise torch.OutOfMemoryError("no")

    counter = Looks()
    retry.run(step, Way(), [counter])
    assert counter.calls == ["take", "restore", "release"]


def test_where_an_error_came_through() -> None:
    def culprit() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no") as caught:
        culprit()
    assert comes_through(caught.value, "culprit", "test_retry")
    assert not comes_through(caught.value, "culprit", "elsewhere")
    assert not comes_through(caught.value, "somebody", "test_retry")


class Carries(torch.nn.Module):
    """Begins with nothing, and carries a state from one step to the next."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)
        self.carried: torch.Tensor | None = None
        self.begun = False
        self.mode = "first"
        self.failed = False

    def forward(self, x: torch.Tensor, fail: Callable[[], None]) -> torch.Tensor:
        x = self.layer(x if self.carried is None else x + self.carried) * (1 + self.begun + len(self.mode))
        self.carried, self.begun, self.mode = x.detach().mean(0), True, "later"
        self.eval()
        fail()
        return x.square().mean()


@pytest.mark.parametrize("failures", [1, 3])
def test_switches_are_put_back_however_often_an_allocator_fails(failures: int) -> None:
    """Also for the last try: what has not happened yet in the first one has not happened in the last."""

    def train(left: int) -> list[object]:
        torch.manual_seed(0)
        model = Carries().train()
        remat = Remat(policy="full")

        def fail() -> None:
            nonlocal left
            if left:
                left -= 1
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.")

        def step() -> None:
            with remat:
                loss = model(torch.ones(2, 4), fail)
            loss.backward()

        for _ in range(2):
            remat.attempt(step, model)
        assert isinstance(model.carried, torch.Tensor)
        assert model.layer.weight.grad is not None
        return [model.carried.tolist(), model.layer.weight.grad.tolist(), model.begun, model.mode, model.training]

    assert train(failures) == train(0)


def test_a_switch_of_a_step_that_fails_by_itself_ends_its_failing() -> None:
    """Put back, it would fail for ever; everything else is put back."""
    model = Carries().train()
    remat = Remat(policy="full")

    def fail() -> None:
        if not model.failed:
            model.failed = True
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.")
        assert retried == [(None, False, "first", True)] * 4

    retried: list[object] = []

    def step() -> None:
        retried.append((model.carried, model.begun, model.mode, model.training))
        with remat:
            loss = model(torch.ones(2, 4), fail)
        loss.backward()

    remat.attempt(step, model)
    assert model.failed


def test_notes_do_not_grow_without_end() -> None:
    """A training in which every step fails makes one in each: the last ones stay, and what holds from now on is said
    once."""
    counters = Counters(notes=[str(i) for i in range(MOST_NOTES)])
    counters.note("the last")
    assert len(counters.notes) == MOST_NOTES
    assert counters.notes[0] == "1"
    assert counters.notes[-1] == "the last"

    model = torch.nn.Linear(2, 2)
    remat = Remat(policy="selective", retries=1)
    for _ in range(6):
        failed: list[bool] = []

        def step(failed: list[bool] = failed) -> None:
            if not failed:
                failed.append(True)
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.")
            with remat:
                model(torch.ones(1, 2))

        remat.attempt(step, model)
    assert sum("from now on" in note for note in remat.counters.notes) == 1
