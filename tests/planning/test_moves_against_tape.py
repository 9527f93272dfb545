"""The simulator of moves against tape and mover: random traces, played on real storages, under plans that move.

As in ``test_against_tape.py``: levels after every event, the peak, and here also which contents leave and in which
order they are asked for must agree, whatever the window, what comes ahead, and the room at the place.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import pytest
from torch import Tensor

from lightning_remat.engine import leaving as leaving_module
from lightning_remat.engine import replay, store
from lightning_remat.engine.offload.mover import Mover
from lightning_remat.engine.planned import PlannedTape, action_for
from lightning_remat.engine.replay import Clock
from lightning_remat.planning.moving import fetch_order, leaving
from lightning_remat.planning.simulation import simulate
from lightning_remat.planning.trace import Trace
from lightning_remat.planning.transfer import Transfer
from tests.helpers.places import OutsidePlace
from tests.planning.small_traces import random_trace
from tests.planning.test_against_tape import Memory, Player, playable


class Watched(Memory):
    """Its peak is looked at whenever something is made: what leaves may do so right after."""

    def watch(self, tensor: Tensor) -> Tensor:
        super().watch(tensor)
        self.reach(self.live)
        return tensor


class MovingPlayer(Player):
    """Plays a trace on a planned tape with a mover."""

    def __init__(self, trace: Trace, drop: Sequence[bool], move: Sequence[bool], transfer: Transfer) -> None:
        super().__init__(trace, drop)
        self.place = OutsidePlace(transfer.cap_bytes, lambda into: self.memory.watch(into))
        self.memory = Watched()
        self.mover = Mover(self.place, transfer.min_bytes)
        self.tape = PlannedTape(Clock())
        self.tape.mover = self.mover
        flags = zip(self.ops, trace.ops, drop, move, strict=True)
        self.tape.start([(op, action_for(op.rule, d and entry.droppable, m), -1) for op, entry, d, m in flags])
        self.mover.begin(fetch_order(trace, drop, move, transfer), transfer.window_bytes, transfer.ahead_bytes)


@pytest.fixture(scope="module")
def counted_copies() -> Iterator[list[Memory]]:
    """The engine's own copies are counted, too: by the memory that is last in the list."""
    memories: list[Memory] = []
    original = replay.storage_copy
    with pytest.MonkeyPatch.context() as patch:
        for module in (replay, store, leaving_module):
            patch.setattr(module, "storage_copy", lambda tensor: memories[-1].watch(original(tensor)))
        yield memories


def random_place(rng: random.Random) -> Transfer:
    """One for contents of up to 30 bytes."""
    return Transfer(
        out_bytes_per_second=5.0,
        in_bytes_per_second=5.0,
        min_bytes=rng.choice((0, 1, 8, 20)),
        window_bytes=rng.choice((0, 0, 10, 35, 80, 1000)),
        ahead_bytes=rng.choice((0, 0, 10, 35, 80, 1000)),
        cap_bytes=rng.choice((None, None, None, 40)),
    )


def compare(
    trace: Trace, drop: Sequence[bool], move: Sequence[bool], transfer: Transfer, memories: list[Memory]
) -> tuple[int, int]:
    """Play a trace both ways; returns how many contents left, and how many were read back."""
    expected = simulate(trace, drop, True, move, transfer)
    player = MovingPlayer(trace, drop, move, transfer)
    memories.append(player.memory)
    try:
        player.play()
        assert player.place.sizes == [trace.nbytes[v] for v in expected.left]
        if any(move):
            assert leaving(trace, move, transfer, drop) == expected.left
            assert player.mover._asked == fetch_order(trace, drop, move, transfer)
        assert player.levels == expected.levels
        assert player.memory.peak == expected.peak
        assert player.place.traffic.bytes_in == expected.fetched_bytes
        assert [op.number for op in player.ops if op.runs == 2] == sorted(expected.replayed)
        assert max(op.runs for op in player.ops) <= 2
    finally:
        memories.pop()
        player.close()
    return len(expected.left), player.place.traffic.bytes_in


def test_simulator_agrees_with_tape_and_mover(counted_copies: list[Memory]) -> None:
    left = back = 0
    for seed in range(700):
        rng = random.Random(seed)
        trace = playable(random_trace(rng, 12))
        drop = [rng.random() < 0.4 for _ in trace.ops]
        move = [rng.random() < 0.7 for _ in trace.ops]
        found = compare(trace, drop, move, random_place(rng), counted_copies)
        left, back = left + found[0], back + found[1]
    assert left > 1000
    assert back > 1000
