"""The simulator against the tape itself: random traces are played on real storages, whose lives are counted.

The tape sees made-up ops on tensors of the sizes that the trace names; recording, packing, replay and in-place rules
are the engine's own. Levels after every event, the peak, what is replayed and what it gives must agree.
"""

from __future__ import annotations

import random
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from torch import Tensor

from lightning_remat.engine import replay, rules, store
from lightning_remat.engine.actions import PASS, RECORD, WRITE, WRITE_KEEP
from lightning_remat.engine.replay import Clock
from lightning_remat.engine.rules import Rule
from lightning_remat.engine.tape import Tape
from lightning_remat.planning.simulation import simulate
from lightning_remat.planning.trace import EXIT, FREE, NEED, NEVER, RELEASE, RUN, SAVE, Trace
from tests.planning.small_traces import random_trace


class Memory:
    """Bytes of the storages that were shown to it and are alive."""

    def __init__(self) -> None:
        self.live = 0
        self.peak = 0

    def watch(self, tensor: Tensor) -> Tensor:
        """Count a tensor's storage from now until it dies."""
        storage = tensor.untyped_storage()
        self.live += storage.nbytes()
        weakref.finalize(storage, self._gone, storage.nbytes()).atexit = False
        return tensor

    def reach(self, level: int) -> None:
        """This much is in use."""
        self.peak = max(self.peak, level)

    def _gone(self, nbytes: int) -> None:
        self.live -= nbytes


class MadeUpOp:
    """Stands in for an overload: makes tensors of given sizes whose content depends on the inputs, or adds in place."""

    def __init__(self, player: Player, number: int) -> None:
        op = player.trace.ops[number]
        self.player = player
        self.number = number
        self.sizes = [player.trace.nbytes[v] for v in op.outputs]
        self.scratch = op.scratch
        self.in_place = op.writes >= 0
        self.runs = 0
        form = "write" if self.in_place else "pure"
        self.rule = Rule(f"made_up.{number}", form, "cheap", (0,) * self.in_place, in_place=self.in_place)

    def _op(self, *args: Tensor) -> Any:
        memory = self.player.memory
        content = (sum(int(a[0]) for a in args) * 3 + self.number) % 251
        if self.in_place:
            out: Any = args[0].fill_(content)
        else:
            out = [
                memory.watch(torch.full((n,), (content + i) % 251, dtype=torch.uint8)) for i, n in enumerate(self.sizes)
            ]
            out = out[0] if len(out) == 1 else out
        if self.runs:
            memory.reach(memory.live + self.scratch)
        self.runs += 1
        return out

    __call__ = _op


class Player:
    """Plays a trace on a tape, under a plan."""

    def __init__(self, trace: Trace, drop: Sequence[bool]) -> None:
        self.trace = trace
        self.memory = Memory()
        self.tape = Tape(Clock())
        self.ops = [MadeUpOp(self, o) for o in range(len(trace.ops))]
        for op, entry, dropped in zip(self.ops, trace.ops, drop, strict=True):
            rules._rules[id(op)] = (op.rule, op)
            dropped = dropped and entry.droppable
            actions = (WRITE_KEEP, WRITE) if op.in_place else (PASS, RECORD)
            self.tape.actions[id(op)] = actions[dropped]
        self.shown: dict[int, Tensor] = {}
        self.slots: dict[int, Any] = {}
        self.content: dict[int, tuple[int, int]] = {}  # of each slot: first byte, size
        self.levels: list[int] = []

    def play(self) -> None:
        """Through all events."""
        memory = self.memory
        for kind, a, b in self.trace.events:
            if kind == RUN:
                self._run(a)
                memory.reach(memory.live)
            elif kind == FREE:
                del self.shown[a]
            elif kind == SAVE:
                tensor = self.shown[b]
                self.content[a] = int(tensor[0]), len(tensor)
                self.slots[a] = self.tape.pack(tensor)
                del tensor
            elif kind == NEED:
                got = self.tape.unpack(self.slots[a])
                assert (int(got[0]), len(got)) == self.content[a]
                del got
            elif kind == RELEASE:
                del self.slots[a]
            elif kind == EXIT:
                self.tape.clear()
            else:
                if a != NEVER:
                    memory.reach(memory.live + a)
                memory.live += b
            self.levels.append(memory.live)

    def _run(self, o: int) -> None:
        entry = self.trace.ops[o]
        order = sorted(entry.inputs, key=lambda v: v != entry.writes)  # what it writes comes first
        out = self.tape.__torch_dispatch__(self.ops[o], (), [self.shown[v] for v in order])
        if entry.writes >= 0:
            del self.shown[entry.writes]
        self.shown.update(zip(entry.outputs, out if isinstance(out, list) else [out], strict=True))

    def close(self) -> None:
        """Leave nothing behind."""
        for op in self.ops:
            del rules._rules[id(op)]
        self.tape.clear()


@pytest.fixture(scope="module")
def counted_copies() -> Iterator[list[Memory]]:
    """The engine's own copies are counted, too: by the memory that is last in the list."""
    memories: list[Memory] = []
    original = replay.storage_copy

    def counting(tensor: Tensor) -> Tensor:
        return memories[-1].watch(original(tensor))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replay, "storage_copy", counting)
        patch.setattr(store, "storage_copy", counting)
        yield memories


def compare(trace: Trace, drop: Sequence[bool], memories: list[Memory]) -> int:
    """Play a trace both ways; returns how many ops were replayed."""
    expected = simulate(trace, drop, timeline=True)
    player = Player(trace, drop)
    memories.append(player.memory)
    try:
        player.play()
        assert player.levels == expected.levels
        assert player.memory.peak == expected.peak
        assert [op.number for op in player.ops if op.runs == 2] == sorted(expected.replayed)
        assert max(op.runs for op in player.ops) <= 2
        assert player.tape.clock.replayed_ops == len(expected.replayed)
    finally:
        memories.pop()
        player.close()
    return len(expected.replayed)


def playable(trace: Trace) -> Trace:
    """Without what the made-up ops cannot show: generator states, and tensors without a byte."""
    trace.nbytes = [max(1, n) for n in trace.nbytes]
    for op in trace.ops:
        op.state = 0
    return trace


@hypothesis.given(st.randoms(use_true_random=False))
@hypothesis.settings(max_examples=100)
def test_simulator_agrees_with_tape(counted_copies: list[Memory], rng: random.Random) -> None:
    trace = playable(random_trace(rng, 9))
    compare(trace, [rng.random() < 0.7 for _ in trace.ops], counted_copies)


def test_simulator_agrees_with_tape_on_many(counted_copies: list[Memory]) -> None:
    replays = 0
    for seed in range(1000):
        rng = random.Random(seed)
        trace = playable(random_trace(rng, 12))
        replays += compare(trace, [rng.random() < 0.7 for _ in trace.ops], counted_copies)
    assert replays > 1000
