"""Disks that are full, broken, silent or gone: an error that says so and how to go on, and the rest goes on working."""

import errno
import os
import random
import shutil
import weakref

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lightning_remat.engine.offload import disk
from lightning_remat.engine.offload.disk import DamagedError, DiskPlace
from lightning_remat.engine.offload.extents import BLOCK
from lightning_remat.errors import OffloadError
from tests.helpers.disk import BROKEN, FULL, Held, broken, fetched, scratch, small_disk, some_bytes, wait_for_threads

CHUNK = 4 * BLOCK


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch):
    monkeypatch.setattr(disk, "CHUNK", CHUNK)


@pytest.fixture
def place(tmp_path):
    place = DiskPlace(tmp_path)
    place.take(some_bytes(1)).finish_out()  # so that the file is there, and calls can be broken
    yield place
    place.close()
    wait_for_threads()


# ---- writing ----


@pytest.mark.parametrize("number", [FULL, BROKEN, errno.EDQUOT, errno.EFBIG])
def test_a_write_that_fails(monkeypatch, place, number):
    source = some_bytes(5 * CHUNK)
    with monkeypatch.context() as patch:
        broken(patch, "pwritev", lambda call: number if call == 3 else 0)
        content = place.take(source)
        for _ in range(2):  # asked again, it says so again
            with pytest.raises(OffloadError, match=r"80\.0 KiB could not be written to the disk in '.*'") as caught:
                content.finish_out()
    assert os.strerror(number) in str(caught.value)
    assert "Name another directory" in str(caught.value)
    assert "offload='cpu'" in str(caught.value)
    assert isinstance(caught.value.__cause__, OSError)
    assert not content.is_out()
    assert torch.equal(source, some_bytes(5 * CHUNK)), "the source is as it was"
    assert (place.used_bytes, place.traffic.failures, place.traffic.bytes_out) == (0, 1, 1)
    again = place.take(source)
    again.finish_out()
    assert torch.equal(fetched(again), source)


def test_the_source_is_let_go_of_after_a_failure(monkeypatch, place):
    source = some_bytes(5 * CHUNK)
    alive = weakref.ref(source)
    broken(monkeypatch, "pwritev", lambda call: BROKEN)
    content = place.take(source)
    del source
    with pytest.raises(OffloadError):
        content.finish_out()
    assert alive() is None


def test_is_out_does_not_raise(monkeypatch, place):
    broken(monkeypatch, "pwritev", lambda call: BROKEN)
    content = place.take(some_bytes(1))
    assert content._out.done.wait(60)
    assert not content.is_out()


