"""Offload that fails in the middle of a training: disks that are full, gone, broken or silent, and what comes of it."""

import copy
import errno
import os
import pickle
import shutil
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_remat import ConfigurationError, Offload, OffloadError, Remat, RematCallback, RematStrategy
from lightning_remat.engine.offload import directory as directories
from lightning_remat.engine.offload.disk import DiskPlace
from tests.helpers.bits import difference_in_bits, random_streams
from tests.helpers.disk import BROKEN, FULL, Held, broken, damage_all, small_disk, threads, wait_for_threads
from tests.helpers.forks import in_fork
from tests.helpers.memory import live_objects, live_records, no_collector
from tests.helpers.seed import seed_everything
from tests.helpers.training import Net

CPU = torch.device("cpu")


class Smooth(nn.Sequential):
    """All that it makes can be computed again."""

    def __init__(self, width: int = 32, depth: int = 3) -> None:
        super().__init__(*[nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(depth)])


class Training:
    """A model in training from a known seed, plainly or under an engine.

    Args:
        make: the model.
        remat: None: plainly.
        guarded: by :meth:`Remat.attempt`.
        parts: forward and backward passes in a step.
    """

    def __init__(
        self, make: Callable[[], nn.Module], remat: Remat | None = None, *, guarded: bool = False, parts: int = 1
    ) -> None:
        seed_everything(3)
        self.model = make()
        width = next(self.model.parameters()).shape[1]
        self.batches = torch.randn(50, 16, width)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-2)
        self.remat, self.guarded, self.parts = remat, guarded, parts
        self.losses: list[Tensor] = []
        self.between: Callable[[], object] = lambda: None
        """Called between forward and backward."""

    def _tried(self) -> Tensor:
        whole = torch.zeros(())
        for part in range(self.parts):
            batch = self.batches[len(self.losses) % 50] + part
            if self.remat is None:
                loss = self.model(batch).square().mean()
            else:
                with self.remat:
                    loss = self.model(batch).square().mean()
            self.between()
            loss.backward()
            whole = whole + loss.detach()
        return whole

    def step(self, between: Callable[[], object] = lambda: None) -> None:
        self.between = between
        self.optimizer.zero_grad()
        loss = self.remat.attempt(self._tried, self.model) if self.remat and self.guarded else self._tried()
        self.losses.append(loss)
        self.optimizer.step()

    @property
    def left(self) -> dict[str, Any]:
        return {
            "losses": self.losses,
            "state": dict(self.model.state_dict()),
            "gradients": [p.grad for p in self.model.parameters()],
            "optimizer": self.optimizer.state_dict(),
            "streams": random_streams(),
        }


def plainly(make: Callable[[], nn.Module], steps: int, parts: int = 1) -> dict[str, Any]:
    training = Training(make, parts=parts)
    for _ in range(steps):
        training.step()
    return training.left


def everything(directory: Path, **options: Any) -> Offload:
    """All that is kept leaves at once."""
    return Offload(directory, min_bytes=0, in_flight=1, **options)


def place_of(remat: Remat) -> DiskPlace:
    """Where it is, before the first step as well."""
    assert remat.offloading is not None
    place = remat.offloading.on(CPU).place
    assert isinstance(place, DiskPlace)
    return place


@pytest.fixture
def engines() -> Iterator[Callable[..., Remat]]:
    made: list[Remat] = []

    def make(*args: Any, **options: Any) -> Remat:
        made.append(Remat(*args, **options))
        return made[-1]

    yield make
    for remat in made:
        remat.close()


