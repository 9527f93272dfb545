"""Running a step again: how often, with what put back, and how it ends."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import pytest
import torch

from lightning_remat.errors import NoMemoryLeft
from lightning_remat.runtime.counters import Counters
from lightning_remat.runtime.retry import Retry, comes_through

OUT = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.")


class Way:
    """Has so many tighter tries to offer."""

    def __init__(self, tighter: int = 9) -> None:
        self.tighter = tighter
        self.asked: list[int | None] = []
        self.well = 0
        self.ends: list[tuple[BaseException, int, str | None]] = []

    def tighten(self, asked: int | None) -> str | None:
        self.asked.append(asked)
        self.tighter -= 1
        return "with less" if self.tighter >= 0 else None

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

    def restore(self) -> None:
        self.calls.append("restore")
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


def test_the_number_of_tries_is_bounded(retry: Retry) -> None:
    way, counter = Way(), Counter()
    with pytest.raises(NoMemoryLeft, match="4 tries") as caught:
        retry.run(failing(counter, 99), way, [counter])
    assert caught.value.__cause__ is OUT
    assert counter.value == 0, "what the last try did is undone as well"
    assert retry.counters.retries == 3
    assert retry.run(failing(counter, 0), way, [counter]) == "done", "and the next batch is another one"


def test_nothing_tighter_is_left(retry: Retry) -> None:
    way, counter = Way(tighter=1), Counter()
    with pytest.raises(NoMemoryLeft, match="2 tries"):
        retry.run(failing(counter, 99), way, [counter])
    assert counter.value == 0


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
        def restore(self) -> None:
            assert alive[-1]() is None
            super().restore()

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
