"""The pool of pinned memory: what it hands out, keeps, gives back and refuses. Plain memory stands in for pinned."""

from __future__ import annotations

import itertools
import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lightning_remat.engine.offload.pinned import Buffer, PinnedPool, class_bytes, single_bytes, slab_bytes
from lightning_remat.errors import OffloadError

MIB = 1 << 20


class Driver:
    """Counts what is alive of what it made; refuses above a limit."""

    def __init__(self, limit: int = 1 << 40) -> None:
        self.limit = limit
        self.asked: list[int] = []
        self.trims: list[int] = []
        self._alive: list[tuple[weakref.ref[Tensor], int]] = []

    @property
    def alive(self) -> int:
        return sum(size for ref, size in self._alive if ref() is not None)

    def allocate(self, nbytes: int) -> Tensor:
        if self.alive + nbytes > self.limit:
            raise RuntimeError("CUDA error: out of memory\nand so on")
        # Meta tensors have storages without memory.
        memory = torch.empty(nbytes, dtype=torch.uint8, device="meta")
        self._alive.append((weakref.ref(memory), nbytes))
        self.asked.append(nbytes)
        return memory

    def trim(self) -> None:
        self.trims.append(self.alive)


def pool_of(budget: int = 1 << 40, limit: int = 1 << 40) -> tuple[PinnedPool, Driver]:
    driver = Driver(limit)
    return PinnedPool(driver.allocate, driver.trim, budget), driver


@given(st.integers(0, 1 << 36))
def test_waste_is_a_quarter_at_most(nbytes: int) -> None:
    size = class_bytes(nbytes)
    slab = slab_bytes(size)
    assert nbytes <= size
    assert size % 512 == 0
    assert slab & (slab - 1) == 0
    assert single_bytes(size) & (single_bytes(size) - 1) == 0
    assert size <= single_bytes(size) <= slab or slab == MIB
    if nbytes >= 4096:
        assert size <= nbytes * 5 / 4
        assert slab // size * nbytes >= slab * 0.75 - slab // size


def test_buffers_are_used_again_and_the_oldest_first() -> None:
    pool, driver = pool_of()
    first, second = pool.take(8 * MIB), pool.take(8 * MIB - 5)
    assert pool.used_bytes == pool.peak_bytes == pool.held_bytes == 16 * MIB
    pool.give_back(second)
    pool.give_back(first)
    assert pool.used_bytes == 0
    assert pool.take(8 * MIB) is second
    assert (pool.used_bytes, pool.peak_bytes) == (8 * MIB, 16 * MIB)
    assert pool.take(8 * MIB) is first
    assert driver.asked == [8 * MIB] * 2


def test_buffers_of_a_slab_do_not_overlap() -> None:
    pool, driver = pool_of()
    buffers = [pool.take(5 * MIB) for _ in range(3)]
    assert driver.asked == [16 * MIB]
    assert [b.memory.storage_offset() for b in buffers] == [0, 5 * MIB, 10 * MIB]
    pool.take(5 * MIB)
    assert driver.asked == [16 * MIB] * 2


def test_idle_slabs_go_when_another_size_needs_room_the_longest_unused_first() -> None:
    pool, driver = pool_of(budget=16 * MIB)
    early, late = pool.take(4 * MIB), pool.take(8 * MIB)
    pool.give_back(early)
    pool.give_back(late)
    kept = pool.take(1 * MIB)
    kept_too = pool.take(2 * MIB)
    assert (pool.held_bytes, driver.trims) == (15 * MIB, [])
    del early
    pool.take(3 * MIB)  # in a slab of its own, of 4 MiB
    assert driver.trims == [11 * MIB]
    assert pool.held_bytes == 15 * MIB
    del late
    pool.take(3 * MIB)
    assert driver.trims == [11 * MIB, 7 * MIB]
    assert pool.held_bytes == 11 * MIB
    assert kept.slab is not kept_too.slab


def test_what_is_in_use_never_goes() -> None:
    pool, driver = pool_of(budget=8 * MIB)
    pool.take(4 * MIB)
    idle = pool.take(2 * MIB)
    pool.give_back(idle)
    with pytest.raises(OffloadError, match="no room for 8,388,608 bytes in pinned host memory: 6,291,456 of 8,388,608"):
        pool.take(8 * MIB)
    assert driver.trims == []  # nothing is given up for what cannot be had
    assert pool.used_bytes == 4 * MIB
    assert pool.take(2 * MIB) is idle


def test_a_larger_buffer_is_better_than_none() -> None:
    pool, driver = pool_of(budget=16 * MIB)
    pool.take(5 * MIB)  # one of three in the slab
    assert pool.take(1 * MIB).nbytes == 5 * MIB
    assert pool.used_bytes == 10 * MIB
    with pytest.raises(OffloadError):
        pool.take(6 * MIB)
    assert driver.asked == [16 * MIB]


def test_a_slab_of_one_buffer_where_a_whole_one_has_no_room() -> None:
    pool, driver = pool_of(budget=9 * MIB)
    pool.take(5 * MIB)
    assert driver.asked == [8 * MIB]


def test_a_driver_that_refuses_is_asked_again_without_what_is_idle() -> None:
    pool, driver = pool_of(limit=24 * MIB)
    pool.give_back(pool.take(16 * MIB))
    pool.take(10 * MIB)  # a slab of 32 MiB is too much
    assert driver.asked == [16 * MIB, 16 * MIB]
    assert driver.trims == [0]
    with pytest.raises(OffloadError, match=r"cannot pin 16,777,216 bytes of host memory: CUDA error: out of memory$"):
        pool.take(16 * MIB)
    assert pool.held_bytes == 16 * MIB


def test_clearing_lets_go_of_all() -> None:
    pool, driver = pool_of()
    pool.give_back(pool.take(MIB))
    pool.clear()
    assert (pool.held_bytes, pool.used_bytes, driver.alive) == (0, 0, 0)


@given(st.lists(st.tuples(st.sampled_from(["take", "give"]), st.integers(0, 3 * MIB)), max_size=60))
def test_the_books_are_right_whatever_happens(steps: list[tuple[str, int]]) -> None:
    """What is held is alive and within the cap; buffers in use do not share a byte."""
    pool, driver = pool_of(budget=10 * MIB)
    out: list[Buffer] = []
    for what, number in steps:
        if what == "take":
            try:
                buffer = pool.take(number)
            except OffloadError:
                continue
            assert buffer.nbytes >= number
            out.append(buffer)
        elif out:
            pool.give_back(out.pop(number % len(out)))
        assert pool.held_bytes == driver.alive <= 10 * MIB
        assert pool.used_bytes == sum(b.nbytes for b in out) <= pool.held_bytes
        spans = sorted((id(b.slab), b.memory.storage_offset(), b.nbytes) for b in out)
        for (slab, start, size), (other, begin, _) in itertools.pairwise(spans):
            assert slab != other or start + size <= begin