def recorded(steps: Callable[[], object]) -> list[str]:
    """Run something; returns what it warned of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        steps()
    return [str(w.message) for w in caught]


POLICIES = pytest.mark.parametrize("policy", ["offload_only", "full", "selective"], ids=["only", "full", "selective"])
MODELS = pytest.mark.parametrize("make", [Smooth, Net])


# ---- writing ----


@POLICIES
@MODELS
@pytest.mark.parametrize("number", [FULL, BROKEN])
def test_writes_that_fail(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, engines: Any, policy: Any, make: Any, number: int
) -> None:
    """From the third step on none succeeds: what cannot leave is kept, which is said once, and training goes on."""
    plain = plainly(make, 8)
    remat = engines(policy, offload=everything(tmp_path))
    training = Training(make, remat)
    for _ in range(2):
        training.step()
    before = remat.counters.bytes_out
    assert before > 0
    broken(monkeypatch, "pwritev", lambda call: number)
    texts = recorded(lambda: [training.step() for _ in range(6)])
    assert difference_in_bits(plain, training.left) == []
    assert len(texts) == 1
    assert os.strerror(number) in texts[0]
    assert "Name another directory" in texts[0]
    assert "What could not be moved is kept" in texts[0]
    assert remat.counters.offload_failures >= 5
    assert (remat.counters.retries, remat.counters.steps) == (0, 8)
    assert place_of(remat).used_bytes == 0
    monkeypatch.undo()
    training.step()  # there is room again
    remat.close()
    assert remat.counters.bytes_out > before


@POLICIES
@pytest.mark.parametrize("when", ["from the start", "later"])
def test_a_small_disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, engines: Any, policy: Any, when: str) -> None:
    """It has room for a part of a step; ``later``, others take it."""
    make = lambda: Smooth(width=256, depth=24)  # noqa: E731 - a model in a line
    plain = plainly(make, 4)
    with small_disk(monkeypatch, tmp_path, 1 << 18 if when == "from the start" else 1 << 22):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it is memory, where it could be mounted
            remat = engines(policy, offload=everything(tmp_path))
        training = Training(make, remat)
        if when == "later":
            training.step()
            taken = place_of(remat)._depot.file.allocated()  # type: ignore[union-attr]  # which it has by now
            (tmp_path / "others").write_bytes(bytes((1 << 22) - taken - (1 << 16)))
        texts = recorded(lambda: [training.step() for _ in range(4 - len(training.losses))])
        assert difference_in_bits(plain, training.left) == []
        if when == "from the start" and policy == "offload_only":
            assert len(texts) == 1
            assert "cannot go to the disk" in texts[0]
            assert "the disk is full" in texts[0]
            assert "What cannot leave is kept" in texts[0]
            assert remat.counters.offload_refused > 0
        assert remat.counters.bytes_out > 0
        remat.close()


def test_a_cap(tmp_path: Path, engines: Any) -> None:
    plain = plainly(Smooth, 4)
    remat = engines("offload_only", offload=everything(tmp_path, disk_budget=8192))
    training = Training(Smooth, remat)
    texts = recorded(lambda: [training.step() for _ in range(4)])
    assert difference_in_bits(plain, training.left) == []
    (text,) = texts
    assert "8.0 KiB of disk_budget=8.0 KiB are taken" in text
    assert "Raise disk_budget=" in text
    assert remat.counters.offload_refused >= 4
    assert 0 < place_of(remat).peak_bytes <= 8192


@pytest.mark.parametrize("what", ["removed", "closed to everybody"])
def test_what_becomes_of_the_directory_does_not_matter(tmp_path: Path, engines: Any, what: str) -> None:
    directory = tmp_path / "spill"
    directory.mkdir()
    plain = plainly(Net, 3)
    remat = engines("offload_only", offload=everything(directory))
    training = Training(Net, remat)
    training.step(lambda: shutil.rmtree(directory) if what == "removed" else directory.chmod(0))
    for _ in range(2):
        training.step()
    assert difference_in_bits(plain, training.left) == []
    assert remat.counters.offload_failures == remat.counters.offload_refused == 0
    if directory.exists():
        directory.chmod(0o700)


# ---- reading ----


@POLICIES
@pytest.mark.parametrize("how", ["damaged", "unreadable"])
def test_what_can_be_computed_again_is(tmp_path: Path, engines: Any, policy: Any, how: str) -> None:
    """The same bits, without a retry; said once."""
    plain = plainly(Smooth, 6)
    remat = engines(policy, offload=everything(tmp_path))
    training = Training(Smooth, remat)

    def steps() -> None:
        for index in range(6):
            with pytest.MonkeyPatch.context() as patch:
                if index % 2 == 0:
                    training.step()
                elif how == "damaged":
                    training.step(lambda: damage_all(place_of(remat)))
                else:
                    training.step(lambda patch=patch: broken(patch, "preadv", lambda call: BROKEN))

    texts = recorded(steps)
    assert difference_in_bits(plain, training.left) == []
    (text,) = texts
    assert ("what was read is not what was written" if how == "damaged" else "Input/output error") in text
    assert "It was computed again instead" in text
    assert remat.counters.retries == 0
    remat.close()
    assert remat.counters.offload_failures >= 3
    assert remat.counters.bytes_in > 0


def test_a_long_chain_is_computed_again(tmp_path: Path, engines: Any) -> None:
    """From the first batch on: all that was written is lost, in a model that is deeper than calls may be."""

    def make() -> nn.Module:
        return Smooth(width=4, depth=400)

    plain = plainly(make, 2)
    remat = engines("offload_only", offload=everything(tmp_path))
    training = Training(make, remat)
    (text,) = recorded(lambda: [training.step(lambda: damage_all(place_of(remat))) for _ in range(2)])
    assert "It was computed again instead" in text
    assert difference_in_bits(plain, training.left) == []


def test_what_cannot_be_computed_again_is_an_error_in_a_plain_loop(tmp_path: Path, engines: Any) -> None:
    """It says what to do; after that, training goes on."""
    remat = engines("offload_only", offload=everything(tmp_path))
    training = Training(Net, remat)
    training.step()
    with pytest.raises(OffloadError, match="what was read is not what was written") as caught:
        training.step(lambda: damage_all(place_of(remat)))
    text = str(caught.value)
    for part in ("Name another directory", "Nor can it be computed again", "clear them and run the batch again"):
        assert part in text
    assert "Remat.attempt" in text
    assert caught.value.__cause__ is not None
    training.step()


@POLICIES
def test_a_step_that_lost_something_is_run_again(tmp_path: Path, engines: Any, policy: Any, caplog: Any) -> None:
    plain = plainly(Net, 5)
    remat = engines(policy, offload=everything(tmp_path))
    training = Training(Net, remat, guarded=True)
    tries = []

    def damage() -> None:
        tries.append(1)
        if len(tries) == 1:
            damage_all(place_of(remat))

    texts = recorded(lambda: [training.step(damage if index == 2 else lambda: None) for index in range(5)])
    assert difference_in_bits(plain, training.left) == []
    counters = remat.counters
    if policy == "offload_only":
        assert (len(tries), counters.retries, counters.retried_batches) == (2, 1, 1)
        assert all("It was computed again instead" in text for text in texts)
        (record,) = caplog.records
        assert record.message.endswith("A training step needs it: the same batch is run again, without offload.")
        assert "could not be read from the disk" in record.message
        assert "Nor can it" not in record.message
        assert any("run again without offload" in note for note in counters.notes)
    assert counters.steps == 5
    assert counters.out_of_memory == 0
    remat.close()
    assert counters.offload_failures > 0


def test_after_the_third_time_nothing_is_moved_any_more(tmp_path: Path, engines: Any) -> None:
    plain = plainly(Net, 8)
    remat = engines("offload_only", offload=everything(tmp_path))
    training = Training(Net, remat, guarded=True)

    def steps() -> None:
        for _ in range(8):
            training.step(lambda: damage_all(place_of(remat)))

    (text,) = recorded(steps)
    assert "3 steps had to be run again" in text
    assert "from now on nothing is moved" in text
    assert difference_in_bits(plain, training.left) == []
    assert (remat.counters.retries, remat.counters.retried_batches) == (3, 3)
    moved = remat.counters.bytes_out
    training.step()
    remat.close()
    assert remat.counters.bytes_out == moved


def test_a_plan_that_moves(tmp_path: Path, engines: Any) -> None:
    """The same bits; where nothing is moved any more, there is another plan."""

    def trained(remat: Remat | None) -> Training:
        def make() -> nn.Module:
            return nn.Sequential(*[nn.Sequential(nn.Linear(128, 128), nn.GELU(), nn.Dropout(0.1)) for _ in range(6)])

        training = Training(make, remat, guarded=True)
        training.batches = torch.randn(1, 1024, 128).expand(50, -1, -1)
        for index in range(12):
            training.step((lambda: damage_all(place_of(remat))) if remat and 5 <= index < 8 else lambda: None)
            if remat and index in (4, 11):
                assert remat.plan is not None
                assert bool(remat.plan.chosen.moves) is (index == 4)
        return training

    plain = trained(None).left
    # Less than it takes to keep all, and more than it takes to move all.
    remat = engines("offload_only", budget="6MiB", offload=Offload(tmp_path, min_bytes=0))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ours = trained(remat).left
    assert difference_in_bits(plain, ours) == []
    assert sum("from now on nothing is moved" in str(w.message) for w in caught) == 1
    assert remat.counters.retries == 3


def test_one_retry_is_enough_for_a_step_of_several_parts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, engines: Any
) -> None:
    """The step that is run again moves nothing to its end, and the next one does."""
    plain = plainly(Net, 2, parts=3)
    remat = engines("offload_only", offload=everything(tmp_path), retries=1)
    training = Training(Net, remat, guarded=True, parts=3)
    broken(monkeypatch, "preadv", lambda call: BROKEN)
    for count in (1, 2):
        training.step()
        assert remat.counters.retries == count
    assert difference_in_bits(plain, training.left) == []


def test_an_error_of_the_users_ends_a_try_as_ever(tmp_path: Path, engines: Any) -> None:
    """The next step moves again."""
    remat = engines("offload_only", offload=everything(tmp_path))
    training = Training(Net, remat, guarded=True)
    tries = []

    def fail() -> None:
        tries.append(1)
        if len(tries) == 2:
            raise ZeroDivisionError
        damage_all(place_of(remat))

    with pytest.raises(ZeroDivisionError):
        training.step(fail)
    training.step()
    before = remat.counters.bytes_out
    training.step()
    remat.close()
    assert remat.counters.bytes_out > before


def test_without_retries_the_error_goes_up(tmp_path: Path, engines: Any) -> None:
    remat = engines("offload_only", offload=everything(tmp_path), retries=0)
    training = Training(Net, remat, guarded=True)
    with pytest.raises(OffloadError, match="clear them and run the batch again"):
        training.step(lambda: damage_all(place_of(remat)))


class Twice(nn.Module):
    """What has left is computed from what is written in place, and both are asked for by one replay."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        h = h.mul(2).sin_().mul_(0.5)
        kept = torch.matmul(h, self.linear.weight)
        return (h * h.exp()).cos() + (h.exp() * kept).sin() * kept.cos()


