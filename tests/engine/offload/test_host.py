"""Host memory as a place: every order that streams admit, without a device (tests/helpers/fake_streams.py)."""

from __future__ import annotations

import re
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_remat.engine.offload.host import HostContent, HostPlace
from lightning_remat.errors import OffloadError
from tests.helpers.fake_streams import FakeStreams

DEVICE = torch.device("cuda", 0)
KIB = 1024


def bytes_of(nbytes: int, number: int) -> Tensor:
    return torch.randint(256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(number))


def place_on(streams: FakeStreams, budget: int = 1 << 20) -> HostPlace:
    return HostPlace(DEVICE, budget=budget, streams=streams)


def made(streams: FakeStreams, nbytes: int, number: int = 0) -> Tensor:
    """A tensor that an op of the step fills."""
    tensor = streams.alloc(nbytes)
    streams.write(tensor, bytes_of(nbytes, number))
    return tensor


def scribble(streams: FakeStreams, nbytes: int) -> None:
    """An op of the step that uses whatever memory the allocator gives it."""
    streams.write(streams.alloc(nbytes), torch.full((nbytes,), 255, dtype=torch.uint8))


@dataclass
class Held:
    """What the test holds of one content."""

    content: HostContent
    expected: Tensor
    source: Tensor | None
    into: Tensor | None = None


