"""Random traces that are small enough to be planned exactly, and what it takes to write any trace by hand.

Events come in an order that a real step could have: what is read or saved is held at that moment, a slot is filled
once, and what autograd has saved is not overwritten. :func:`check` states these rules, so that a trace from elsewhere
can be held against them.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence

from lightning_remat.planning.trace import EXIT, FREE, NEED, NEVER, OTHER, RELEASE, RUN, SAVE, Trace, TraceOp


class Writer:
    """Writes a trace event by event."""

    def __init__(self) -> None:
        self.trace = Trace()

    def run(
        self,
        name: str,
        inputs: Iterable[int] = (),
        sizes: Iterable[int] = (),
        *,
        seconds: float = 1.0,
        writes: int = -1,
        droppable: bool = True,
        scratch: int = 0,
        state: int = 0,
        kind: str = "cheap",
    ) -> tuple[int, ...]:
        """An op runs; returns its new values, of the given sizes (in place: one, of the old one's size)."""
        trace = self.trace
        if writes >= 0:
            sizes = (trace.nbytes[writes],)
        first = len(trace.nbytes)
        trace.nbytes += sizes
        outputs = tuple(range(first, len(trace.nbytes)))
        trace.makers += [len(trace.ops)] * len(outputs)
        trace.events.append((RUN, len(trace.ops), 0))
        inputs = tuple(dict.fromkeys(inputs))
        trace.ops.append(TraceOp(name, "", kind, inputs, outputs, writes, droppable, seconds, scratch, state))
        return outputs

    def save(self, value: int) -> int:
        """Autograd saves a value; returns the slot."""
        slot = self.trace.slots
        self.trace.slots += 1
        self.trace.events.append((SAVE, slot, value))
        return slot

    def free(self, value: int) -> None:
        """The program lets go."""
        self.trace.events.append((FREE, value, 0))

    def need(self, slot: int) -> None:
        """Backward asks."""
        self.trace.events.append((NEED, slot, 0))

    def release(self, slot: int) -> None:
        """The node lets go."""
        self.trace.events.append((RELEASE, slot, 0))

    def other(self, top: int, net: int) -> None:
        """Memory that is nobody's value."""
        self.trace.events.append((OTHER, top, net))


def check(trace: Trace) -> None:
    """Raise AssertionError if a trace is not one that a step could have."""
    held: set[int] = set()
    born: set[int] = set()
    holds: dict[int, int] = {}
    next_op = 0
    for kind, a, b in trace.events:
        if kind == RUN:
            op = trace.ops[a]
            assert a == next_op, "ops run in order, each once"
            next_op += 1
            assert held.issuperset(op.inputs), "what an op reads is there"
            assert len(set(op.inputs)) == len(op.inputs), "inputs are named once"
            assert all(trace.makers[v] == a for v in op.outputs)
            assert born.isdisjoint(op.outputs), "a value is made once"
            if op.writes >= 0:
                assert op.writes in op.inputs, "a write reads what it overwrites"
                assert op.writes not in holds.values(), "what autograd has saved is not overwritten"
                assert [trace.nbytes[v] for v in op.outputs] == [trace.nbytes[op.writes]], "one value, same storage"
                held.discard(op.writes)
            held.update(op.outputs)
            born.update(op.outputs)
        elif kind == FREE:
            assert a in held, "only what is held is let go"
            held.discard(a)
        elif kind == SAVE:
            assert b in held, "what is saved is there"
            assert a not in holds, "a slot is filled once"
            assert 0 <= a < trace.slots
            holds[a] = b
        elif kind in (NEED, RELEASE):
            assert a in holds, "the slot is filled"
            if kind == RELEASE:
                holds[a] = -1
        else:
            assert a >= b or b <= 0, "what remains was there"
    assert next_op == len(trace.ops)
    assert len(born) == len(trace.nbytes)


def random_trace(rng: random.Random, droppable: int = 8, writes: bool = True) -> Trace:
    """A random step with at most ``droppable`` ops that can be dropped.

    Args:
        rng: where chance comes from; hypothesis' ``st.randoms()`` makes one that it can shrink.
        droppable: the most ops that can be dropped.
        writes: with ops in place.
    """
    out = Writer()
    trace = out.trace
    visible: list[int] = []
    open_nodes: list[list[int]] = []
    left = rng.randint(1, droppable)

    def some(values: Sequence[int], most: int) -> list[int]:
        return rng.sample(list(values), min(len(values), rng.randint(0, most)))

    def forward() -> None:
        nonlocal left
        saved = {trace.events[i][2] for i in range(len(trace.events)) if trace.events[i][0] == SAVE}
        recent = visible[-3:] if rng.random() < 0.7 else visible
        inputs = some(recent, 3)
        can_drop = rng.random() < 0.85 and left > 0
        left -= can_drop
        options = {
            "seconds": float(rng.randint(0, 9)),
            "droppable": can_drop,
            "scratch": rng.choice((0, 0, 0, rng.randint(1, 20))),
            "state": rng.choice((0, 0, rng.randint(1, 3))),
        }
        read = [v for v in visible if v not in saved and any(v in op.inputs for op in trace.ops)]
        if read and rng.random() < 0.5:
            inputs = [read[-1], *(v for v in inputs if v != read[-1])]  # others read what is about to change
        old = next((v for v in inputs if v not in saved), -1)
        if writes and old >= 0 and rng.random() < 0.4:
            made = out.run("write", inputs, writes=old, **options)
            visible.remove(old)
        else:
            made = out.run("op", inputs, [rng.randint(0, 30) for _ in range(rng.choice((1, 1, 1, 2, 3)))], **options)
        visible.extend(made)
        inputs = [v for v in inputs if v in visible]
        kept = some([*inputs, *made], 3)
        if kept:
            open_nodes.append([out.save(v) for v in kept])
        if rng.random() < 0.15:
            other()
        for v in some(visible, 2) if rng.random() < 0.6 else ():
            visible.remove(v)
            out.free(v)

    def other() -> None:
        net = rng.randint(-15, 20)
        out.other(rng.choice((NEVER, net)) if net <= 0 else net + rng.choice((0, rng.randint(0, 25))), net)

    def backward(until: int) -> None:
        while len(open_nodes) > until:
            node = open_nodes.pop() if rng.random() < 0.85 else open_nodes.pop(rng.randrange(len(open_nodes)))
            for slot in node:
                if rng.random() < 0.9:
                    out.need(slot)
            if rng.random() < 0.8:
                other()
            for slot in node:
                if rng.random() < 0.95:
                    out.release(slot)
            if visible and rng.random() < 0.1:
                out.free(visible.pop(0))

    while left > 0:
        forward()
        if rng.random() < 0.05:  # a backward in the middle of the step
            backward(rng.randint(0, len(open_nodes)))
    for v in some(visible, len(visible)):
        visible.remove(v)
        out.free(v)
    if rng.random() < 0.7:
        trace.events.append((EXIT, 0, 0))
    backward(0)
    check(trace)
    return trace
