"""What host memory refuses, how it ends, and who may let go of contents when."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lightning_remat.engine.offload import host
from lightning_remat.engine.offload.host import HostPlace, available_bytes
from lightning_remat.engine.offload.streams import host_refusal
from lightning_remat.errors import ConfigurationError, OffloadError
from tests.helpers.fake_streams import FakeStreams

DEVICE = torch.device("cuda", 0)


def test_over_the_cap() -> None:
    """Refused at once, with nothing changed; there is room again when a content goes."""
    streams = FakeStreams()
    place = HostPlace(DEVICE, budget=8192, streams=streams)
    contents = [place.take(streams.alloc(4096)) for _ in range(2)]
    with pytest.raises(OffloadError, match="no room for 4,096 bytes in pinned host memory: 8,192 of 8,192 bytes"):
        place.take(streams.alloc(4096))
    assert (place.traffic.refused, place.traffic.bytes_out, place.used_bytes) == (1, 8192, 8192)
    contents.pop().release()
    assert place.used_bytes == 4096
    place.take(streams.alloc(100)).release()
    assert (place.traffic.refused, place.peak_bytes) == (1, 8192)


def test_a_driver_that_cannot_pin() -> None:
    streams = FakeStreams(pinned_limit=1 << 20)
    place = HostPlace(DEVICE, budget=1 << 30, streams=streams)
    kept = place.take(streams.alloc(1 << 20))
    with pytest.raises(OffloadError, match="the driver cannot pin 2,097,152 bytes of host memory: CUDA error"):
        place.take(streams.alloc(2 << 20))
    assert place.traffic.refused == 1
    kept.release()
    with pytest.raises(OffloadError):
        place.take(streams.alloc(2 << 20))
    place.take(streams.alloc(1 << 20)).release()


def test_a_copy_that_fails_loses_no_buffer() -> None:
    class Failing(FakeStreams):
        def copy(self, *args: object) -> None:
            raise RuntimeError("CUDA error: unspecified launch failure")

    streams = Failing()
    place = HostPlace(DEVICE, budget=8192, streams=streams)
    with pytest.raises(RuntimeError, match="unspecified launch failure"):
        place.take(streams.alloc(4096))
    assert (place.used_bytes, place.traffic.bytes_out) == (0, 0)


def test_closing() -> None:
    """Transfers end, memory is given back, and contents that are still held say so."""
    streams = FakeStreams()
    place = HostPlace(DEVICE, budget=1 << 20, streams=streams)
    source = streams.alloc(4096)
    content = place.take(source)
    place.close()
    place.close()
    assert content.is_out()
    assert (place.used_bytes, place.pool.held_bytes, streams.trims) == (0, 0, 1)
    for ask in (content.finish_out, lambda: content.begin_back(source), content.finish_back):
        with pytest.raises(OffloadError, match="after the place was closed"):
            ask()
    with pytest.raises(OffloadError, match="closed"):
        place.take(source)
    content.release()
    assert place.used_bytes == 0
    assert streams.hazards == []


def test_a_content_that_is_released() -> None:
    streams = FakeStreams()
    place = HostPlace(DEVICE, budget=1 << 20, streams=streams)
    source = streams.alloc(4096)
    content = place.take(source)
    content.release()
    content.release()
    assert place.used_bytes == 0
    for ask in (content.finish_out, lambda: content.begin_back(source), content.finish_back):
        with pytest.raises(OffloadError, match="after it was released"):
            ask()


def test_an_owner_that_forgets() -> None:
    streams = FakeStreams()
    place = HostPlace(DEVICE, budget=1 << 20, streams=streams)
    content = place.take(streams.alloc(4096))
    assert place.used_bytes == 4096
    del content
    assert place.used_bytes == 0


def test_release_in_the_middle_of_the_place_itself() -> None:
    """A destructor may run anywhere: it does not wait for a lock that its own thread holds, and loses no buffer."""

    class Interrupting(FakeStreams):
        victims: list[object] = []  # noqa: RUF012 - one test

        def copy(self, stream: object, into: Tensor, source: Tensor) -> None:
            self.victims.clear()  # the lock is held here
            super().copy(stream, into, source)  # type: ignore[arg-type]  # what the fake itself made

    streams = Interrupting()
    place = HostPlace(DEVICE, budget=1 << 20, streams=streams)
    streams.victims.append(place.take(streams.alloc(4096)))
    kept = place.take(streams.alloc(4096))
    assert streams.victims == []
    assert place.used_bytes == 4096
    kept.release()
    assert place.used_bytes == 0


def test_release_from_many_threads() -> None:
    """Each buffer comes back once."""
    streams = FakeStreams()
    place = HostPlace(DEVICE, budget=1 << 20, streams=streams)
    sources = [streams.alloc(4096) for _ in range(50)]
    contents = [place.take(source) for source in sources]
    together = threading.Barrier(4)

    def let_go() -> None:
        together.wait()
        for content in contents:
            content.release()

    threads = [threading.Thread(target=let_go) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert place.used_bytes == 0
    assert sum(len(free) for free in place.pool._free.values()) == place.pool.held_bytes // 4096


def test_a_device_that_is_the_host() -> None:
    with pytest.raises(ConfigurationError, match='host memory is the memory that it would leave; use offload="disk"'):
        HostPlace(torch.device("cpu"))


@pytest.mark.parametrize(
    ("device", "words"),
    [("cuda", None), ("xpu:1", None), ("cpu", "the model is on the CPU"), ("mps", "mps"), ("meta", "not been tried")],
)
def test_refusal(device: str, words: str | None) -> None:
    refusal = host_refusal(torch.device(device))
    assert (refusal is None) if words is None else (refusal and words in refusal and 'offload="disk"' in refusal)


def test_the_cap_that_nobody_gave(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = tmp_path / "meminfo"
    told.write_text("MemTotal:       32 kB\nMemAvailable:   16 kB\n")
    assert available_bytes(str(told)) == 16384
    told.write_text("MemTotal:       32 kB\n")
    assert available_bytes(str(told)) == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    monkeypatch.delattr(os, "sysconf")
    assert available_bytes(str(told)) == 4 << 30
    monkeypatch.setattr(host, "available_bytes", lambda: 16384)
    assert HostPlace(DEVICE, streams=FakeStreams()).pool.budget == 8192
