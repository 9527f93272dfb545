"""How fast a place is: measured through its protocol alone, remembered for a machine, measured anew when it is old."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lightning_remat import Offload, OffloadError, Remat
from lightning_remat.engine.offload.place import Traffic
from lightning_remat.runtime import bandwidth
from lightning_remat.runtime.bandwidth import (
    Bandwidth,
    bandwidth_of,
    key_of_disk,
    key_of_host,
    known,
    measure,
    remember,
)

DAY = 24 * 3600.0
MIB = 2**20


@dataclass
class Time:
    """A clock that moves when somebody works."""

    wall: float = 100.0
    cpu: float = 5.0
    date: float = 1_000_000.0


@dataclass
class FakeContent:
    place: FakePlace
    data: Tensor
    nbytes: int
    into: Tensor | None = None
    released: int = 0

    def is_out(self) -> bool:
        return True

    def finish_out(self) -> None:
        self.place.works(self.nbytes / self.place.out + self.place.latency)

    def begin_back(self, into: Tensor) -> None:
        self.into = into

    def finish_back(self) -> None:
        assert self.into is not None
        self.place.works(self.nbytes / self.place.back + self.place.latency)
        self.into.copy_(self.data)
        self.into[0] ^= self.place.spoils

    def release(self) -> None:
        self.released += 1


@dataclass
class FakePlace:
    """A place in memory, with speeds as they are given."""

    time: Time
    out: float = 100.0 * MIB
    back: float = 50.0 * MIB
    latency: float = 0.0
    cpu_share: float = 0.5
    spoils: int = 0
    room: int = 10**9
    name: str = "disk"
    traffic: Traffic = field(default_factory=Traffic)
    used_bytes: int = 0
    peak_bytes: int = 0
    contents: list[FakeContent] = field(default_factory=list)

    def works(self, seconds: float) -> None:
        self.time.wall += seconds
        self.time.cpu += self.cpu_share * seconds

    def take(self, source: Tensor) -> FakeContent:
        assert source.dtype is torch.uint8
        assert source.dim() == 1
        assert source.untyped_storage().nbytes() == source.numel()
        if len(self.contents) >= self.room:
            raise OffloadError("full")
        content = FakeContent(self, source.clone(), source.numel())
        self.contents.append(content)
        return content

    def close(self) -> None:
        pass


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that everything is remembered in; nothing is there yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "lightning-remat" / "bandwidth.json"


def clocks(time: Time) -> dict[str, object]:
    def work(operand: Tensor) -> None:
        time.wall += 0.001

    return {"clock": lambda: time.wall, "cpu_clock": lambda: time.cpu, "now": lambda: time.date, "work": work}


def measured(place: FakePlace, **options: object) -> Bandwidth:
    small = {"total_bytes": MIB, "content_bytes": MIB // 4}
    return measure(place, "/spill", **(small | clocks(place.time) | options))


def made(**options: object) -> Bandwidth:
    given = {"out_bytes_per_second": 2e9, "in_bytes_per_second": 1e9, "latency_seconds": 1e-4,
             "cpu_seconds_per_byte": 1e-10, "delay_seconds_per_byte": 3e-10, "measured_at": 1_000_000.0,
             "place": "disk", "where": "/spill"}  # fmt: skip
    return Bandwidth(**(given | options))


# ---------------------------------------------------------------------- measuring


def test_speeds_are_those_of_the_place() -> None:
    place = FakePlace(Time())
    found = measured(place)
    assert found.out_bytes_per_second == pytest.approx(100 * MIB)
    assert found.in_bytes_per_second == pytest.approx(50 * MIB)
    # Half of the time is the processor's: a byte takes 1/100 and 1/50 of a second per MiB.
    assert found.cpu_seconds_per_byte == pytest.approx(0.5 * (1 / 100 + 1 / 50) / 2 / MIB)
    assert (found.place, found.where, found.measured_at) == ("disk", "/spill", 1_000_000.0)


def test_latency_is_that_of_a_tiny_content() -> None:
    place = FakePlace(Time(), latency=0.25, out=1e15, back=1e15)
    assert measured(place).latency_seconds == pytest.approx(0.25)


@pytest.mark.parametrize("slower", [0.0, 0.002])
def test_a_delay_is_what_work_loses_while_contents_are_on_their_way(slower: float) -> None:
    time = Time()
    place = FakePlace(time)
    done = []

    def work(operand: Tensor) -> None:
        busy = any(not content.released for content in place.contents)
        done.append(busy)
        time.wall += 0.001 + slower * busy

    found = measured(place, work=work)
    # As long as a transfer and a half, in each direction; what it moves meanwhile is four contents of MIB / 4.
    assert done.count(True) == 3 * 2 * 22  # 1.5 x 15 ms of both directions' mean, in operations of 1 ms
    assert found.delay_seconds_per_byte == pytest.approx(2 * 22 * slower / (2 * MIB))


def test_a_single_slow_round_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    place = FakePlace(Time())
    take = place.take

    def once_slow(source: Tensor) -> FakeContent:
        if len(place.contents) == 10:
            place.time.wall += 1000
        return take(source)

    monkeypatch.setattr(place, "take", once_slow)
    assert measured(place).out_bytes_per_second == pytest.approx(100 * MIB)


def test_everything_is_given_back() -> None:
    """Each content is released, and the random stream has not moved."""
    before = torch.get_rng_state()
    place = FakePlace(Time())
    measured(place, rounds=2)
    assert len(place.contents) == 5 + 2 * 4 + 2 * 4
    assert all(content.released == 1 for content in place.contents)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_total_below_one_content() -> None:
    place = FakePlace(Time())
    measured(place, total_bytes=1, content_bytes=MIB, rounds=1)
    assert sum(content.nbytes == MIB for content in place.contents) == 2  # one for speed, one for what it holds up


def test_a_place_that_alters_bytes_is_no_place() -> None:
    place = FakePlace(Time(), spoils=1)
    with pytest.raises(OffloadError, match="is not what was written"):
        measured(place)
    assert all(content.released for content in place.contents)


def test_a_full_place() -> None:
    """What it has taken so far is released."""
    place = FakePlace(Time(), room=9)
    with pytest.raises(OffloadError, match="full"):
        measured(place)
    assert len(place.contents) == 9
    assert all(content.released == 1 for content in place.contents)


def test_what_a_step_hides() -> None:
    """Forward has a part of the step, backward the other: 1/2 and 1 second for 1e9 bytes."""
    assert made().hidden_bytes(1.5) == 10**9
    assert made().hidden_bytes(0.0) == 0


# ---------------------------------------------------------------------- remembering


def test_what_was_measured_is_known(cache: Path) -> None:
    time = Time()
    place = FakePlace(time)
    first = bandwidth_of(place, "key", "/spill", total_bytes=MIB, content_bytes=MIB, **clocks(time))
    assert cache.is_file()
    again = FakePlace(time)
    assert bandwidth_of(again, "key", "/spill", **clocks(time)) == first
    assert not again.contents
    fresh = FakePlace(time, out=200.0 * MIB)
    found = bandwidth_of(fresh, "key", "/spill", fresh=True, total_bytes=MIB, content_bytes=MIB, **clocks(time))
    assert found.out_bytes_per_second == pytest.approx(200 * MIB)
    assert known("key", lambda: time.date) == found
    assert [path.name for path in cache.parent.iterdir()] == [cache.name]


def test_each_place_for_itself() -> None:
    def now() -> float:
        return 1_000_000.0

    remember("a", made(), now)
    remember("b", made(place="cpu"), now)
    assert (known("a", now), known("b", now), known("c", now)) == (made(), made(place="cpu"), None)


def test_after_a_month_it_is_measured_anew() -> None:
    remember("key", made(), lambda: 1_000_000.0)
    assert known("key", lambda: 1_000_000.0 + 30 * DAY) is not None
    assert known("key", lambda: 1_000_000.0 + 31 * DAY) is None
    assert known("key", lambda: 1_000_000.0 - 1) is None  # the clock was set back


def test_what_is_too_old_goes_from_the_file(cache: Path) -> None:
    remember("old", made(), lambda: 1_000_000.0)
    later = 1_000_000.0 + 40 * DAY
    remember("new", made(measured_at=later), lambda: later)
    assert set(json.loads(cache.read_text())["places"]) == {"new"}


DAMAGED = {
    "empty": "",
    "half": '{"format": 2, "places": {"key": {"out_by',
    "another format": '{"format": 1, "places": {}}',
    "a list": "[]",
    "no places": '{"format": 2}',
    "places is a list": '{"format": 2, "places": []}',
    "deep": "[" * 100_000,
    "binary": "\udcff\udcfe",
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_file_is_no_error(name: str, cache: Path) -> None:
    cache.parent.mkdir()
    cache.write_text(DAMAGED[name], encoding="utf-8", errors="surrogateescape")
    assert known("key") is None
    remember("key", made(), lambda: 1_000_000.0)
    assert known("key", lambda: 1_000_000.0) == made()


@pytest.mark.parametrize(
    "wrong",
    [{"out_bytes_per_second": 0}, {"in_bytes_per_second": -1}, {"latency_seconds": "fast"}, {"measured_at": True},
     {"cpu_seconds_per_byte": float("nan")}, {"out_bytes_per_second": float("inf")}, {"where": 3}, {"other": 1}],
    ids=str,
)  # fmt: skip
def test_a_damaged_entry_is_passed_over(wrong: dict[str, object], cache: Path) -> None:
    """The others are read."""
    for key in ("good", "bad"):
        remember(key, made(), lambda: 1_000_000.0)
    content = json.loads(cache.read_text())
    content["places"]["bad"] |= wrong
    cache.write_text(json.dumps(content))
    assert known("bad", lambda: 1_000_000.0) is None
    assert known("good", lambda: 1_000_000.0) == made()


def test_a_file_that_cannot_be_written_is_no_error(cache: Path) -> None:
    cache.parent.write_text("in the way")
    remember("key", made())
    assert known("key") is None


def test_a_write_that_fails_leaves_the_old_file(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    remember("key", made(), lambda: 1_000_000.0)
    monkeypatch.setattr(bandwidth.os, "replace", full)
    remember("key", replace(made(), place="cpu"), lambda: 1_000_000.0)
    assert known("key", lambda: 1_000_000.0) == made()
    assert [path.name for path in cache.parent.iterdir()] == [cache.name]


def test_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine, a file system, with or without checksums; a machine and an accelerator."""
    key = key_of_disk(tmp_path, True)
    assert key == key_of_disk(tmp_path / ".", True) != key_of_disk(tmp_path, False)
    (tmp_path / "folder").mkdir()
    assert key == key_of_disk(tmp_path / "folder", True)
    assert key_of_host(torch.device("cpu")) not in (key, key_of_host(torch.device("meta")))
    monkeypatch.setattr(bandwidth.socket, "gethostname", lambda: "another")
    assert key_of_disk(tmp_path, True) != key


@pytest.mark.parametrize("budget", [2 * MIB, 20 * MIB])
def test_a_budget_below_what_is_measured_with_is_no_refusal(tmp_path: Path, cache: Path, budget: int) -> None:
    """Plans still move there: it is measured with less."""
    remat = Remat(budget="1400KiB", offload=Offload(tmp_path, disk_budget=budget, min_bytes=0))
    net = torch.nn.Sequential(*[torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU()) for _ in range(6)])
    for _ in range(3):
        with remat:
            loss = net(torch.ones(512, 64)).square().mean()
        loss.backward()
    assert remat.plan is not None
    assert remat.plan.transfer is not None
    assert cache.is_file()
    assert remat.counters.offload_refused == 0
    remat.close()
