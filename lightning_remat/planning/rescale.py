"""The same step at another size: a trace of one shape turned into an estimate for another.

What is known of the new shape is how many elements each op put out, which a planned step tells for nothing. Values
grow with the op that makes them; so do its time and scratch memory. Other memory grows with the op that it belongs to,
except for gradients of weights, which are as large as ever.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from lightning_remat.planning.trace import NEED, NEVER, OTHER, RUN, SAVE, Event, Trace, TraceOp


def rescaled(trace: Trace, sizes: Sequence[int]) -> Trace:
    """An estimate of ``trace`` with other sizes.

    Args:
        trace: a step with the same sequence of ops.
        sizes: for each op, elements of its first output; -1: not known.
    """
    factors = [s / op.size if s > 0 and op.size > 0 else 1.0 for op, s in zip(trace.ops, sizes, strict=True)]
    ops = [
        replace(op, seconds=op.seconds * f, scratch=round(op.scratch * f), state=_state(op, f), size=size)
        for op, f, size in zip(trace.ops, factors, sizes, strict=True)
    ]
    nbytes = [round(b * factors[maker]) for b, maker in zip(trace.nbytes, trace.makers, strict=True)]
    return replace(trace, ops=ops, nbytes=nbytes, events=_rescaled_events(trace, factors))


def _state(op: TraceOp, factor: float) -> int:
    """What a record holds: a generator's state is as large as ever."""
    return op.state if op.kind == "random" else round(op.state * factor)


def _rescaled_events(trace: Trace, factors: Sequence[float]) -> list[Event]:
    events: list[Event] = []
    weights = _weights_in_backward(trace, factors)
    current = 0
    staying = 0  # bytes that nodes which are running may still allocate and that do not grow
    balance = scaled = 0  # of memory that grows
    savers = _savers(trace)
    for kind, a, b in trace.events:
        if kind == RUN:
            current = a
        elif kind == NEED:
            current = savers[a]
            staying += next(weights)
        elif kind == OTHER:
            f = factors[current]
            top = a if a <= 0 else round(min(staying, a) + max(0, a - staying) * f)
            fixed = min(staying, max(b, 0))
            staying -= fixed
            grown = b - fixed
            # What was allocated at one size is released at that size: the books must close as they did.
            before, balance = balance, balance + grown
            if grown > 0:
                net = round(grown * f)
            else:
                net = round(scaled * balance / before) - scaled if before > 0 else round(grown * f)
            scaled += net
            events.append((OTHER, a if a == NEVER else max(top, net + fixed) if a >= b else top, net + fixed))
            continue
        events.append((kind, a, b))
    return events


def _savers(trace: Trace) -> list[int]:
    """For each slot, the op whose node holds it."""
    found = [0] * trace.slots
    current = 0
    for kind, a, _ in trace.events:
        if kind == RUN:
            current = a
        elif kind == SAVE:
            found[a] = trace.saver(a, current)
    return found


def _weights_in_backward(trace: Trace, factors: Sequence[float]) -> Iterator[int]:
    """For each request of backward, bytes of gradients that do not grow and are made until the next request.

    Backward goes through the ops from the last to the first, so it makes those of all ops down to the next request's.
    """
    weights = list(trace.weights) if len(trace.weights) == len(trace.ops) else [0] * len(trace.ops)
    for o, op in enumerate(trace.ops):
        if factors[o] != 1.0:
            # A weight that was cast is a value; its gradient has its size.
            weights[o] += sum(trace.nbytes[v] for v in op.inputs if factors[trace.makers[v]] == 1.0)
    savers = _savers(trace)
    order = [savers[slot] for kind, slot, _ in trace.events if kind == NEED]
    down_to = len(weights)
    for following in [*order[1:], -1]:
        if following + 1 < down_to:
            yield sum(weights[following + 1 : down_to])
            down_to = following + 1
        else:
            yield 0