@pytest.mark.parametrize("kept", ["mm", "mm addmm", "mul sin_", "exp mm", "sin cos mm"])
def test_writes_are_run_once_though_two_chains_need_them(tmp_path: Path, engines: Any, kept: str) -> None:
    """What is fetched comes after all that its recipe needs, so that one chain goes on where the other has failed."""

    def policy(op: Any) -> str:
        return "keep" if op.name.split(".")[1] in kept.split() else "recompute"

    plain = plainly(Twice, 3)
    remat = engines(policy, offload=everything(tmp_path))
    training = Training(Twice, remat, guarded=True)
    recorded(lambda: [training.step(lambda: damage_all(place_of(remat))) for _ in range(3)])
    assert difference_in_bits(plain, training.left) == []


# ---- silence ----


@MODELS
@pytest.mark.parametrize("name", ["preadv", "pwritev"])
def test_a_disk_that_does_not_answer(tmp_path: Path, engines: Any, make: Any, name: str) -> None:
    """Nothing hangs; it is as if it had failed."""
    plain = plainly(make, 4)
    remat = engines("offload_only", offload=everything(tmp_path))
    place_of(remat).patience = 0.2
    training = Training(make, remat, guarded=True)
    training.step()
    held = []

    def silence(patch: pytest.MonkeyPatch) -> None:
        if not held:
            held.append(Held(patch, name))

    def steps(patch: pytest.MonkeyPatch) -> None:
        if name == "pwritev":
            silence(patch)
        training.step(lambda: silence(patch))
        for _ in range(2):
            training.step()

    try:
        with pytest.MonkeyPatch.context() as patch:
            texts = recorded(lambda: steps(patch))
            assert difference_in_bits(plain, training.left) == []
            assert any("the disk has not answered for 0.2 s" in text for text in texts) or make is Net
            assert remat.counters.retries == (make is Net and name == "preadv")
            remat.close()
    finally:
        held[0].open.set()


