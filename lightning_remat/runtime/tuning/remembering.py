"""What a run has learned, for its checkpoints: a run that is resumed goes on with it and traces nothing again.

A state is plain data (see :mod:`lightning_remat.runtime.tuning.written`)::

    {"version": 1, "torch": ..., "kept_ops": [...], "counters": {...}, "budget": {...} or None}

It is a start, and no promise. Plans hold for a budget, a device and a model; where one of these is another, as much is
used as still holds. Since any plan is exact, a state that fits badly costs memory or time, and never a bit.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence, Set
from copy import copy
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lightning_remat.runtime.counters import Counters
from lightning_remat.runtime.saying import in_words, warn
from lightning_remat.runtime.static import LASTING, at_least, device_of, static_parts
from lightning_remat.runtime.tuning.known import Known, KnownSteps
from lightning_remat.runtime.tuning.ladder import RUNGS, WITHOUT_BLOCKS, Ladder
from lightning_remat.runtime.tuning.written import DAMAGED, read_steps, write_steps

if TYPE_CHECKING:
    from lightning_remat.runtime.tuning.pilot import Pilot

log = logging.getLogger("lightning_remat")

VERSION = 1

_PROGRESS = ("_step", "_to_trace", "_in_vain", "_lost_at", "_trace_at")
"""Where the pilot is in its search for sequences of ops."""

_MOST_NOTES = 100
_AGAIN = 3  # steps in which a peak is looked for that another version of PyTorch may have changed


@dataclass
class Memory:
    """What a pilot knows, apart from what belongs to one process.

    Attributes:
        known: steps and plans.
        given_up: there are too many sequences of ops to plan for.
        progress: see :data:`_PROGRESS`.
        static: bytes of what is there between steps and lasts, as far as they were known.
        device: type of the device that all of it is about.
        torch: PyTorch's version.
        default: the budget that was taken from the device, once a plan was measured to fit; else None.
        ladder: the search among fixed policies; None: there was none.
    """

    known: KnownSteps
    given_up: bool
    progress: dict[str, int]
    static: dict[str, int]
    device: str
    torch: str
    default: int | None
    ladder: Ladder | None

    def recall(self, pilot: Pilot) -> None:
        """Let a pilot that has not begun a step yet start from here."""
        pilot.known, pilot.given_up = self.known, self.given_up
        pilot.fallback.ladder = copy(self.ladder)
        if self.given_up:
            pilot.fallback.for_good = pilot.fallback.countable = True
            pilot.said.add("sequences")
        for name, value in self.progress.items():
            setattr(pilot, name, value)
        keep(self.known, pilot.tape.kept)
        pilot.recalled = self
        # Now, since a step may begin inside of an optimizer's, as in Lightning.
        pilot.optimizers.watch()

    def hold_against(self, pilot: Pilot, roots: Sequence[nn.Module]) -> None:
        """The first step of the pilot begins: keep what fits the model, the device and the budget that there are."""
        pilot.recalled = None
        device = device_of(roots)
        there = static_parts(roots, [], device)
        others = there["parameters"] != self.static["parameters"] > 0
        if roots and (device.type != self.device or others):
            log.info("The checkpoint's plans are for another model or device: the first step is traced anew.")
            pilot.known, pilot.given_up = KnownSteps(), False
            pilot.fallback.ladder = None
            pilot.fallback.for_good = pilot.fallback.countable = False
            for name in ("_to_trace", "_in_vain"):
                setattr(pilot, name, 0)
            return
        if self.given_up:
            log.info("As before the checkpoint, steps run under a fixed policy: the model runs too many sequences.")
            return
        pilot.before = self.static
        there = at_least(static_parts(roots, pilot.optimizers.of(roots), device), self.static)
        budget = pilot.chooser.resume(self.default, device, sum(there.values()))
        for known in self.known.all:
            known.steps = pilot.optimizers.steps
            if known.result is not None and known.result.budget_bytes != budget:
                known.result = None  # the trace holds, and a plan is made from it when such a step comes
                known.tries = 0
                known.stale = False
            elif known.result is not None and self.torch != str(torch.__version__):
                known.tries = _AGAIN
        if self.known.all:
            main = self.known.largest
            plan = in_words(main.result) if main is not None and main.result is not None else "plans are to be made"
            log.info("Goes on with what the checkpoint knows of %d shape(s); %s", len(self.known.all), plan)


@dataclass
class State:
    """A state that was read.

    Attributes:
        kept_ops: names of ops that are never dropped.
        counters: figures so far, by name.
        memory: what the pilot knew; None if there was none, or if it knew nothing.
    """

    kept_ops: list[str]
    counters: dict[str, Any]
    memory: Memory | None

    def count(self, counters: Counters) -> None:
        """Go on counting from here."""
        for name, value in self.counters.items():
            setattr(counters, name, list(value) if isinstance(value, list) else value)


def write(counters: Counters, kept_ops: Set[str], pilot: Pilot | None) -> dict[str, Any]:
    """The state as plain data."""
    figures = {field.name: getattr(counters, field.name) for field in fields(counters)}
    figures["notes"] = list(counters.notes[-_MOST_NOTES:])
    return {
        "version": VERSION,
        "torch": str(torch.__version__),  # it is a subclass of str, which weights_only does not admit
        "kept_ops": sorted(kept_ops),
        "counters": figures,
        "budget": None if pilot is None else _write_pilot(pilot),
    }


def _write_pilot(pilot: Pilot) -> dict[str, Any]:
    recalled, roots = pilot.recalled, pilot.roots
    if recalled is not None:
        static, device = recalled.static, recalled.device
    else:
        found = static_parts(roots, pilot.optimizers.of(roots), device_of(roots))
        static = {name: found[name] for name in LASTING}
        if not roots or not pilot.optimizers.steps:
            for before in (pilot.before, *(k.parts for k in pilot.known.all)):
                static = at_least(static, before)
        traced = [k.trace.device for k in pilot.known.all]
        device = traced[0] if traced else device_of(roots).type
    return {
        "device": device,
        "static": dict(static),
        "given_up": pilot.given_up and "sequences" in pilot.said,  # other reasons may be gone in another process
        "default_budget": recalled.default if recalled is not None else pilot.chooser.settled_default,
        "ladder": None if pilot.fallback.ladder is None else _write_ladder(pilot.fallback.ladder),
        "progress": {name.strip("_"): getattr(pilot, name) for name in _PROGRESS},
        **write_steps(pilot.known),
    }


def read(state: Any) -> State | None:
    """A state from plain data; None, with a warning, if it is none that we can read."""
    try:
        if not isinstance(state, Mapping) or "version" not in state:
            raise TypeError("it is none of lightning-remat's")
        if state["version"] != VERSION or isinstance(state["version"], bool):
            raise ValueError(f"it has version {state['version']!r}, and this release reads {VERSION}")
        kept_ops = list(state["kept_ops"])
        if not all(isinstance(name, str) for name in kept_ops):
            raise TypeError("names of ops are strings")
        memory = None if state["budget"] is None else _read_pilot(state["budget"], str(state["torch"]))
        return State(kept_ops, _read_counters(state["counters"]), memory)
    except DAMAGED as error:
        warn(
            f"the state of recomputation in the checkpoint cannot be used ({type(error).__name__}: {error}): what it "
            "knew is learned anew; results are the same."
        )
        return None


def _read_counters(figures: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for field in fields(Counters):
        if field.name not in figures:
            continue  # an earlier release did not count it
        value = found[field.name] = figures[field.name]
        if field.name == "notes":
            sound = isinstance(value, list) and all(isinstance(note, str) for note in value)
        elif value is None:
            sound = "None" in str(field.type)
        else:
            number = (int, float) if "float" in str(field.type) else (int,)
            sound = isinstance(value, number) and not isinstance(value, bool) and value >= 0
        if not sound:
            raise ValueError(f"counter {field.name} is {value!r}")
    return found


def _read_pilot(content: Mapping[str, Any], version: str) -> Memory | None:
    known, unknown = read_steps(dict(content))
    if unknown:
        log.info("The checkpoint knows steps with ops that are not here (%s): they are forgotten.", ", ".join(unknown))
    progress = {name: content["progress"][name.strip("_")] for name in _PROGRESS}
    static = {name: content["static"][name] for name in LASTING}
    for value in (*progress.values(), *static.values()):
        if isinstance(value, bool) or not isinstance(value, int) or value < -1:
            raise ValueError("whole numbers were expected")
    given_up = content["given_up"] is True
    ladder = None if content["ladder"] is None else _read_ladder(content["ladder"])
    default = content["default_budget"]
    if default is not None and (isinstance(default, bool) or not isinstance(default, int) or default < 1):
        raise ValueError("a budget is bytes")
    if not known.all and not given_up and ladder is None:
        return None
    return Memory(known, given_up, progress, static, str(content["device"]), version, default, ladder)


def _write_ladder(ladder: Ladder) -> dict[str, Any]:
    return {**asdict(ladder), "rungs": list(ladder.rungs)}


def _read_ladder(content: Mapping[str, Any]) -> Ladder:
    ladder = Ladder(**{**content, "rungs": tuple(content["rungs"])})
    whole: tuple[object, ...] = (ladder.at, ladder.failed_at, ladder.fitted, ladder.good, ladder.measured_peak or 0)
    if ladder.rungs not in (RUNGS, WITHOUT_BLOCKS) or not all(type(n) is int for n in whole):
        raise ValueError("a ladder has its own rungs")
    most = len(ladder.rungs)
    if not (0 <= ladder.at < most and -1 <= ladder.fitted < most and 0 <= ladder.failed_at <= most):
        raise ValueError("a ladder is searched between its ends")
    return ladder


def keep(known: KnownSteps, kept: Set[str]) -> None:
    """Make sure that no plan drops what is not to be dropped, whatever the state said."""
    for k in known.all:
        if _drops(k, kept):
            k.never_drop(set(kept))


def _drops(k: Known, kept: Set[str]) -> bool:
    plans = [] if k.result is None else [k.result.chosen.drop, k.result.smallest.drop]
    return any(op.name in kept and (op.droppable or any(drop[o] for drop in plans)) for o, op in enumerate(k.trace.ops))
