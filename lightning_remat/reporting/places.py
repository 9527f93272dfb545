"""Where in a step something happens: which op's node saved a slot, which module is at work in an event."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_remat.planning.trace import NEED, OTHER, RUN, SAVE, Trace

FORWARD, BACKWARD = "forward", "backward"

# Ops that save their own first result, by name; what other ops make is saved by those that read it. After PyTorch's
# derivatives.yaml, where formulas use `result`.
_SAVE_THEIR_RESULT = frozenset(
    (
        "relu",
        "sigmoid",
        "tanh",
        "exp",
        "exp2",
        "expm1",
        "sqrt",
        "rsqrt",
        "reciprocal",
        "tan",
        "_softmax",
        "_log_softmax",
        "logsumexp",
        "cumprod",
        "prod",
        "norm",
        "linalg_vector_norm",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
    )
)


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
    """The RUN or NEED that an event belongs to; -1 if there is none.

    Memory that is nobody's value is noted when the next event comes. In forward it is therefore part of the op that
    follows, whose RUN is written when it is done; in backward of the node whose values were asked for before.
    """
    events = trace.events
    before = next((i for i in range(event, -1, -1) if events[i][0] in (RUN, NEED)), -1)
    if events[event][0] == OTHER and (before < 0 or events[before][0] == RUN):
        after = next((i for i in range(event, len(events)) if events[i][0] in (RUN, NEED)), -1)
        if after >= 0 and events[after][0] == RUN:
            return after
    return before


def savers(trace: Trace) -> dict[int, tuple[int, int]]:
    """For each slot, the op whose node saved it (-1 if no op ran), and the value.

    A trace does not say; but autograd saves what an op reads before it runs, and what it makes afterwards.
    """
    found: dict[int, tuple[int, int]] = {}
    waiting: list[int] = []
    last = -1
    for kind, operand, value in trace.events:
        if kind == RUN:
            for slot in waiting:
                if not _saved_afterwards(trace, last, found[slot][1], operand):
                    found[slot] = operand, found[slot][1]
            waiting.clear()
            last = operand
        elif kind == SAVE:
            found[operand] = last, value
            waiting.append(operand)
        elif kind == NEED:
            waiting.clear()
    return found


def _saved_afterwards(trace: Trace, last: int, value: int, following: int) -> bool:
    """Whether a value that was saved between two ops was saved by the first one."""
    if last < 0 or value not in trace.ops[last].outputs:
        return False
    if value != trace.ops[last].outputs[0] or value not in trace.ops[following].inputs:
        return True
    name = trace.ops[last].name.split(".")
    return len(name) > 1 and name[1].removesuffix("_") in _SAVE_THEIR_RESULT