# ---- options, copies ----


def test_the_place_of_a_copy_is_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engines: Any) -> None:
    """Copies and pickles have the option, with its directory, wherever they are opened."""
    (tmp_path / "spill").mkdir()
    monkeypatch.chdir(tmp_path)
    remat = engines("offload_only", offload=Offload("spill", min_bytes=0, in_flight=1))
    training = Training(Smooth, remat)
    training.step()
    strategy = RematStrategy(policy="offload_only", offload="./spill")
    callback = RematCallback(policy="offload_only", offload="./spill")
    pickled = pickle.dumps((remat, strategy, callback))
    copies = copy.deepcopy((remat, strategy, callback))
    monkeypatch.chdir("/")
    for one, its_strategy, its_callback in (copies, pickle.loads(pickled)):
        for inner in (one, its_strategy.remat, its_callback.remat):
            assert inner.offload is not None
            assert inner.offload.directory == tmp_path / "spill"
            assert inner.counters.bytes_out == 0
        other = Training(Smooth, one)
        other.step()
        assert place_of(one) is not place_of(remat)
        assert one.counters.steps == 1
        one.close()
    training.step()


THREE = pytest.mark.parametrize("way", [Remat, RematStrategy, RematCallback])


@THREE
def test_bad_input_is_refused_at_once(way: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigurationError, match=r"that is a file and not a directory.*name another directory"):
        way(policy="full", offload=tmp_path / "file")
    with pytest.raises(ConfigurationError, match="there is no such directory"):
        way(policy="full", offload=tmp_path / "missing")
    with pytest.raises(ConfigurationError, match="disk_budget=0 is less than can be used"):
        way(policy="full", offload=Offload(tmp_path, disk_budget=0))
    with pytest.raises(ConfigurationError, match="contradict each other"):
        way(policy="none", offload=tmp_path)

    def refused(*args: Any, **options: Any) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    with monkeypatch.context() as patch:
        patch.setattr(directories.tempfile, "TemporaryFile", refused)
        with pytest.raises(ConfigurationError, match=r"nothing can be written there \(Read-only file system\)"):
            way(policy="full", offload=tmp_path)


