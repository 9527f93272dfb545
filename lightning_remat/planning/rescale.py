"""The same step at another size: a trace of one shape turned into an estimate for another.

What is known of the new shape is how many elements each op put out, which a planned step tells for nothing. Values
grow with the op that makes them; so do its time and scratch memory; other memory grows with the op that it belongs to.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from lightning_remat.planning.trace import NEED, NEVER, OTHER, RUN, SAVE, Event, Trace


def rescaled(trace: Trace, sizes: Sequence[int]) -> Trace:
    """An estimate of ``trace`` with other sizes.

    Args:
        trace: a step with the same sequence of ops.
        sizes: for each op, elements of its first output; -1: not known.
    """
    factors = [s / op.size if s > 0 and op.size > 0 else 1.0 for op, s in zip(trace.ops, sizes, strict=True)]
    ops = [
        replace(op, seconds=op.seconds * f, scratch=round(op.scratch * f), size=size)
        for op, f, size in zip(trace.ops, factors, sizes, strict=True)
    ]
    nbytes = [round(b * factors[maker]) for b, maker in zip(trace.nbytes, trace.makers, strict=True)]
    events: list[Event] = []
    saver = [0] * trace.slots
    current = 0
    balance = scaled = 0
    for kind, a, b in trace.events:
        if kind == RUN:
            current = a
        elif kind == SAVE:
            saver[a] = current
        elif kind == NEED:
            current = saver[a]
        elif kind == OTHER:
            f = factors[current]
            # What was allocated at one size is released at that size: the books must close as they did.
            balance += b
            net = round(b * f) if b > 0 else round(scaled * balance / (balance - b)) - scaled if balance != b else b
            scaled += net
            events.append((OTHER, a if a == NEVER else round(a * f), net))
            continue
        events.append((kind, a, b))
    return replace(trace, ops=ops, nbytes=nbytes, events=events)
