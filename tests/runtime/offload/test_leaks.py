"""Nothing stays or grows: descriptors, threads, space, buffers; and forks in the middle of a step."""

import os
import sys
import threading
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_remat import Remat
from tests.helpers.bits import difference_in_bits
from tests.helpers.disk import damage_all, settle, threads, wait_for_threads
from tests.helpers.forks import in_fork
from tests.helpers.memory import live_objects, live_records, no_collector
from tests.helpers.offloaded import Smooth, Training, everything, place_of, plainly
from tests.helpers.training import Net


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


class Leaks:
    """What may not grow from step to step."""

    def __init__(self, remat: Remat) -> None:
        self.remat = remat

    def count(self) -> dict[str, int]:
        assert self.remat.offloading is not None
        mover = self.remat.offloading.mover
        assert mover is not None
        place = place_of(self.remat)
        depot = place._depot
        assert depot is not None
        settle(place)
        return {
            "descriptors": descriptors(),
            "threads": threading.active_count(),
            "used": place.used_bytes,
            "resident": mover.resident_bytes,
            "window": len([1 for reference in mover._window if reference() is not None]),
            "outstanding": mover._outstanding,
            "chunks": sum(queue.qsize() for queue in depot._chunks.values()),
            "file": depot._extents.end,
            "known": sum(reference() is not None for reference in mover_sources(self.remat)),
            "lists": len(mover._asked) + len(mover._learned) + len(mover._numbered),
            "notes": len(self.remat.counters.notes),
        }


def mover_sources(remat: Remat) -> list[Any]:
    assert remat.offloading is not None
    return remat.offloading.eviction.known


def usual(training: Training) -> None:
    training.step()


def forward_only(training: Training) -> None:
    training.step()
    assert training.remat is not None
    with training.remat:
        training.model(training.batches[0])


class Stop(Exception):
    pass


def fails_in_forward(training: Training) -> None:
    training.step()

    def fail(*args: Any) -> None:
        raise Stop

    with training.model[1].register_forward_hook(fail), pytest.raises(Stop):  # type: ignore[index, operator]  # blocks
        training.step()


def fails_in_backward(training: Training) -> None:
    training.step()

    def fail(gradient: Tensor) -> Tensor:
        raise Stop

    def halfway(module: nn.Module, args: Any, out: Tensor) -> None:
        out.register_hook(fail)

    with training.model[1].register_forward_hook(halfway), pytest.raises(Stop):  # type: ignore[index, operator]  # blocks
        training.step()


def validates(training: Training) -> None:
    training.step()
    with torch.no_grad():
        training.model(training.batches[1])


def loses_something(training: Training) -> None:
    assert training.remat is not None
    training.step()
    remat = training.remat
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        training.step(lambda: damage_all(place_of(remat)))


def closes(training: Training) -> None:
    assert training.remat is not None
    training.remat.close()
    training.step()


WAYS = [usual, forward_only, fails_in_forward, fails_in_backward, validates, loses_something, closes]


@pytest.mark.parametrize(
    ("way", "steps"),
    [*[(way, 60) for way in WAYS], (usual, 300), pytest.param(usual, 10_000, marks=pytest.mark.slow)],
    ids=lambda x: getattr(x, "__name__", x),
)
@pytest.mark.parametrize("policy", ["offload_only", "full"])
def test_nothing_grows(tmp_path: Path, engines: Any, policy: str, way: Callable[[Training], None], steps: int) -> None:
    """Without the garbage collector: descriptors, threads, buffers, bytes at the place and on the way, objects."""
    with no_collector():
        remat = engines(policy, offload=everything(tmp_path), retries=0)
        training = Training(Smooth, remat)
        training.losses = Forgetful(training.losses)
        leaks = Leaks(remat)
        for _ in range(5):
            way(training)
        live_objects()
        before, records, objects = leaks.count(), live_records(), live_objects()
        for _ in range(steps):
            way(training)
        after, records_after, objects_after = leaks.count(), live_records(), live_objects()
        if way is closes:
            wait_for_threads_but(2)
            after = leaks.count()
    assert after == before
    assert (before["used"], before["resident"], before["outstanding"]) == (0, 0, 0)
    assert records_after == records
    assert not records_after
    objects_after.subtract(objects)
    assert {name: n for name, n in objects_after.items() if n >= steps // 2} == {}


class Forgetful(list[Tensor]):
    """Of many losses only the number counts."""

    def append(self, loss: Tensor) -> None:
        super().append(torch.zeros(()) if not self else self[0])


def wait_for_threads_but(count: int) -> None:
    while len(threads()) > count:
        for thread in threads()[:-count]:
            thread.join(10)


@pytest.mark.parametrize("policy", ["offload_only", "full", lambda op: "keep"], ids=["only", "full", "function"])
def test_an_engine_that_is_not_closed(tmp_path: Path, policy: Any) -> None:
    """It goes with its last reference, and its file and threads with it; not before backward has run."""
    with no_collector():
        plain = plainly(Smooth, 1)
        before = descriptors()
        training = Training(Smooth, Remat(policy, offload=everything(tmp_path), blocks=nn.Sequential))
        loss = torch.zeros(())

        def forget() -> None:
            training.remat = None

        training.step(forget)
        del loss
        assert difference_in_bits(plain, training.left) == []
        wait_for_threads()
        assert threads() == []
        assert descriptors() == before


def test_a_fork_in_the_middle_of_a_step(tmp_path: Path) -> None:
    """The child ends as any other, whether it lets go of the step or goes on with it; the parent notices nothing."""

    def parent() -> list[str]:
        torch.set_num_threads(1)
        plain = plainly(Net, 4)
        remat = Remat("offload_only", offload=everything(tmp_path))
        training = Training(Net, remat)
        children: list[Callable[[], object]] = [lambda: None, remat.close, lambda: goes_on(remat), sys.exit]
        codes = []
        for child in children:
            training.step(lambda child=child: codes.append(forked(child)))
        remat.close()
        assert codes == [0, 0, 0, 0]
        assert remat.counters.offload_failures == 0
        return difference_in_bits(plain, training.left)

    ended = in_fork(parent)
    assert ended.error is None
    assert ended.value == []


def goes_on(remat: Remat) -> None:
    """Training under the parent's engine, with a file of its own."""
    plain, training = plainly(Smooth, 2), Training(Smooth, remat)
    for _ in range(2):
        training.step()
    assert difference_in_bits(plain, training.left) == []


def forked(job: Callable[[], object]) -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # that forks and threads do not go together: from 3.12 on
        child = os.fork()
    if child == 0:
        code = 1
        try:
            job()
            code = 0
        except SystemExit:
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