class Step:
    """A random step: storages leave, come back, are used and forgotten, in any order that the protocol admits."""

    SIZES = (1, 3000, 4096, 5000, 9000)

    def __init__(self, streams: FakeStreams, place: HostPlace) -> None:
        self.streams = streams
        self.place = place
        self.held: list[Held] = []
        self.found: list[tuple[Tensor, list[Tensor]]] = []
        self.refused = 0
        self.others = [streams.ops, streams.side()]

    def leave(self, number: int) -> None:
        nbytes = self.SIZES[number % len(self.SIZES)]
        source = made(self.streams, nbytes, number)
        try:
            self.held.append(Held(self.place.take(source), bytes_of(nbytes, number), source))
        except OffloadError:
            self.refused += 1

    def finish_out(self, number: int) -> None:
        if self.held:
            held = self.held[number % len(self.held)]
            held.content.finish_out()
            held.source = None

    def back(self, number: int) -> None:
        ready = [held for held in self.held if held.source is None and held.into is None]
        if ready:
            held = ready[number % len(ready)]
            held.into = self.streams.alloc(held.content.nbytes)
            held.content.begin_back(held.into)

    def use(self, number: int) -> None:
        coming = [held for held in self.held if held.into is not None]
        if coming:
            held = coming[number % len(coming)]
            held.content.finish_back()
            assert held.into is not None
            self.found.append((held.expected, self.streams.read(held.into)))
            held.into = None

    def release(self, number: int) -> None:
        if self.held:
            held = self.held.pop(number % len(self.held))
            held.content.release()
            if number % 2:
                held.content.release()

    def scribble(self, number: int) -> None:
        scribble(self.streams, self.SIZES[number % len(self.SIZES)])

    def advance(self, number: int) -> None:
        stream = self.streams.streams[number % len(self.streams.streams)]
        for _ in range(1 + number // 8 % 8):
            self.streams.advance(stream)

    def switch(self, number: int) -> None:
        self.streams.switch(self.others[number % 2])

    def run(self, program: list[tuple[str, int]]) -> None:
        for name, number in program:
            getattr(self, name)(number)
            assert self.place.pool.held_bytes <= self.place.pool.budget
        self.streams.drain()
        for expected, found in self.found:
            assert torch.equal(expected, found[0])
        assert self.place.traffic.refused == self.refused


ACTIONS = ("leave", "finish_out", "back", "use", "release", "scribble", "advance")
NUMBERS = st.integers(0, 63)


@settings(max_examples=300)
@given(
    st.lists(
        st.tuples(st.sampled_from((*ACTIONS, "leave", "finish_out", "back", "use", "switch")), NUMBERS),
        min_size=20,
        max_size=60,
    ),
    st.integers(0, 2**32),
)
def test_every_order_gives_the_same_bytes(program: list[tuple[str, int]], seed: int) -> None:
    """Whatever a step does and however late or early the device is: nothing is read, written or freed out of turn."""
    streams = FakeStreams(seed)
    step = Step(streams, place_on(streams, budget=24 * KIB))
    step.run(program)
    assert streams.hazards == []


def busy(streams: FakeStreams, budget: int = 8 * KIB) -> list[tuple[Tensor, list[Tensor]]]:
    """A fixed step in which each wait matters, on a device that is late; all that it moves has one size."""
    place = place_on(streams, budget)
    found = []
    for turn in range(3):
        pair = []
        for number in (2 * turn, 2 * turn + 1):
            source = made(streams, 4096, number)
            content = place.take(source)
            content.finish_out()
            del source
            scribble(streams, 4096)
            pair.append((number, content))
        for number, content in reversed(pair):
            into = streams.alloc(4096)
            content.begin_back(into)
            content.finish_back()
            found.append((bytes_of(4096, number), streams.read(into)))
            content.release()
            del into
            scribble(streams, 4096)
    return found


OPS, OUT, BACK = 0, 1, 2


def test_a_fixed_step() -> None:
    streams = FakeStreams()
    found = busy(streams)
    assert [len(list_) for _, list_ in found] == [0] * 6, "a place made the host wait"
    streams.drain()
    assert all(torch.equal(expected, got[0]) for expected, got in found)
    assert streams.hazards == []


@pytest.mark.parametrize(
    ("waits", "for_", "words"),
    [
        pytest.param(OUT, OPS, "copy .* of stream 1 reads what op .* of stream 0 may still be writing", id="take"),
        pytest.param(OPS, OUT, "freed that copy .* of stream 1 may still be reading", id="finish_out"),
        pytest.param(BACK, OPS, "copy .* of stream 2 writes what op .* may still be", id="begin_back"),
        pytest.param(
            OPS, BACK, "op .* of stream 0 reads what copy .* of stream 2 may still be writing", id="finish_back"
        ),
    ],
)
def test_the_fake_catches_a_wait_that_is_missing(waits: int, for_: int, words: str) -> None:
    streams = FakeStreams(deaf=frozenset({(waits, for_)}))
    busy(streams)
    assert any(re.search(words, hazard) for hazard in streams.hazards), streams.hazards


class CarelessStreams(FakeStreams):
    """The allocator is not told who uses memory."""

    def hold(self, tensor: Tensor, stream: object) -> None:
        pass


def released_on_the_way_out(streams: FakeStreams, place: HostPlace) -> None:
    place.take(made(streams, 4096)).release()
    scribble(streams, 4096)


def released_on_the_way_back(streams: FakeStreams, place: HostPlace) -> None:
    content = place.take(made(streams, 4096))
    content.finish_out()
    content.begin_back(streams.alloc(4096))
    content.release()
    scribble(streams, 4096)


def back_under_another_stream(streams: FakeStreams, place: HostPlace) -> None:
    other = streams.side()
    content = place.take(made(streams, 4096))
    content.finish_out()
    into = streams.alloc(4096)
    content.begin_back(into)
    streams.switch(other)
    content.finish_back()
    streams.read(into)
    del into
    content.release()


@pytest.mark.parametrize(
    "program", [released_on_the_way_out, released_on_the_way_back, back_under_another_stream], ids=lambda f: f.__name__
)
def test_memory_that_a_copy_still_needs(program: object) -> None:
    """Where no stream of the step waits before the memory is freed, the allocator is told; and the fake knows."""
    assert callable(program)
    for streams in (FakeStreams(), CarelessStreams()):
        place = place_on(streams)
        program(streams, place)
        streams.drain()
        assert bool(streams.hazards) == isinstance(streams, CarelessStreams)


def test_a_source_that_is_finished_under_another_stream() -> None:
    """The stream that it was allocated on has to wait, too."""
    streams = FakeStreams()
    place, other = place_on(streams), streams.side()
    source = made(streams, 4096)
    content = place.take(source)
    streams.switch(other)
    content.finish_out()
    del source
    streams._current = streams.ops  # not ordered behind the other one
    scribble(streams, 4096)
    assert streams.hazards == []


@pytest.mark.parametrize("deaf", [False, True])
def test_a_copy_back_under_a_stream_that_did_not_wait_for_the_copy_out(deaf: bool) -> None:
    streams = FakeStreams(deaf=frozenset({(BACK, OUT)} if deaf else ()))
    place, other = place_on(streams), streams.side()
    content = place.take(made(streams, 4096))
    content.finish_out()
    streams._current = other
    content.begin_back(streams.alloc(4096))
    assert bool(streams.hazards) == deaf


@pytest.mark.parametrize("deaf", [False, True])
def test_a_buffer_that_is_used_again_while_it_is_read(deaf: bool) -> None:
    streams = FakeStreams(deaf=frozenset({(OUT, BACK)} if deaf else ()))
    place = place_on(streams, budget=4096)
    first = place.take(made(streams, 4096))
    first.finish_out()
    into = streams.alloc(4096)
    first.begin_back(into)
    first.release()  # and nobody has waited for the copy
    second = place.take(made(streams, 4096, 1))
    assert second is not first
    assert bool(streams.hazards) == deaf
    assert place.pool.held_bytes == 4096


def test_memory_does_not_depend_on_how_fast_the_device_is() -> None:
    """A device that is always done and one that is never: the same buffers, the same room."""
    random = torch.Generator().manual_seed(3)
    program = [(ACTIONS[i % 5], j) for i, j in torch.randint(64, (400, 2), generator=random).tolist()]
    rooms = []
    for done in (False, True):
        streams = FakeStreams()
        step = Step(streams, place_on(streams, budget=64 * KIB))
        trail = []
        for name, number in program:
            getattr(step, name)(number)
            if done:
                streams.drain()
            trail.append((step.place.pool.held_bytes, step.place.used_bytes, step.refused))
        rooms.append(trail)
    assert rooms[0] == rooms[1]
    assert len({held for held, _, _ in rooms[0]}) > 3


def test_later_steps_pin_nothing_new() -> None:
    streams = FakeStreams()
    place = place_on(streams, budget=1 << 30)
    held = []
    for _ in range(3):
        contents = []
        for number, nbytes in enumerate((5000, 9000, 300_000, 5000)):
            contents.append(place.take(made(streams, nbytes, number)))
            contents[-1].finish_out()
        for content in contents:
            content.release()
        held.append(place.pool.held_bytes)
    assert held[0] == held[1] == held[2]
    assert streams.trims == 0


def test_traffic() -> None:
    """Bytes are counted when they set out; seconds when both ends have been passed, without waiting for them."""
    streams = FakeStreams()
    place = place_on(streams)
    content = place.take(made(streams, 4096))
    content.finish_out()
    into = streams.alloc(4096)
    content.begin_back(into)
    content.finish_back()
    assert (place.traffic.bytes_out, place.traffic.bytes_in) == (4096, 4096)
    assert (place.traffic.seconds_out, place.traffic.waited_seconds, place.traffic.hidden) == (0, 0, None)
    assert not content.is_out()

    streams.drain()
    assert content.is_out()
    # The fake's clock: a millisecond for a byte, and for each thing that is done, on whatever stream.
    assert 4.09 < place.traffic.seconds_out < 4.11
    assert 4.09 < place.traffic.seconds_in < 4.11
    assert 8.1 < place.traffic.waited_seconds < 8.3
    assert place.traffic.hidden == pytest.approx(0, abs=0.01)
    content.release()


def test_copies_that_are_over_cost_no_wait() -> None:
    streams = FakeStreams()
    place = place_on(streams)
    content = place.take(made(streams, 4096))
    streams.drain()
    queued = streams.ops.length
    content.finish_out()
    assert streams.ops.length == queued
    assert place.traffic.waited_seconds == 0
    assert place.traffic.hidden == 1
    content.release()
