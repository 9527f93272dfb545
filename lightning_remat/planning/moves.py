"""Which ops' outputs may move, and ways to choose among them for a plan whose drops are given.

Two facts make good first guesses. What was made early in forward is asked for late in backward: it leaves more room for
longer, and there is more time to move it. And what leaves no faster than the place can take it costs no waiting.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from lightning_remat.planning.batch import Ints, Rows
from lightning_remat.planning.graph import Floats, Graph
from lightning_remat.planning.moving import may_move, paces
from lightning_remat.planning.trace import NEED, SAVE, Trace
from lightning_remat.planning.transfer import Transfer


class Moves:
    """What moving could do in one trace.

    Args:
        trace: the step.
        graph: its dependencies.
        transfer: where to.

    Attributes:
        can: for each op, whether moving its outputs is worth a thought: some are large enough, somebody may ask for
            them, and nothing is written over them.
        nbytes: bytes that leave if it moves.
        small: bytes of its outputs that stay all the same.
        demanded: backward asks for an output.
        readers: ops that can be dropped and read an output.
    """

    def __init__(self, trace: Trace, graph: Graph, transfer: Transfer) -> None:
        self.trace = trace
        self.graph = graph
        self.transfer = transfer
        ops, makers = trace.ops, trace.makers
        self.nbytes: Ints = np.zeros(len(ops), dtype=np.int64)
        self.small: Ints = np.zeros(len(ops), dtype=np.int64)
        contents = np.zeros(len(ops), dtype=np.int64)
        for v, n in enumerate(trace.nbytes):
            if n and n >= transfer.min_bytes:
                self.nbytes[makers[v]] += n
                contents[makers[v]] += 1
            else:
                self.small[makers[v]] += n
        self.demanded: Rows = np.zeros(len(ops), dtype=bool)
        slot_maker = [-1] * trace.slots
        for kind, a, b in trace.events:
            if kind == SAVE:
                slot_maker[a] = makers[b]
            elif kind == NEED and slot_maker[a] >= 0:
                self.demanded[slot_maker[a]] = True
        self.readers: list[list[int]] = [[] for _ in ops]
        overwritten: Rows = np.zeros(len(ops), dtype=bool)
        for o, op in enumerate(ops):
            if graph.droppable[o]:
                for u in {makers[u] for u in op.inputs}:
                    self.readers[u].append(o)
            if op.writes >= 0:
                overwritten[makers[op.writes]] = True
        wanted = self.demanded | np.asarray([bool(r) for r in self.readers], dtype=bool)
        may = np.asarray([may_move(op) for op in ops], dtype=bool)
        self.can: Rows = (self.nbytes > 0) & wanted & ~overwritten & may
        self.droppable: Rows = np.asarray(graph.droppable, dtype=bool)
        # How long a move takes up the slower of both directions, in the time of forward.
        self.paces = paces(trace)
        self.pace: Floats = np.asarray(self.paces[0])
        forward, backward = sum(self.paces[0]), sum(self.paces[1].values())
        out = contents * transfer.latency_seconds + self.nbytes / transfer.out_bytes_per_second
        back = contents * transfer.latency_seconds + self.nbytes / transfer.in_bytes_per_second
        self.busy: Floats = np.maximum(out, back * (forward / backward if backward > 0 else 1.0))
        # One more byte costs at most what it takes both ways, and all of it only where nothing of it hides.
        self.dearest = 1 / transfer.out_bytes_per_second + 1 / transfer.in_bytes_per_second

    def needed(self, drop: Rows) -> Rows:
        """For each op, whether somebody asks for an output: backward, or an op that runs again for its sake."""
        found: Rows = self.demanded.copy()
        for o in range(len(drop) - 1, -1, -1):
            if not found[o]:
                found[o] = any(drop[r] and found[r] for r in self.readers[o])
        return found

    def worthwhile(self, drop: Rows) -> Ints:
        """Ops that are kept under a plan and could move, in the order in which they run."""
        return np.flatnonzero(self.can & ~(drop & self.droppable) & self.needed(drop))

    def unhurried(self, ops: Ints) -> Ints:
        """Of these, as many as the place keeps up with: the window holds what it has not taken yet."""
        patience = self.transfer.window_bytes / self.transfer.out_bytes_per_second
        backlog, last, found = 0.0, 0, []
        for o in ops.tolist():
            backlog = max(0.0, backlog - float(self.pace[last:o].sum()))
            last = o
            if backlog <= patience:
                backlog += float(self.busy[o])
                found.append(o)
        return np.asarray(found, dtype=np.int64)

    def as_row(self, ops: Sequence[int] | Ints) -> Rows:
        """A flag for each op of the trace."""
        row: Rows = np.zeros(len(self.trace.ops), dtype=bool)
        row[np.asarray(ops, dtype=np.int64)] = True
        return row


def fewest(count: int, fits: Callable[[int], bool]) -> int | None:
    """The least number up to ``count`` that fits, by bisection; None if not even ``count`` does."""
    if not count or not fits(count):
        return None
    low, high = 0, count
    while high - low > max(1, count // 64):
        middle = (low + high) // 2
        if fits(middle):
            high = middle
        else:
            low = middle
    return high
