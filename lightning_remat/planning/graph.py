"""Keep or recompute as a minimum cut.

For an op with outputs of b bytes, t seconds to run again and a price of p seconds per byte: it is *needed* (x) if
backward asks for an output or a replayed op reads one, and *replayed* (y) if it is needed and not kept. Keeping costs
p·b, replaying t, and a replayed op needs what it reads. The cheapest choice is a minimum s-t cut, so for every price it
is found exactly; raising the price walks along the convex hull of bytes against seconds. (The same construction serves
project selection, and in rematerialisation the compiler's min-cut partitioner of PyTorch.)

The maximum flow is SciPy's (Dinic's method, in C++). Known weakness: its capacities are 32-bit integers, so costs are
rounded to a billionth of their sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.sparse import csr_matrix
from scipy.sparse.csgraph import breadth_first_order, maximum_flow

from lightning_remat.planning.trace import NEED, SAVE, Trace

_ALL = 2**30

Floats = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(slots=True)
class Graph:
    """What depends on what in a trace, by op.

    Attributes:
        nbytes: bytes of the outputs that a plan decides about.
        seconds: time to run it again.
        droppable: whether a plan decides about it.
        demanded: backward asks for one of its outputs.
        reads: the droppable ops whose outputs it reads.
        overwrites: the op whose output it overwrites in place, or -1.
        overwritten: a later op that can be dropped writes over its output, so that keeping it would mean a copy.
    """

    nbytes: list[int]
    seconds: list[float]
    droppable: list[bool]
    demanded: list[bool]
    reads: list[tuple[int, ...]]
    overwrites: list[int]
    overwritten: list[bool]


def graph_of(trace: Trace) -> Graph:
    """The graph of a trace."""
    ops, makers = trace.ops, trace.makers
    count = len(ops)
    slots = [-1] * trace.slots
    demanded = [False] * count
    for kind, a, b in trace.events:
        if kind == SAVE:
            slots[a] = makers[b]
        elif kind == NEED and slots[a] >= 0:
            demanded[slots[a]] = True
    droppable = [op.droppable and bool(op.outputs) for op in ops]
    overwrites = [makers[op.writes] if op.writes >= 0 and droppable[makers[op.writes]] else -1 for op in ops]
    overwritten = [False] * count
    for o, old in enumerate(overwrites):
        if old >= 0 and droppable[o]:
            overwritten[old] = True
    return Graph(
        nbytes=[sum(trace.nbytes[v] for v in op.outputs) for op in ops],
        seconds=[op.seconds for op in ops],
        droppable=droppable,
        demanded=demanded,
        reads=[tuple({makers[u] for u in op.inputs if droppable[makers[u]]}) for op in ops],
        overwrites=overwrites,
        overwritten=overwritten,
    )


class Cuts:
    """Minimum cuts of one piece of a graph, for any number of prices.

    Args:
        graph: dependencies.
        ops: the ops to decide about; what lies outside is there.
        kept: ops among them whose outputs are kept in any case.
    """

    def __init__(self, graph: Graph, ops: Sequence[int], kept: frozenset[int] = frozenset()) -> None:
        self.free = [o for o in ops if graph.droppable[o] and o not in kept]
        number = {o: i for i, o in enumerate(self.free)}
        count = self.count = len(self.free)
        self.nbytes = np.asarray([graph.nbytes[o] for o in self.free], dtype=np.float64)
        # A little more than nothing: among equals, the plan that replays less.
        self.seconds = np.asarray([graph.seconds[o] for o in self.free]) + 1e-9
        self.copied = np.asarray([graph.overwritten[o] for o in self.free], dtype=bool)
        source, sink = 2 * count, 2 * count + 1  # x: 0 ... count-1, y: count ... 2·count-1
        edges = [(i, count + i) for i in range(count)] + [(count + i, sink) for i in range(count)]
        edges += [(i, sink) for i in range(count)]
        edges += [(source, i) for o, i in number.items() if graph.demanded[o]]
        edges += [(count + i, number[u]) for o, i in number.items() for u in graph.reads[o] if u in number]
        # Edges with their reverses, so that flow and capacity have one and the same layout.
        tails, heads = np.asarray(edges, dtype=np.int64).reshape(-1, 2).T
        order = csr_matrix(
            (
                np.arange(1, 2 * len(edges) + 1),
                (np.concatenate((tails, heads)), np.concatenate((heads, tails))),
            ),
            shape=(2 * count + 2, 2 * count + 2),
        )
        self.source = source
        self.edges = len(edges)
        self.place = order.data - 1
        self.network = csr_matrix((order.data.astype(np.int32), order.indices, order.indptr), shape=order.shape)

    def cheapest(self, price: float, room: float = 0.0) -> set[int]:
        """The ops to replay if a byte kept costs ``price`` seconds, and a byte that a replay makes ``room`` seconds."""
        return self.solve(price * self.nbytes, self.seconds + room * self.nbytes, np.zeros(self.count))

    def solve(self, keep: Floats, replay: Floats, need: Floats) -> set[int]:
        """The ops to replay, at costs in seconds for each op of ``free``.

        Args:
            keep: of keeping its outputs.
            replay: of running it again.
            need: of having its outputs in backward at all, kept or not.
        """
        count = self.count
        if not count:
            return set()
        costs = np.full(2 * self.edges, np.inf)
        costs[:count] = np.where(self.copied, np.inf, keep)
        costs[count : 2 * count], costs[2 * count : 3 * count] = replay, need
        costs[self.edges :] = 0
        finite = np.isfinite(costs)
        scale = (_ALL - self.edges) / costs[finite].sum()
        capacity = np.full(2 * self.edges, _ALL, dtype=np.int32)
        capacity[finite] = np.rint(costs[finite] * scale)
        network = self.network
        network.data[:] = capacity[self.place]
        flow = maximum_flow(network, self.source, self.source + 1).flow
        left = network.data - flow.data > 0
        ends = np.concatenate(([0], np.cumsum(left)))[network.indptr].astype(network.indptr.dtype)
        residual = csr_matrix((np.ones(ends[-1]), network.indices[left], ends), shape=network.shape)
        reached = breadth_first_order(residual, self.source, return_predecessors=False)
        return {self.free[i - count] for i in reached.tolist() if count <= i < 2 * count}