def test_a_write_that_stops_short(monkeypatch, place):
    """The rest is written as well; with direct I/O, from a block on."""
    real = os.pwritev

    def short(fd, buffers, offset):
        return real(fd, [buffers[0][: max(BLOCK, len(buffers[0]) // 2 // BLOCK * BLOCK)]], offset)

    monkeypatch.setattr(os, "pwritev", short)
    content = place.take(some_bytes(3 * CHUNK))
    content.finish_out()
    assert torch.equal(fetched(content), some_bytes(3 * CHUNK))


def test_a_write_that_stops_within_a_block(monkeypatch, place):
    real, first = os.pwritev, []

    def short(fd, buffers, offset):
        done = real(fd, buffers, offset)
        if len(buffers[0]) > BLOCK and not first:
            first.append(offset)
            return BLOCK + 100
        return done

    monkeypatch.setattr(os, "pwritev", short)
    content = place.take(some_bytes(CHUNK))
    content.finish_out()
    assert first
    assert torch.equal(fetched(content), some_bytes(CHUNK))


@pytest.mark.parametrize("name", ["pwritev", "preadv"])
def test_no_byte_moves(monkeypatch, place, name):
    content = place.take(some_bytes(CHUNK))
    content.finish_out()
    monkeypatch.setattr(os, name, lambda fd, buffers, offset: 0)
    if name == "pwritev":
        another = place.take(some_bytes(CHUNK))
        with pytest.raises(OffloadError, match="could not be written to any further"):
            another.finish_out()
    else:
        with pytest.raises(OffloadError, match="the file ends before what was written to it"):
            fetched(content)


# ---- a disk that is really full ----


@pytest.fixture(name="small_disk")
def _small_disk(monkeypatch, tmp_path):
    with small_disk(monkeypatch, tmp_path, 2 << 20):
        yield tmp_path


def test_what_does_not_fit_is_refused(small_disk):
    place = DiskPlace(small_disk)
    contents = [place.take(some_bytes(1 << 16, seed)) for seed in range(25)]
    with pytest.raises(OffloadError, match="the disk is full, but for what is left to others"):
        place.take(some_bytes(6 << 16))  # 31 of 32 would leave less than 5%
    for seed, content in enumerate(contents):
        content.finish_out()
        assert torch.equal(fetched(content), some_bytes(1 << 16, seed))
    assert (place.traffic.refused, place.traffic.failures) == (1, 0)
    contents.pop().release()
    place.take(some_bytes(1 << 16)).finish_out()
    place.close()


def test_others_fill_the_disk(monkeypatch, small_disk):
    place = DiskPlace(small_disk)
    place.take(some_bytes(1)).finish_out()
    with monkeypatch.context() as patch:
        held = Held(patch, "pwritev")
        source = some_bytes(1 << 20)
        content = place.take(source)
        held.wait_for_calls(1)
        (small_disk / "others").write_bytes(bytes(1800 << 10))
        held.open.set()
        with pytest.raises(OffloadError, match="No space left on device"):
            content.finish_out()
    assert place.used_bytes == 0
    with pytest.raises(OffloadError, match="the disk is full"):
        place.take(source)
    (small_disk / "others").unlink()
    again = place.take(source)
    again.finish_out()
    assert torch.equal(fetched(again), source)
    place.close()


# ---- reading ----


def test_a_read_that_fails(monkeypatch, place):
    content = place.take(some_bytes(3 * CHUNK))
    content.finish_out()
    with monkeypatch.context() as patch:
        broken(patch, "preadv", lambda call: BROKEN if call == 2 else 0)
        with pytest.raises(
            OffloadError, match=r"48\.0 KiB could not be read from the disk in .*Input/output"
        ) as caught:
            fetched(content)
    assert caught.value.__cause__.errno == errno.EIO
    assert place.traffic.failures == 1
    assert torch.equal(fetched(content), some_bytes(3 * CHUNK)), "the next attempt may succeed"


@pytest.mark.parametrize("at", [0, CHUNK + 5, 3 * CHUNK - 1])
def test_damaged_bytes_are_noticed(place, at):
    content = place.take(some_bytes(3 * CHUNK))
    content.finish_out()
    damage(place, content, at)
    with pytest.raises(OffloadError, match="what was read is not what was written") as caught:
        fetched(content)
    assert isinstance(caught.value.__cause__, DamagedError)
    assert place.traffic.failures == 1


def test_without_checksums_damaged_bytes_go_unnoticed(tmp_path):
    place = DiskPlace(tmp_path, checksum=False)
    content = place.take(some_bytes(CHUNK))
    content.finish_out()
    damage(place, content, 7)
    back = fetched(content)
    assert back[7] != some_bytes(CHUNK)[7]
    place.close()


def damage(place, content, at):
    """Change one byte of the file, by whole blocks of aligned memory, since it may be open for direct I/O."""
    offset = content._room.extents[0][0] + at
    with open(f"/proc/self/fd/{scratch(place).fileno()}", "r+b", buffering=0) as file:
        byte = os.pread(file.fileno(), 1, offset)[0]
        os.pwrite(file.fileno(), bytes([byte ^ 1]), offset)
        os.fsync(file.fileno())


def test_a_file_that_was_cut_short(place):
    content = place.take(some_bytes(3 * CHUNK))
    content.finish_out()
    os.ftruncate(scratch(place).fileno(), CHUNK)
    with pytest.raises(OffloadError, match="the file ends before what was written to it"):
        fetched(content)


# ---- directories ----


@pytest.mark.parametrize("what", ["removed", "closed to everybody"])
def test_what_becomes_of_the_directory_does_not_matter(tmp_path, what):
    directory = tmp_path / "scratch"
    directory.mkdir()
    place = DiskPlace(directory)
    first = place.take(some_bytes(CHUNK, 1))
    first.finish_out()
    if what == "removed":
        shutil.rmtree(directory)
    else:
        directory.chmod(0)
    second = place.take(some_bytes(CHUNK, 2))
    second.finish_out()
    assert torch.equal(fetched(first), some_bytes(CHUNK, 1))
    assert torch.equal(fetched(second), some_bytes(CHUNK, 2))
    place.close()
    if directory.exists():
        directory.chmod(0o700)


# ---- silence ----


def silent(tmp_path, monkeypatch, name):
    """A place whose disk has answered once, and does not any more."""
    place = DiskPlace(tmp_path, patience=0.2)
    content = place.take(some_bytes(2 * CHUNK))
    content.finish_out()
    return place, content, Held(monkeypatch, name)


def test_a_read_that_does_not_end(monkeypatch, tmp_path):
    place, content, held = silent(tmp_path, monkeypatch, "preadv")
    into = torch.zeros(2 * CHUNK, dtype=torch.uint8)
    alive = weakref.ref(into)
    content.begin_back(into)
    back = content._back
    with pytest.raises(OffloadError, match=r"the disk has not answered for 0\.2 s") as caught:
        content.finish_back()
    assert isinstance(caught.value.__cause__, TimeoutError)
    assert place.traffic.failures == 1
    content.release()
    del into
    assert alive() is not None, "a thread may still write there"
    assert place.used_bytes == 2 * CHUNK
    with pytest.raises(OffloadError, match="the disk has not answered"):
        place.take(some_bytes(1))
    held.open.set()
    assert back.done.wait(60)
    assert alive() is None
    assert place.used_bytes == 0
    place.take(some_bytes(1)).finish_out()  # it answers again
    place.close()


def test_bytes_that_come_too_late_go_nowhere(monkeypatch, tmp_path):
    place, content, held = silent(tmp_path, monkeypatch, "preadv")
    into = torch.zeros(2 * CHUNK, dtype=torch.uint8)
    content.begin_back(into)
    back = content._back
    with pytest.raises(OffloadError, match="has not answered"):
        content.finish_back()
    held.open.set()
    assert back.done.wait(60)
    assert not into.any()
    assert torch.equal(fetched(content), some_bytes(2 * CHUNK))
    place.close()


def test_a_write_that_does_not_end(monkeypatch, tmp_path):
    place, content, held = silent(tmp_path, monkeypatch, "pwritev")
    content.release()
    contents = [place.take(some_bytes(2 * CHUNK, seed)) for seed in range(3)]
    for content in contents:
        with pytest.raises(OffloadError, match="the disk has not answered"):
            content.finish_out()
    assert place.traffic.failures == 3
    assert 0 < place.used_bytes <= 4 * CHUNK, "what no thread is at was given back"
    held.open.set()
    place.close()
    wait_for_threads()


def test_closing_a_place_whose_disk_is_silent(monkeypatch, tmp_path):
    place, content, held = silent(tmp_path, monkeypatch, "preadv")
    content.begin_back(torch.zeros(2 * CHUNK, dtype=torch.uint8))
    place.close()  # returns
    with pytest.raises(OffloadError, match="the place was closed"):
        content.finish_back()
    held.open.set()
    wait_for_threads()


def test_slow_is_not_silent(monkeypatch, tmp_path):
    """As long as chunks end, nobody gives up, however long all of them take."""
    place, content, held = silent(tmp_path, monkeypatch, "preadv")
    content.begin_back(torch.zeros(2 * CHUNK, dtype=torch.uint8))
    back = content._back
    progress = iter(range(1000))
    rounds = []

    def moving(transfer):
        rounds.append(transfer)
        if len(rounds) == 20:  # five times the patience
            held.open.set()
        return next(progress), 0

    monkeypatch.setattr(place._depot, "_progress", moving)
    content.finish_back()
    assert back.done.is_set()
    assert place.traffic.waited_seconds > 0
    place.close()


# ---- at random ----


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 1 << 32), often=st.sampled_from([2, 5, 20]))
def test_failures_at_random(tmp_path, seed, often):
    """What comes back is right or an error; what is not held takes no room."""
    numbers = random.Random(seed)
    place = DiskPlace(tmp_path)
    place.take(some_bytes(1)).finish_out()
    failed = 0
    with pytest.MonkeyPatch.context() as patch:
        for name in ("pwritev", "preadv"):
            broken(patch, name, lambda call: numbers.choice((FULL, BROKEN)) if numbers.randrange(often) == 0 else 0)
        for round_ in range(10):
            sources = [some_bytes(numbers.randrange(3 * CHUNK), seed=round_ * 10 + index) for index in range(4)]
            contents = [place.take(source) for source in sources]
            for source, content in zip(sources, contents, strict=True):
                try:
                    content.finish_out()
                    assert torch.equal(fetched(content), source)
                except OffloadError:
                    failed += 1
                content.release()
            assert place.used_bytes == 0
    assert place.traffic.failures == failed
    place.close()
