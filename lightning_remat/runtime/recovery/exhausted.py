"""What is said when memory has run out for good: the one error of a step, and notes on errors that are not a step's."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence

import torch

from lightning_remat.engine.out_of_memory import bytes_asked, row_of
from lightning_remat.errors import NoMemoryLeft
from lightning_remat.runtime.room import Room, free_memory
from lightning_remat.sizes import format_bytes

THE_STEP = "the step itself"
"""Name, among what holds memory, of what a step needs beside what is there between steps."""

_IDLE = re.compile(r"and ([\d.]+) (bytes|[KMGT]iB) is reserved by PyTorch but unallocated")
_UNITS = {"bytes": 1, "KiB": 1024, "MiB": 1024**2, "GiB": 1024**3, "TiB": 1024**4}
_SPARE = 0.95  # of what would fit by estimate, which scales a trace

_NOT_OURS = {
    "the optimizer step": "running it again would apply a part of the update twice",
    "a training step": "retries=0 lets such errors through",
    "validation": "nothing is kept for backward there, so that a tighter plan would free nothing",
    "data loading": "the batch is not there yet, and its memory is no plan's to give back",
    "a callback": "what it has done so far cannot be taken back",
}

_ADVICE = {
    "a training step": "Leave out retries=0, and the batch is run again under a plan that needs less.",
    "validation": "Give validation smaller batches.",
}


def exhausted(
    error: BaseException,
    *,
    device: torch.device,
    static_parts: Mapping[str, int],
    plan_peak: int | None,
    tries: Sequence[str],
    batch: int | None,
    room: Room | None = None,
) -> NoMemoryLeft:
    """The error of a step that does not fit under any plan: raise it ``from`` the last one.

    Args:
        error: the last error of the allocator.
        device: where the step ran.
        static_parts: bytes that are there between steps, by what they are
            (:func:`~lightning_remat.runtime.static.static_parts`).
        plan_peak: the least that the step needs beside those in bytes, by the tightest plan; None: never traced.
        tries: what was tried, each in a few words that stand for themselves ("the plan for 3.0 GiB").
        batch: examples in the batch; None: unknown.
        room: what is free now that the failed step has been taken back; None: it is looked up.
    """
    room = free_memory(device) if room is None else room
    asked = bytes_asked(error)
    held = {name: size for name, size in static_parts.items() if size > 0}
    if plan_peak is not None:
        held[THE_STEP] = plan_peak
    lines = [
        f"Out of memory: this training step does not fit on {device}, even under the plan that needs least. "
        + _balance(asked, room, static_parts, plan_peak),
        f"What holds memory: {_makeup(held)}.",
        f"What was tried: {_numbered(tries)}.",
        f"What would help: {_numbered(_advice(error, device, static_parts, plan_peak, batch, room))}.",
        "No batch was skipped: training stops at this one.",
    ]
    row = row_of(error)
    if row is not None and row.otherwise:
        lines.append(
            f"What {row.source} said ({_first_line(error)}) is also its word for {row.otherwise}: if it comes at any "
            "batch size, that is it."
        )
    return NoMemoryLeft("\n".join(lines), asked, room.free_bytes, held, tries)


def with_note(error: BaseException, text: str) -> BaseException:
    """Add a line to an error that is raised again, under its traceback; the same error, for ``raise``.

    Before Python 3.11, which has notes, the line goes to the end of the error's text.
    """
    if sys.version_info >= (3, 11):
        error.add_note(text)
    else:
        append_note(error, text)
    return error


def append_note(error: BaseException, text: str) -> None:
    """What :func:`with_note` does where there are no notes: ``__notes__`` for those who look there, and the text."""
    notes = [*getattr(error, "__notes__", ()), text]
    # Not declared before Python 3.11; an exception takes any attribute.
    error.__dict__["__notes__"] = notes
    first = error.args[0] if error.args else ""
    error.args = (f"{first}\n{text}" if first else text, *error.args[1:])


def note_outside(where: str, tries: Sequence[str] = ()) -> str:
    """What to say of an error outside of training steps, which nobody runs again.

    Args:
        where: ``"a training step"`` (without retries), ``"the optimizer step"``, ``"validation"``, ``"data loading"``,
            ``"a callback"``, or other words that name the place.
        tries: what was tried before it was raised again.
    """
    reason = _NOT_OURS.get(where, "only training steps can be taken back")
    tried = f"What was tried: {_numbered(tries)}. " if tries else ""
    return (
        f"lightning-remat: out of memory in {where}, which is not run again: {reason}. {tried}"
        f"{_ADVICE.get(where, 'Leave it more room with a larger margin= or a smaller budget=.')} No batch was skipped."
    )


def _balance(asked: int | None, room: Room, static_parts: Mapping[str, int], plan_peak: int | None) -> str:
    """What is needed and what is there."""
    parts = []
    if asked is not None:
        parts.append(f"{_exact(asked)} could not be had.")
    if room.free_bytes is not None and room.total_bytes is not None:
        parts.append(
            f"With the step taken back, {format_bytes(room.free_bytes)} of {format_bytes(room.total_bytes)} are free, "
            f"limited by {room.limited_by}."
        )
    if plan_peak is not None:
        static = sum(static_parts.values())
        parts.append(
            f"The step needs {format_bytes(plan_peak)} beside the {format_bytes(static)} that are there between steps"
            + (
                f": {_exact(plan_peak - room.free_bytes)} are missing."
                if room.free_bytes is not None and plan_peak > room.free_bytes
                else "."
            )
        )
    return " ".join(parts) or "The allocator named no figures."


def _advice(
    error: BaseException,
    device: torch.device,
    static_parts: Mapping[str, int],
    plan_peak: int | None,
    batch: int | None,
    room: Room,
) -> list[str]:
    advice = []
    static = sum(static_parts.values())
    # What could not be had counts, too: one huge tensor is no matter of optimizer state.
    step = max(plan_peak if plan_peak is not None else (room.total_bytes or 0) // 2, bytes_asked(error) or 0)
    mostly_static = static > step
    if mostly_static:
        advice.append(_less_static(static_parts, static))
    smaller = _smaller(static_parts, plan_peak, batch, room.free_bytes)
    if smaller:
        advice.append(smaller)
    idle = _idle(error, device)
    if idle >= max(bytes_asked(error) or 0, (room.total_bytes or 0) // 20, 1):
        advice.append(
            f"PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True in the environment: PyTorch holds {format_bytes(idle)} "
            "in pieces that are too small"
        )
    if room.limited_by.startswith(("the limit", "the control group", "torch.cuda.set_per_process")):
        kind = " of the container or job" if room.limited_by.startswith("the control group") else ""
        total = f" (now {format_bytes(room.total_bytes)})" if room.total_bytes is not None else ""
        advice.append(f"a higher limit{kind}: it is {room.limited_by}{total} that is met first")
    return advice


def _less_static(static_parts: Mapping[str, int], static: int) -> str:
    state = static_parts.get("optimizer state", 0)
    optimizer = "an optimizer with less state (SGD, Adafactor, 8-bit Adam), or " if state * 3 >= static else ""
    return (
        f"{optimizer}sharding over several devices (FSDP, DeepSpeed): {format_bytes(static)} are there between steps, "
        "and no plan makes that less"
    )


def _smaller(static_parts: Mapping[str, int], plan_peak: int | None, batch: int | None, free: int | None) -> str:
    """A smaller batch, by about how much; ``""``: none is small enough.

    Activations grow with the batch. Gradients that are not there between steps come with the step, and do not.
    """
    words = "a smaller batch or shorter sequences"
    again = " (accumulate_grad_batches makes up for it)"
    if plan_peak is None or free is None or plan_peak <= free:
        return words + again
    gradients = min(plan_peak, max(0, static_parts.get("parameters", 0) - static_parts.get("gradients", 0)))
    if free <= gradients:
        return ""
    share = (free - gradients) / (plan_peak - gradients) * _SPARE
    if batch is None or batch < 1:
        return f"{words}, by about {100 - 100 * share:.0f} %{again}"
    if batch * share < 1:
        return f"shorter sequences, by about {100 - 100 * share:.0f} % (one example is too large)"
    return f"{words}: about {int(batch * share)} examples instead of {batch}{again}"


def _idle(error: BaseException, device: torch.device) -> int:
    """Bytes that the caching allocator of a CUDA device held without using them when it failed."""
    if device.type != "cuda":
        return 0
    found = _IDLE.search(str(error))
    if found is not None:
        return int(float(found[1]) * _UNITS[found[2]])
    try:
        return torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    except Exception:  # a broken device must not take the place of the error that is being told
        return 0


def _makeup(held: Mapping[str, int]) -> str:
    largest_first = sorted(held.items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {format_bytes(size)}" for name, size in largest_first) or "nothing that is known"


def _numbered(items: Sequence[str]) -> str:
    if len(items) < 2:
        return items[0] if items else "nothing"
    return "; ".join(f"({number}) {item}" for number, item in enumerate(items, start=1))


def _exact(size: int) -> str:
    return f"{format_bytes(size)} ({size:,} bytes)" if size >= 1024 else f"{size} bytes"


def _first_line(error: BaseException) -> str:
    return f'"{str(error).splitlines()[0][:120]}"' if str(error) else type(error).__name__
