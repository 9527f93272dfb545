"""Segments: pieces of a step between two narrow points, and the menus of plans for each.

A *cut* is a place in the order of ops. What is made before it and read after it is kept, so that the ops between two
cuts can be judged for themselves: what a segment keeps until backward comes to it, and what it needs while backward is
there. Equal segments (the layers of a transformer) are judged once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from lightning_remat.planning.graph import Cuts, Graph, graph_of
from lightning_remat.planning.simulator import Simulator
from lightning_remat.planning.trace import EXIT, FREE, NEED, OTHER, RELEASE, RUN, SAVE, Event, Trace, TraceOp


@dataclass(frozen=True, slots=True)
class Item:
    """One way to run a segment.

    Attributes:
        replay: ops to drop and replay, counted from the segment's first.
        kept: bytes that stay from the segment's forward to its backward.
        forward, backward: most bytes while it runs, above what others have at its beginning.
        seconds: extra time.
    """

    replay: frozenset[int]
    kept: int
    forward: int
    backward: int
    seconds: float


@dataclass(slots=True)
class Layout:
    """Where things are in a trace.

    Attributes:
        trace, graph: what it is about.
        run: event in which each op runs.
        others: bytes of OTHER events so far, before each event and at the end.
        turn: first event in which backward asks for something.
        crossing: for each place between ops, bytes that are made before it and read after it.
        last_reader: for each op, the last op that may run again and reads its outputs (itself if none does).
        slot_op, slot_value: for each slot, the op after which it was saved, and its value.
        first_need: for each place between ops, the event with which backward enters what lies before it.
    """

    trace: Trace
    graph: Graph
    run: list[int]
    others: list[int]
    turn: int
    crossing: np.ndarray
    last_reader: list[int]
    slot_op: list[int]
    slot_value: list[int]
    first_need: list[int]


def layout_of(trace: Trace) -> Layout:
    """Look a trace over."""
    count = len(trace.ops)
    graph = graph_of(trace)
    run = [0] * count
    others = [0]
    slot_op = [-1] * trace.slots
    slot_value = [-1] * trace.slots
    end = len(trace.events)
    turn = end
    needs = [end] * (count + 1)
    current = 0
    for e, (kind, a, b) in enumerate(trace.events):
        others.append(others[-1] + (b if kind == OTHER else 0))
        if kind == RUN:
            run[a] = e
            current = a
        elif kind == SAVE:
            slot_op[a], slot_value[a] = trace.saver(a, current), b
        elif kind == NEED:
            turn = min(turn, e)
            if slot_op[a] >= 0:
                needs[slot_op[a]] = min(needs[slot_op[a]], e)
    # Backward enters what lies before a cut when it first needs something that an op before the cut has saved.
    first_need = [end] * (count + 1)
    for cut in range(1, count + 1):
        first_need[cut] = min(first_need[cut - 1], needs[cut - 1])
    # What backward never asks for, not even for the sake of something else, is never run again.
    useful = list(graph.demanded)
    last_reader = list(range(count))
    for o in range(count - 1, -1, -1):
        if graph.droppable[o] and useful[o]:
            for u in graph.reads[o]:
                useful[u] = True
                last_reader[u] = max(last_reader[u], o)
    steps = np.zeros(count + 2, dtype=np.int64)
    for u in range(count):
        if graph.droppable[u] and last_reader[u] > u:
            steps[u + 1] += graph.nbytes[u]
            steps[last_reader[u] + 1] -= graph.nbytes[u]
    crossing = np.cumsum(steps)[: count + 1]
    return Layout(trace, graph, run, others, turn, crossing, last_reader, slot_op, slot_value, first_need)


def find_cuts(layout: Layout, most: int) -> list[int]:
    """Narrow points, by position in the order of ops; 0 and the number of ops are always among them."""
    crossing, count = layout.crossing, len(layout.run)
    inner = np.arange(1, count)
    if not len(inner):
        return [0, count]
    reach = max(2, count // (2 * most))
    padded = np.pad(crossing[1:count], reach, mode="constant", constant_values=np.iinfo(np.int64).max)
    lowest = np.lib.stride_tricks.sliding_window_view(padded, 2 * reach + 1).min(axis=1)
    found: list[int] = []
    for c in inner[crossing[1:count] <= lowest]:
        # Of places in a row that are equally narrow, the first.
        if not (found and c - found[-1] <= reach and crossing[c] == crossing[found[-1]]):
            found.append(int(c))
    found = _narrow(found, crossing)
    if len(found) > most:
        # The narrowest of each stretch.
        found = [min(part, key=lambda c: crossing[c]) for part in np.array_split(np.asarray(found), most) if len(part)]
    return [0, *map(int, found), count]


def _narrow(cuts: list[int], crossing: np.ndarray) -> list[int]:
    """Without places that are wider than some near them on either side: a border there would keep too much."""
    sizes = [int(crossing[c]) for c in cuts]
    found = []
    for i, cut in enumerate(cuts):
        before, after = sizes[max(0, i - 2) : i], sizes[i + 1 : i + 3]
        if not (before and after and sizes[i] > 1.5 * max(min(before), min(after))):
            found.append(cut)
    return found


def _ranges(layout: Layout, first: int, last: int) -> tuple[int, int, int, int]:
    """Events in which ops ``first`` to ``last`` run forward (from, to), and in which backward is there (from, to)."""
    start = layout.run[first] if first else 0
    end = layout.run[last] if last < len(layout.run) else layout.turn
    turn = max(end, layout.first_need[last])
    stop = max(turn, layout.first_need[first]) if first else len(layout.trace.events)
    return start, end, turn, stop


def levels_around(layout: Layout, first: int, last: int) -> tuple[int, int]:
    """Bytes of others when forward enters a segment, and when backward does."""
    start, _, turn, _ = _ranges(layout, first, last)
    return layout.others[start], layout.others[turn]


def interval_kinds(layout: Layout, cuts: Sequence[int]) -> list[int]:
    """A number for each interval between neighbouring cuts; equal numbers mean equal ops, values and events.

    Everything is told by its distance, so that a row of equal intervals has a row of equal numbers, and two rows of
    equal numbers are equal segments.
    """
    trace, makers = layout.trace, layout.trace.makers
    numbers: dict[object, int] = {}
    kinds = []
    for first, last in pairwise(cuts):
        start, end, turn, stop = _ranges(layout, first, last)
        ops = [
            (
                op.name,
                tuple([(o - makers[u], u - op.outputs[0] if op.outputs else 0) for u in op.inputs]),
                tuple([trace.nbytes[v] for v in op.outputs]),
                o - makers[op.writes] if op.writes >= 0 else 0,
                op.droppable,
                op.seconds,
                op.scratch,
                op.state,
                layout.last_reader[o] - o,
            )
            for o, op in enumerate(trace.ops[first:last], first)
        ]
        events = []
        for kind, a, b in (*trace.events[start:end], *trace.events[turn:stop]):
            if kind == RUN:
                events.append((kind, a - first, 0))
            elif kind == OTHER:
                events.append((kind, a, b))
            elif kind == FREE:
                events.append((kind, makers[a] - first, 0))
            elif kind == EXIT:
                events.append((kind, 0, 0))
            else:
                events.append((kind, layout.slot_op[a] - first, makers[layout.slot_value[a]] - first))
        kinds.append(numbers.setdefault((tuple(ops), tuple(events)), len(numbers)))
    return kinds


class Segment:
    """The ops from one cut to another, as a trace of their own."""

    def __init__(self, layout: Layout, first: int, last: int) -> None:
        self.first, self.last = first, last
        trace = layout.trace
        start, end, turn, stop = _ranges(layout, first, last)
        self.kept = frozenset(o - first for o in range(first, last) if layout.last_reader[o] >= last)
        values: dict[int, int] = {}
        ops: list[TraceOp] = []
        for op in trace.ops[first:last]:
            for v in op.outputs:
                values[v] = len(values)
            ops.append(
                TraceOp(
                    op.name,
                    "",
                    op.kind,
                    tuple([values[u] for u in op.inputs if u in values]),
                    tuple([values[v] for v in op.outputs]),
                    values.get(op.writes, -1),
                    op.droppable and (op.writes < 0 or op.writes in values),
                    op.seconds,
                    op.scratch,
                    op.state,
                )
            )
        slots: dict[int, int] = {}
        self.forward = self._events(layout, trace.events[start:end], first, values, slots)
        self.forward += [
            (FREE, values[a], 0) for k, a, _ in trace.events[end : layout.turn] if k == FREE and a in values
        ]
        self.forward.append((EXIT, 0, 0))
        # What crosses the border is held for those who read it, until backward comes back from there.
        held = [(slots.setdefault(-1 - o, len(slots)), v) for o in sorted(self.kept) for v in ops[o].outputs]
        self.forward = [(SAVE, slot, v) for slot, v in held] + self.forward
        self.others = sum(b for kind, _, b in self.forward if kind == OTHER)
        self.backward = [(RELEASE, slot, 0) for slot, _ in held]
        self.backward += self._events(layout, trace.events[turn:stop], first, values, slots)
        numbers = sorted(values, key=values.__getitem__)
        self.trace = Trace(
            ops, [trace.nbytes[v] for v in numbers], [trace.makers[v] - first for v in numbers], [], len(slots)
        )

    def _events(
        self, layout: Layout, events: Sequence[Event], first: int, values: dict[int, int], slots: dict[int, int]
    ) -> list[Event]:
        found: list[Event] = []
        for kind, a, b in events:
            if kind == RUN:
                if self.first <= a < self.last:
                    found.append((RUN, a - first, 0))
            elif kind == OTHER:
                found.append((OTHER, a, b))
            elif kind == FREE:
                if a in values:
                    found.append((FREE, values[a], 0))
            elif kind == EXIT:
                pass  # put at the end of every segment's forward
            elif layout.slot_value[a] in values and self.first <= layout.slot_op[a] < self.last:
                number = slots.setdefault(a, len(slots))
                found.append((kind, number, values[layout.slot_value[a]] if kind == SAVE else 0))
        return found

    def graph(self) -> Graph:
        """Its dependencies."""
        return graph_of(
            Trace(self.trace.ops, self.trace.nbytes, self.trace.makers, self.forward + self.backward, self.trace.slots)
        )

    def measure(self, replay: frozenset[int]) -> Item:
        """Simulate it under a plan."""
        simulator = Simulator(self.trace, [o in replay for o in range(len(self.trace.ops))])
        simulator.play(self.forward)
        forward = simulator.peak
        kept = simulator.live = simulator.peak = simulator.live - self.others
        simulator.play(self.backward)
        seconds = sum(self.trace.ops[o].seconds for o in simulator.replayed)
        return Item(replay, kept, forward, simulator.peak, seconds)

    def menu(self, steps: int) -> list[Item]:
        """Plans for it: the convex hull of bytes kept against seconds, and some with smaller replays."""
        graph = self.graph()
        cuts = Cuts(graph, range(len(self.trace.ops)), self.kept)
        seen: dict[frozenset[int], Item] = {}

        def solve(price: float, room: float = 0.0) -> Item:
            replay = frozenset(cuts.cheapest(price, room))
            if replay not in seen:
                seen[replay] = self.measure(replay)
            return seen[replay]

        weight = sum(graph.seconds) / max(1, sum(graph.nbytes))
        low = solve(0.0)
        high = solve(1e6 * weight + 1e-3)
        pending = [(low, high)]
        for _ in range(steps):
            if not pending:
                break
            a, b = pending.pop(0)
            if b.seconds <= a.seconds or b.kept >= a.kept:
                continue
            middle = solve((b.seconds - a.seconds) / (a.kept - b.kept))
            if middle.replay not in (a.replay, b.replay) and (middle.kept, middle.seconds) not in (
                (a.kept, a.seconds),
                (b.kept, b.seconds),
            ):
                pending += [(a, middle), (middle, b)]
        for price in (0.3, 1.0, 3.0):
            solve(4 * price * weight, price * weight)
        return pruned(list(seen.values()))


def pruned(items: list[Item]) -> list[Item]:
    """Without those that another one beats in every respect."""
    found: list[Item] = []
    for item in sorted(items, key=lambda i: (i.seconds, i.kept, i.backward)):
        if not any(i.kept <= item.kept and i.forward <= item.forward and i.backward <= item.backward for i in found):
            found.append(item)
    return found