@THREE
def test_a_network_file_system_is_warned_of(way: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mounts").write_text(f"1 0 0:1 / {tmp_path} rw - nfs4 server:/ rw\n")
    monkeypatch.setattr(directories, "_MOUNTS", tmp_path / "mounts")
    with pytest.warns(UserWarning, match=r"is on a network file system \(nfs4\)"):
        way(policy="full", offload=tmp_path)


def test_a_directory_that_goes_before_the_first_step(tmp_path: Path, engines: Any) -> None:
    (tmp_path / "spill").mkdir()
    remat = engines("offload_only", offload=tmp_path / "spill")
    (tmp_path / "spill").rmdir()
    with pytest.raises(ConfigurationError, match=r"spill.*cannot any more \(No such file"):
        Training(Smooth, remat).step()


def test_a_model_on_the_cpu_has_nothing_to_move_to_host_memory(monkeypatch: pytest.MonkeyPatch, engines: Any) -> None:
    """The device is known when the first step begins."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    remat = engines("offload_only", offload="cpu")
    for _ in range(2):
        with pytest.raises(ConfigurationError, match=r'offload="cpu" makes no sense here.*use offload="disk"'):
            Training(Smooth, remat).step()


# ---- nothing stays ----


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
        idle = threading.Barrier(place.workers + 1)
        for _ in range(place.workers):  # what runs has ended when all threads are here
            depot._crew.put(idle.wait)
        idle.wait(60)
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


# ---- forks ----


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
