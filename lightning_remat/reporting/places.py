"""Where in a step something happens: which op's node saved a slot, which module is at work in an event."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_remat.planning.trace import NEED, RUN, SAVE, Trace

FORWARD, BACKWARD = "forward", "backward"


@dataclass(frozen=True, kw_only=True)
class PeakPlace:
    """Where in the step the memory is highest.

    Attributes:
        event: index into the trace's events.
        part: ``"forward"`` or ``"backward"``.
        module: qualified name of the module at work; ``""`` outside of modules.
        recomputing: the peak is reached while values are computed again.
    """

    event: int
    part: str
    module: str
    recomputing: bool


def peak_place(trace: Trace, event: int, replayed: set[int]) -> PeakPlace:
    """Which module is at work in an event, if the ops of ``replayed`` run again."""
    if not trace.events:
        return PeakPlace(event=event, part=FORWARD, module="", recomputing=False)
    saved_by = savers(trace)
    at = _marker(trace, event)
    kind, operand, _ = trace.events[at] if at >= 0 else (RUN, 0, 0)
    if kind == RUN:
        module = trace.ops[operand].module if trace.ops else ""
        return PeakPlace(event=event, part=FORWARD, module=module, recomputing=False)
    saver, value = saved_by.get(operand, (-1, -1))
    again = at == event and value >= 0 and trace.makers[value] in replayed
    module = trace.ops[saver].module if saver >= 0 else ""
    return PeakPlace(event=event, part=BACKWARD, module=module, recomputing=again)


def _marker(trace: Trace, event: int) -> int:
    """The RUN or NEED that an event belongs to, the last one before it; -1 if there is none."""
    return next((i for i in range(event, -1, -1) if trace.events[i][0] in (RUN, NEED)), -1)


def savers(trace: Trace) -> dict[int, tuple[int, int]]:
    """For each slot, the op whose node saved it (-1 if no op ran), and the value."""
    found: dict[int, tuple[int, int]] = {}
    last = -1
    for kind, operand, value in trace.events:
        if kind == RUN:
            last = operand
        elif kind == SAVE:
            found[operand] = trace.saver(operand, last), value
    return found
