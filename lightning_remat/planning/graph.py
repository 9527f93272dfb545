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

import numpy as np
from scipy.sparse import csr_matrix
from scipy.sparse.csgraph import breadth_first_order, maximum_flow

from lightning_remat.planning.trace import NEED, SAVE, Trace

_ALL = 2**30


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


def cheapest(graph: Graph, ops: Sequence[int], kept: frozenset[int], price: float, room: float = 0.0) -> set[int]:
    """The ops to replay, if bytes kept cost ``price`` seconds each and the rest of ``ops`` is to be kept.

    Args:
        graph: dependencies.
        ops: the ops to decide about; what lies outside is there.
        kept: ops among them whose outputs are kept in any case.
        price: seconds per byte kept.
        room: seconds per byte that a replay makes, for plans with small replays.
    """
    free = [o for o in ops if graph.droppable[o] and o not in kept]
    number = {o: i for i, o in enumerate(free)}
    count = len(free)
    if not count:
        return set()
    source, sink = 2 * count, 2 * count + 1  # x: 0 ... count-1, y: count ... 2·count-1
    tails: list[int] = []
    heads: list[int] = []
    costs: list[float] = []
    for o, i in number.items():
        # A little more than nothing: among equals, the plan that replays less.
        replay = graph.seconds[o] + room * graph.nbytes[o] + 1e-9
        keep = -1.0 if graph.overwritten[o] else price * graph.nbytes[o]
        tails += (i, count + i)
        heads += (count + i, sink)
        costs += (keep, replay)
        if graph.demanded[o]:
            tails.append(source)
            heads.append(i)
            costs.append(-1.0)
        for u in graph.reads[o]:
            if u in number:
                tails.append(count + i)
                heads.append(number[u])
                costs.append(-1.0)
    capacity = np.asarray(costs)
    finite = capacity >= 0
    total = capacity[finite].sum()
    scaled = np.where(finite, np.rint(capacity * ((_ALL - len(costs)) / total)), _ALL).astype(np.int32)
    network = csr_matrix((scaled, (tails, heads)), shape=(2 * count + 2, 2 * count + 2))
    flow = maximum_flow(network, source, sink).flow
    residual = network - flow
    residual.data = (residual.data > 0).astype(np.int32)
    residual.eliminate_zeros()
    reached = set(breadth_first_order(residual, source, return_predecessors=False).tolist())
    return {o for o, i in number.items() if count + i in reached}
