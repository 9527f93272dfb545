"""Contents that go to a disk and come back: the same bytes, room given back, nothing held for longer than needed."""

import gc
import os
import stat
import threading
import weakref

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lightning_remat.engine.offload import disk
from lightning_remat.engine.offload.disk import DiskPlace
from lightning_remat.engine.offload.extents import BLOCK, rounded
from lightning_remat.errors import OffloadError
from tests.helpers.disk import Held, fetched, scratch, some_bytes, threads, wait_for_threads

CHUNK = 4 * BLOCK


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch):
    monkeypatch.setattr(disk, "CHUNK", CHUNK)


@pytest.fixture
def place(tmp_path):
    place = DiskPlace(tmp_path)
    yield place
    place.close()
    assert place.used_bytes == 0
    wait_for_threads()


@pytest.fixture(params=["direct", "through the page cache"])
def _both_ways(request, monkeypatch):
    if request.param != "direct":
        monkeypatch.delattr(os, "O_DIRECT")


SIZES = [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, CHUNK - 1, CHUNK, CHUNK + 1, 5 * CHUNK + 17]


@pytest.mark.usefixtures("_both_ways")
@pytest.mark.parametrize("checksum", [True, False])
@pytest.mark.parametrize("size", SIZES)
def test_the_same_bytes_come_back(tmp_path, size, checksum):
    place = DiskPlace(tmp_path, checksum=checksum)
    source = some_bytes(size)
    content = place.take(source)
    content.finish_out()
    assert content.is_out()
    assert torch.equal(fetched(content), source)
    assert torch.equal(fetched(content), source)  # any number of times
    assert place.used_bytes == place.peak_bytes == rounded(size)
    assert (place.traffic.bytes_out, place.traffic.bytes_in) == (size, 2 * size)
    content.release()
    assert place.used_bytes == 0
    place.close()


def test_what_was_meant_to_be_direct_is(place):
    """On a file system with neither, the fallback is all that the other tests see; then this says so."""
    place.take(some_bytes(1)).finish_out()
    with open(f"/proc/self/fdinfo/{scratch(place).fileno()}") as file:
        flags = next(int(line.split()[1], 8) for line in file if line.startswith("flags:"))
    assert bool(flags & os.O_DIRECT) == scratch(place).direct


def test_many_contents_at_once(place):
    sources = [some_bytes(size * 977, seed=size) for size in range(60)]
    contents = [place.take(source) for source in sources]
    for content in contents:
        content.finish_out()
    into = [torch.zeros_like(source) for source in sources]
    for content, target in zip(contents, into, strict=True):
        content.begin_back(target)
    for content, source, target in zip(contents, sources, into, strict=True):
        content.finish_back()
        assert torch.equal(source, target)
    assert place.used_bytes == sum(rounded(source.nbytes) for source in sources)


def test_the_source_may_change_once_it_is_out(place):
    source = some_bytes(3 * CHUNK)
    expected = source.clone()
    content = place.take(source)
    content.finish_out()
    source.zero_()
    assert torch.equal(fetched(content), expected)


def test_a_scattered_content(tmp_path):
    place = DiskPlace(tmp_path, budget=6 * BLOCK)
    pieces = [place.take(some_bytes(BLOCK, seed)) for seed in range(6)]
    for piece in pieces:
        piece.finish_out()
    for piece in pieces[::2]:
        piece.release()
    source = some_bytes(3 * BLOCK - 5, seed=9)
    content = place.take(source)
    content.finish_out()
    assert torch.equal(fetched(content), source)
    assert torch.equal(fetched(pieces[1]), some_bytes(BLOCK, 1))
    assert torch.equal(fetched(pieces[5]), some_bytes(BLOCK, 5))
    place.close()


# ---- room ----


def test_over_the_budget_it_is_refused_at_once(tmp_path):
    place = DiskPlace(tmp_path, budget=3 * BLOCK)
    first = place.take(some_bytes(2 * BLOCK))
    with pytest.raises(
        OffloadError, match=r"4\.0 KiB cannot go to the disk in '.*': 8\.0 KiB of disk_budget=12\.0 KiB"
    ):
        place.take(some_bytes(BLOCK + 1))
    assert (place.traffic.refused, place.traffic.failures, place.used_bytes) == (1, 0, 2 * BLOCK)
    first.finish_out()
    first.release()
    second = place.take(some_bytes(3 * BLOCK))
    second.finish_out()
    assert place.peak_bytes == 3 * BLOCK
    place.close()


