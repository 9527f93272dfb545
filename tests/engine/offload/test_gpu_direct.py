"""The ways of an accelerator's bytes, with stand-ins: not that a GPU does what it is asked, only what it is asked."""

import os
import sys
import types
from typing import ClassVar

import pytest
import torch

from lightning_remat.engine.offload import buffers, depot, disk, gpu_direct
from lightning_remat.engine.offload.buffers import DeviceChunk, memory_of
from lightning_remat.engine.offload.disk import DiskPlace
from lightning_remat.engine.offload.extents import BLOCK
from lightning_remat.errors import OffloadError
from tests.helpers.disk import fetched, some_bytes

CHUNK = 4 * BLOCK


class Future:
    def __init__(self, count):
        self.count = count

    def get(self):
        return self.count


class CuFile:
    """``kvikio.CuFile``, on tensors in host memory."""

    opened: ClassVar[list] = []
    short = False

    def __init__(self, path, flags):
        assert flags == "r+"
        self.fd = os.open(path, os.O_RDWR)
        self.calls = []
        self.opened.append(self)

    def pwrite(self, tensor, size, file_offset):
        self.calls.append(("write", file_offset, size))
        return Future(os.pwrite(self.fd, memory_of(tensor.data_ptr(), size), file_offset) - self.short)

    def pread(self, tensor, size, file_offset):
        self.calls.append(("read", file_offset, size))
        return Future(os.preadv(self.fd, [memory_of(tensor.data_ptr(), size)], file_offset) - self.short)

    def close(self):
        os.close(self.fd)
        self.fd = None


class Event:
    waited = 0

    def synchronize(self):
        Event.waited += 1


@pytest.fixture
def kvikio(monkeypatch):
    """It is installed, and every tensor is one on CUDA."""
    CuFile.opened, CuFile.short, Event.waited = [], False, 0
    monkeypatch.setitem(sys.modules, "kvikio", types.SimpleNamespace(CuFile=CuFile, __spec__=None))
    monkeypatch.setattr(disk, "CHUNK", CHUNK)
    monkeypatch.setattr(gpu_direct, "wanted", lambda tensor, checksum: not checksum and gpu_direct.available())
    monkeypatch.setattr("lightning_remat.engine.offload.transfer.moment", lambda tensor: Event())


@pytest.mark.usefixtures("kvikio")
def test_bytes_go_straight_to_the_file_and_back(tmp_path):
    place = DiskPlace(tmp_path, checksum=False)
    source = some_bytes(2 * CHUNK + 5)
    content = place.take(source)
    content.finish_out()
    assert torch.equal(fetched(content), source)
    (file,) = CuFile.opened
    steps = [(0, CHUNK), (CHUNK, CHUNK), (2 * CHUNK, 5)]
    assert sorted(file.calls) == [(what, *step) for what in ("read", "write") for step in steps]
    assert Event.waited == 6
    assert place._depot._chunks == {}, "no host memory is used"
    place.close()
    assert file.fd is None


@pytest.mark.usefixtures("kvikio")
def test_with_checksums_bytes_go_through_the_host(tmp_path):
    place = DiskPlace(tmp_path)
    content = place.take(some_bytes(CHUNK))
    content.finish_out()
    assert torch.equal(fetched(content), some_bytes(CHUNK))
    assert CuFile.opened == []
    place.close()


@pytest.mark.usefixtures("kvikio")
def test_fewer_bytes_than_asked_for(tmp_path):
    place = DiskPlace(tmp_path, checksum=False)
    CuFile.short = True
    with pytest.raises(OffloadError, match="16383 of 16384 bytes were written"):
        place.take(some_bytes(CHUNK)).finish_out()
    place.close()


def test_when_it_is_used(monkeypatch):
    class OnCuda:
        device = torch.device("cuda", 0)

    monkeypatch.setitem(sys.modules, "kvikio", types.SimpleNamespace(__spec__=None))
    assert gpu_direct.wanted(OnCuda(), checksum=False)
    assert not gpu_direct.wanted(OnCuda(), checksum=True)
    assert not gpu_direct.wanted(torch.zeros(1), checksum=False)
    monkeypatch.setitem(sys.modules, "kvikio", None)
    assert not gpu_direct.wanted(OnCuda(), checksum=False)


# ---- through pinned memory ----


class Streams:
    """A device module that notes what is asked of it."""

    def __init__(self):
        self.notes = []
        notes = self.notes

        class Stream:
            def __init__(self, device):
                self.device = device

            def wait_event(self, event):
                notes.append(("wait", event))

        class Event:
            def record(self, stream):
                notes.append(("record", stream))

            def synchronize(self):
                notes.append(("synchronize", None))

        self.Stream, self.Event = Stream, Event

    def stream(self, stream):
        self.notes.append(("enter", stream))
        return torch.no_grad()

    def current_stream(self, device):
        return "current"


@pytest.fixture
def streams(monkeypatch):
    streams = Streams()
    monkeypatch.setattr(torch, "get_device_module", lambda device: streams)
    return streams


def test_copies_wait_for_the_step_and_are_waited_for(streams):
    chunk = DeviceChunk(CHUNK, torch.device("cpu"))
    assert chunk._tensor.data_ptr() % BLOCK == 0
    assert len(chunk.view) == CHUNK
    source, into = some_bytes(CHUNK + 9), torch.zeros(CHUNK + 9, dtype=torch.uint8)
    chunk.fill(source, 9, CHUNK, "ready")
    assert bytes(chunk.view) == bytes(source[9:].tolist())
    own = chunk._stream
    assert streams.notes == [("enter", own), ("wait", "ready"), ("record", own), ("synchronize", None)]
    chunk.spill(into, 3, 100, "ready")
    assert torch.equal(into[3:103], source[9:109])
    assert into.count_nonzero() == source[9:109].count_nonzero()
    assert streams.notes[4:] == streams.notes[:4]


@pytest.mark.usefixtures("streams")
def test_a_place_with_such_chunks(monkeypatch, tmp_path):
    monkeypatch.setattr(disk, "CHUNK", CHUNK)
    monkeypatch.setattr(depot, "HostChunk", lambda nbytes: DeviceChunk(nbytes, torch.device("cpu")))
    monkeypatch.setattr(buffers, "on_device", lambda tensor: True)
    place = DiskPlace(tmp_path)
    for size in (1, CHUNK, 3 * CHUNK + 7):
        content = place.take(some_bytes(size))
        content.finish_out()
        assert torch.equal(fetched(content), some_bytes(size))
    place.close()


def test_the_moment_of_a_handover(monkeypatch, streams):
    assert buffers.moment(torch.zeros(1)) is None
    monkeypatch.setattr(buffers, "on_device", lambda tensor: True)
    assert isinstance(buffers.moment(torch.zeros(1)), streams.Event)
    assert streams.notes == [("record", "current")]


def test_no_memory_for_chunks(monkeypatch, tmp_path):
    def refused(nbytes):
        raise RuntimeError("no more pinned memory")

    monkeypatch.setattr(depot, "HostChunk", refused)
    place = DiskPlace(tmp_path)
    with pytest.raises(OffloadError, match=r"no host memory for chunks \(no more pinned memory\)"):
        place.take(some_bytes(1))
    assert place.traffic.refused == 1
    place.close()