def test_some_of_the_disk_is_left_to_others(monkeypatch, place):
    first = place.take(some_bytes(1))
    first.finish_out()
    room = os.fstatvfs(scratch(place).fileno())
    blocks = (1 << 20) // room.f_frsize
    # A disk of 1 MiB, of which 128 KiB are free: 5% of the first stay so.
    fields = list(room)
    fields[2], fields[3], fields[4] = blocks, blocks // 8, blocks // 8
    monkeypatch.setattr(os, "fstatvfs", lambda fd: os.statvfs_result(fields))
    with pytest.raises(OffloadError, match="the disk is full, but for what is left to others"):
        place.take(some_bytes((1 << 20) // 8 - BLOCK))
    assert place.traffic.refused == 1
    place.take(some_bytes(16 * BLOCK)).finish_out()


def test_the_file_is_no_larger_than_the_peak(place):
    for _ in range(5):
        contents = [place.take(some_bytes(CHUNK, seed)) for seed in range(4)]
        for content in contents:
            content.finish_out()
        allocated = scratch(place).allocated()
        for content in contents:
            content.release()
    assert place.peak_bytes == 4 * CHUNK
    # Blocks of the disk that the file system itself uses for the file count, too.
    assert 4 * CHUNK <= allocated <= 4 * CHUNK + 8 * BLOCK
    assert scratch(place).allocated() <= 4 * CHUNK + 8 * BLOCK


def test_nobody_else_can_open_the_file(tmp_path, place):
    place.take(some_bytes(CHUNK)).finish_out()
    status = os.fstat(scratch(place).fileno())
    assert stat.S_IMODE(status.st_mode) == 0o600
    assert status.st_nlink == 0
    assert list(tmp_path.iterdir()) == []
    assert not os.get_inheritable(scratch(place).fileno())


def test_nothing_is_made_before_the_first_content(tmp_path):
    before = os.listdir("/proc/self/fd")
    place = DiskPlace(tmp_path / "not-there")
    assert len(os.listdir("/proc/self/fd")) == len(before)
    assert threads() == []
    with pytest.raises(OffloadError, match="No such file or directory") as caught:
        place.take(some_bytes(1))
    assert isinstance(caught.value.__cause__, FileNotFoundError)
    assert place.traffic.refused == 1
    place.close()


def test_no_directory_named(monkeypatch, tmp_path):
    monkeypatch.setattr(disk, "default_directory", lambda: tmp_path)
    place = DiskPlace()
    place.take(some_bytes(1)).finish_out()
    assert place.directory == tmp_path
    place.close()


# ---- release ----


def test_release_during_a_write(monkeypatch, tmp_path):
    place = DiskPlace(tmp_path)
    place.take(some_bytes(1)).release()  # opens the file before calls are held
    held = Held(monkeypatch, "pwritev")
    source = some_bytes(CHUNK)
    content = place.take(source)
    alive = weakref.ref(source)
    held.wait_for_calls(1)
    del source
    content.release()
    content.release()
    assert place.used_bytes == CHUNK, "a thread still writes there"
    assert not content.is_out()
    transfer = content._out
    held.open.set()
    assert transfer.done.wait(60)
    assert place.used_bytes == 0
    assert alive() is None
    with pytest.raises(OffloadError, match="they were released"):
        content.finish_out()
    assert place.traffic.failures == 0
    place.close()


def test_release_of_what_waits_lets_go_of_the_source_at_once(monkeypatch, tmp_path):
    place = DiskPlace(tmp_path, workers=1)
    place.take(some_bytes(1)).finish_out()
    held = Held(monkeypatch, "pwritev")
    running = place.take(some_bytes(BLOCK))
    held.wait_for_calls(1)
    source = some_bytes(10 * CHUNK)
    alive = weakref.ref(source)
    waiting = place.take(source)
    del source
    used = place.used_bytes
    waiting.release()
    assert alive() is None
    assert place.used_bytes == used - 10 * CHUNK
    held.open.set()
    running.finish_out()
    place.close()
    assert len(held.offsets) == 1


def test_release_during_a_read(monkeypatch, place):
    content = place.take(some_bytes(CHUNK))
    content.finish_out()
    held = Held(monkeypatch, "preadv")
    into = torch.zeros(CHUNK, dtype=torch.uint8)
    alive = weakref.ref(into)
    content.begin_back(into)
    held.wait_for_calls(1)
    content.release()
    del into
    assert place.used_bytes == CHUNK
    assert alive() is not None
    transfer = content._back
    held.open.set()
    assert transfer.done.wait(60)
    assert place.used_bytes == 0
    assert alive() is None
    with pytest.raises(OffloadError, match="they were released"):
        content.finish_back()


def test_what_nobody_holds_is_released(place):
    content = place.take(some_bytes(CHUNK))
    content.finish_out()
    assert place.used_bytes == CHUNK
    del content
    assert place.used_bytes == 0


def test_release_by_the_garbage_collector_in_the_middle_of_anything(place):
    """It may come while the same thread has the lock, and must neither wait for it nor be forgotten."""
    content = place.take(some_bytes(CHUNK))
    content.finish_out()
    with place._depot.locked():
        content.release()
        assert place.used_bytes == CHUNK
    assert place.used_bytes == 0


def test_release_from_many_threads(place):
    contents = [place.take(some_bytes(CHUNK, seed)) for seed in range(40)]
    start = threading.Barrier(5)

    def release(part):
        start.wait()
        for content in part:
            content.release()

    others = [threading.Thread(target=release, args=(contents[index::5],)) for index in range(5)]
    for thread in others:
        thread.start()
    for thread in others:
        thread.join()
    place.close()
    assert place.used_bytes == 0


def test_nothing_leaks(place):
    place.take(some_bytes(1)).finish_out()
    gc.collect()
    open_files, running = len(os.listdir("/proc/self/fd")), threading.active_count()
    source, into = some_bytes(BLOCK + 1), torch.zeros(BLOCK + 1, dtype=torch.uint8)
    for index in range(3000):
        content = place.take(source)
        if index % 3:
            content.finish_out()
        if index % 3 == 2:
            content.begin_back(into)
            content.finish_back()
        content.release()
    content = place.take(source)
    content.finish_out()
    assert len(os.listdir("/proc/self/fd")) == open_files
    assert threading.active_count() == running
    content.release()
    assert (place._depot._extents.used, place._depot._moving) == (0, set())
    assert all(chunks.qsize() == 2 for chunks in place._depot._chunks.values())
    assert place.traffic.failures == place.traffic.refused == 0


# ---- order ----


def test_writes_in_the_order_given_and_reads_before_them(monkeypatch, tmp_path):
    place = DiskPlace(tmp_path, workers=1)
    there = place.take(some_bytes(BLOCK))
    there.finish_out()
    writes, reads = Held(monkeypatch, "pwritev"), Held(monkeypatch, "preadv")
    contents = [place.take(some_bytes(CHUNK, seed)) for seed in range(3)]
    writes.wait_for_calls(1)
    into = torch.zeros(BLOCK, dtype=torch.uint8)
    there.begin_back(into)
    writes.open.set()
    reads.wait_for_calls(1)
    assert writes.offsets == [BLOCK], "one was running; those that wait come after the read"
    reads.open.set()
    there.finish_back()
    for content in contents:
        content.finish_out()
    assert writes.offsets == [BLOCK, BLOCK + CHUNK, BLOCK + 2 * CHUNK]
    place.close()


def test_times_at_once_count_once(monkeypatch, place):
    now = [0.0]
    place.take(some_bytes(1)).finish_out()
    before = place.traffic.seconds_out
    held = Held(monkeypatch, "pwritev")
    monkeypatch.setattr("lightning_remat.engine.offload.depot.monotonic", lambda: now[0])
    content = place.take(some_bytes(2 * CHUNK))
    held.wait_for_calls(2)
    now[0] = 8.0
    held.open.set()
    assert content._out.done.wait(60)
    assert place.traffic.seconds_out - before == pytest.approx(8.0)


# ---- the end ----


def test_close_while_transfers_run(monkeypatch, tmp_path):
    place = DiskPlace(tmp_path, workers=1)
    there = place.take(some_bytes(BLOCK))
    there.finish_out()
    held = Held(monkeypatch, "pwritev")
    running = place.take(some_bytes(CHUNK, 1))
    held.wait_for_calls(1)
    source = some_bytes(CHUNK, 2)
    alive = weakref.ref(source)
    waiting = place.take(source)
    del source
    file = scratch(place)
    closing = threading.Thread(target=place.close)
    closing.start()
    assert waiting._out.done.wait(60)
    assert alive() is None
    assert closing.is_alive(), "it waits for what runs"
    held.open.set()
    closing.join(60)
    assert not closing.is_alive()
    place.close()
    for content in (running, waiting, there):
        with pytest.raises(OffloadError, match="the place was closed"):
            content.finish_out()
        content.release()
    with pytest.raises(OffloadError, match="the place is closed"):
        place.take(some_bytes(1))
    assert (place.used_bytes, place.traffic.failures, threads()) == (0, 0, [])
    with pytest.raises(ValueError, match="closed"):
        file.fileno()


def test_reading_after_close(place):
    content = place.take(some_bytes(CHUNK))
    content.finish_out()
    content.begin_back(torch.zeros(CHUNK, dtype=torch.uint8))
    place.close()
    with pytest.raises(OffloadError, match="the place was closed"):
        content.finish_back()
    content.begin_back(torch.zeros(CHUNK, dtype=torch.uint8))
    with pytest.raises(OffloadError, match="the place was closed"):
        content.finish_back()


def test_a_place_that_is_let_go_of_ends_by_itself(tmp_path):
    place = DiskPlace(tmp_path)
    content = place.take(some_bytes(CHUNK))
    content.finish_out()
    file, alive = scratch(place), weakref.ref(place)
    del place
    assert torch.equal(fetched(content), some_bytes(CHUNK)), "what is held is there"
    del content
    wait_for_threads()
    assert alive() is None
    with pytest.raises(ValueError, match="closed"):
        file.fileno()


def test_a_place_that_is_let_go_of_in_the_middle_of_a_write(monkeypatch, tmp_path):
    place = DiskPlace(tmp_path)
    place.take(some_bytes(1)).finish_out()
    held = Held(monkeypatch, "pwritev")
    content, alive = place.take(some_bytes(CHUNK)), weakref.ref(place)
    held.wait_for_calls(1)
    content.release()
    del content, place
    held.open.set()
    wait_for_threads()
    assert alive() is None


# ---- misuse ----


def test_the_order_of_calls(place):
    content = place.take(some_bytes(8))
    into = torch.zeros(8, dtype=torch.uint8)
    with pytest.raises(RuntimeError, match="comes after finish_out"):
        content.begin_back(into)
    content.finish_out()
    with pytest.raises(RuntimeError, match="comes after begin_back"):
        content.finish_back()
    with pytest.raises(ValueError, match="into has 7 bytes"):
        content.begin_back(into[1:])
    content.begin_back(into)
    with pytest.raises(RuntimeError, match="not twice"):
        content.begin_back(into)
    content.finish_back()


# ---- anything ----


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    actions=st.lists(
        st.tuples(st.sampled_from("tobfr"), st.integers(0, 3 * CHUNK), st.integers(0, 1 << 16)), max_size=40
    ),
    budget=st.none() | st.integers(0, 6 * CHUNK),
)
def test_any_order_of_calls(tmp_path, actions, budget):
    place = DiskPlace(tmp_path, budget=budget)
    held = []  # content, source, whether it is known to be out, into
    loose = False  # something was released in the middle of a transfer, so its room may not have been given back yet
    for index, (action, size, which) in enumerate(actions):
        if action == "t":
            source = some_bytes(size, seed=index)
            taken = sum(rounded(source.nbytes) for _, source, _, _ in held)
            fits = size == 0 or budget is None or taken + rounded(size) <= budget
            try:
                held.append([place.take(source), source, False, None])
            except OffloadError:
                assert not fits or loose
        elif held:
            entry = held[which % len(held)]
            content, source, out, into = entry
            if action == "o":
                content.finish_out()
                assert content.is_out()
                entry[2] = True
            elif action == "b" and out and into is None:
                entry[3] = torch.zeros_like(source)
                content.begin_back(entry[3])
            elif action == "f" and into is not None:
                content.finish_back()
                assert torch.equal(into, source)
                entry[3] = None
            elif action == "r":
                held.remove(entry)
                loose |= not out or into is not None
                content.release()
    for content, source, _, into in held:
        content.finish_out()
        if into is not None:
            content.finish_back()
            assert torch.equal(into, source)
        assert torch.equal(fetched(content), source)
    place.close()
    assert place.traffic.failures == place.used_bytes == 0
