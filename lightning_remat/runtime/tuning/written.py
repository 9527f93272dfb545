"""What is known of steps as plain data, for checkpoints, and back.

Strings, numbers, lists and dictionaries only, so that ``torch.load(weights_only=True)`` reads it. What is long is JSON,
compressed, as text. A shape that was never traced is its sizes: its trace is scaled again from one that was.

Nothing that is read here can change a result: the tape compares every op with what it expects, and drops none that it
could not replay. So what is checked on reading is that nobody will stumble over it.
"""

from __future__ import annotations

import base64
import json
import math
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch._ops import OpOverload

from lightning_remat.planning.plan import Candidate, PlanResult
from lightning_remat.planning.rescale import rescaled
from lightning_remat.planning.simulation import simulate
from lightning_remat.planning.trace import EXIT, FREE, NEED, NEVER, OTHER, RELEASE, RUN, SAVE, Trace
from lightning_remat.runtime.memory import PeakResult
from lightning_remat.runtime.tuning.known import MOST_SHAPES, Known, KnownSteps
from lightning_remat.runtime.tuning.tuner import Trial, Tuner

MOST_BYTES = 8 * 1024**2
"""How much the written form takes at most."""

DAMAGED = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, RecursionError, MemoryError, zlib.error)
"""What reading a damaged state raises; ValueError where it is our own check."""

_LONGEST = 2**28  # characters that a packed text may come to: nobody is to fill our memory with a small checkpoint
_MOST_TRIALS = 1000
_MOST = -NEVER  # no number of bytes or elements is larger


# ---------------------------------------------------------------------- to plain data


def write_steps(known: KnownSteps, most_bytes: int = MOST_BYTES) -> dict[str, Any]:
    """Everything that is worth having of ``known``, the smallest shapes left out if it is more than ``most_bytes``.

    A shape is worth nothing without those on the way to it from where a step begins, nor without the one that its
    trace was scaled from: these come with it.
    """
    ways = _ways(known)
    sources = {k.number: _source(k, known, ways) for k in known.all if k.number in ways}
    texts: dict[int, dict[str, Any]] = {}
    kept: set[int] = set()
    total = 0
    for k in sorted((k for k in known.all if k.number in ways), key=lambda k: (-k.nbytes, k.number)):
        missing = _needed(k.number, ways, sources) - kept
        for n in missing - texts.keys():
            texts[n] = _write_step(known.all[n], sources[n], known)
        size = sum(length(texts[n]) for n in missing)
        if total + size <= most_bytes:
            kept |= missing
            total += size
    order = {n: i for i, n in enumerate(sorted(kept))}
    steps = []
    for n in order:
        step = texts[n]
        for name in ("like", "planned_like"):
            step[name] = order.get(step[name])
        steps.append(step)
    return {
        "steps": steps,
        "roots": [[accumulating, order[k.number]] for accumulating, k in known.roots.items() if k.number in order],
        "turns": [
            [order[base], position, what, order[k.number]]
            for (base, position, what), k in known.turns.items()
            if base in order and k.number in order
        ],
    }


def _ways(known: KnownSteps) -> dict[int, list[int]]:
    """For each step that can still be reached, those on the way to it."""
    ways: dict[int, list[int]] = {}
    for root in known.roots.values():
        ways.setdefault(root.number, [])
    found = list(ways)
    while found:
        base = found.pop()
        for (number, _, _), k in known.turns.items():
            if number == base and k.number not in ways:
                ways[k.number] = [*ways[base], base]
                found.append(k.number)
    return ways


def _needed(number: int, ways: dict[int, list[int]], sources: dict[int, int | None]) -> set[int]:
    """A step and all without which it is worth nothing."""
    needed: set[int] = set()
    coming = [number]
    while coming:
        n = coming.pop()
        if n not in needed:
            needed.add(n)
            source = sources[n]
            coming += ways[n] if source is None else [*ways[n], source]
    return needed


def _source(k: Known, known: KnownSteps, ways: dict[int, list[int]]) -> int | None:
    """The traced step from which the trace can be made again by scaling; None for one that was traced itself."""
    alike = [
        t
        for t in known.all
        if t.traced and t.number in ways and t.sequence == k.sequence and len(t.trace.ops) == len(k.trace.ops)
    ]
    nearest = min(alike, key=lambda t: (abs(t.elements - k.elements), t.number), default=None)
    return None if k.traced or nearest is None else nearest.number


def _write_step(k: Known, source: int | None, known: KnownSteps) -> dict[str, Any]:
    step: dict[str, Any] = {
        "trace": _compressed(k.trace.to_json()) if source is None else None,
        "like": source,
        "sizes": pack([op.size for op in k.trace.ops]) if source is not None else None,
        "traced": k.traced,
        "passes": k.passes,
        "renewed": k.renewed,
        "sequence": k.sequence,
        "static_bytes": k.static,
        "parts": dict(k.parts),
        "met": k.met,
        "others": pack([_bits(drop) for drop, move in k.like if not any(move)]),
        "tuning": _write_tuning(k),
        "plan": None,
        "planned_like": None,
    }
    # Plans in which something moves are made anew from the trace: the next machine may have another disk.
    if k.result is not None and not any(c.moves for c in (k.result.chosen, *k.result.front)):
        result = k.result
        candidates = [result.chosen, result.plain, *result.front]
        step["plan"] = {
            "budget_bytes": result.budget_bytes,
            "static_bytes": result.static_bytes,
            "peak_bytes": result.chosen.peak_bytes,
            "candidates": pack([[_bits(c.drop), c.peak_bytes, float(c.extra_seconds)] for c in candidates]),
        }
        if result.trace is not k.trace:  # a larger shape's plan serves this one
            step["planned_like"] = next((o.number for o in known.all if o.trace is result.trace), None)
    return step


def _write_tuning(k: Known) -> dict[str, Any]:
    """How the plan was held against what was measured."""
    return {
        "tuner": k.tuner.state_dict(),
        "target": k.target,
        "stale": k.stale,
        "tries": k.tries,
        "measured_peak_bytes": None if k.measured is None else k.measured.peak_bytes,
        "extra_seconds": None if k.extra_seconds is None else float(k.extra_seconds),
    }


# ---------------------------------------------------------------------- and back


def read_steps(state: dict[str, Any]) -> tuple[KnownSteps, list[str]]:
    """Known steps from what :func:`write_steps` gave, and the names of ops that this process does not have.

    Raises:
        DAMAGED: it is something else.
    """
    steps = _list(state["steps"])
    _require(len(steps) <= MOST_SHAPES, "no more shapes than are told apart")
    unknown: set[str] = set()
    read: list[Known | None] = [None] * len(steps)
    for i, step in enumerate(steps):
        if step["trace"] is not None:
            read[i] = _read_step(step, read_trace(step["trace"]), unknown)
    for i, step in enumerate(steps):
        if step["trace"] is None:
            source = read[_index(step["like"], steps)]
            _require(steps[step["like"]]["trace"] is not None, "a shape is scaled from one that was traced")
            if source is not None:
                sizes = unpack(step["sizes"])
                _require(all(_whole(s, -1) for s in sizes), "sizes are numbers of elements")
                read[i] = _read_step(step, rescaled(source.trace, sizes), unknown)
    known = KnownSteps()
    links: dict[int, list[tuple[int, int | str, int]]] = {}
    for base, position, what, to in _list(state["turns"]):
        _require(_whole(position, 0) and (isinstance(what, str) or _whole(what, -1)), "a turn is an op or a size")
        links.setdefault(_index(base, steps), []).append((position, what, _index(to, steps)))
    roots = {bool(accumulating): _index(i, steps) for accumulating, i in _list(state["roots"])}
    reached = _reached(roots.values(), links, read)
    for i in sorted(reached):
        k = reached[i]
        k.number = len(known.all)
        known.all.append(k)
    known.roots = {accumulating: reached[i] for accumulating, i in roots.items() if i in reached}
    for base, position, what, to in _list(state["turns"]):
        if base in reached and to in reached:
            known.turns[reached[base].number, position, what] = reached[to]
    for i, k in reached.items():
        _read_plan(k, steps[i], read)
    return known, sorted(unknown)


def _reached(
    roots: Iterable[int], links: dict[int, list[tuple[int, int | str, int]]], read: Sequence[Known | None]
) -> dict[int, Known]:
    """Steps to which a way leads over others that are known here as well."""
    found: dict[int, Known] = {}
    coming = list(roots)
    while coming:
        i = coming.pop()
        k = read[i]
        if k is not None and i not in found:
            found[i] = k
            coming += [to for _, _, to in links.get(i, [])]
    return found


def _read_step(step: dict[str, Any], trace: Trace, unknown: set[str]) -> Known | None:
    """A step without its plan; None if one of its ops is not there."""
    names = {op.name for op in trace.ops}
    functions = {name: function for name in names if (function := overload(name)) is not None}
    if len(functions) < len(names):
        unknown |= names - functions.keys()
        return None
    others = tuple([(_drop(bits, trace), ()) for bits in _list(unpack(step["others"]))])
    parts = step["parts"]
    _require(isinstance(step["sequence"], str) and _whole(step["static_bytes"], -1), "a sequence and static memory")
    _require(_whole(step["passes"], 1) and _whole(step["met"], 0), "counts are whole numbers")
    _require(isinstance(parts, dict) and all(isinstance(n, str) and _whole(b, 0) for n, b in parts.items()), "bytes")
    return Known(
        number=-1,
        trace=trace,
        functions=[functions[op.name] for op in trace.ops],
        traced=bool(step["traced"]),
        passes=step["passes"],
        renewed=bool(step["renewed"]),
        sequence=step["sequence"],
        static=step["static_bytes"],
        parts=dict(parts),
        met=step["met"],
        like=others,
    )


def _read_plan(k: Known, step: dict[str, Any], read: Sequence[Known | None]) -> None:
    plan = step["plan"]
    if plan is not None:
        like = None if step["planned_like"] is None else read[_index(step["planned_like"], read)]
        trace = k.trace if like is None or len(like.trace.ops) != len(k.trace.ops) else like.trace
        found = [_candidate(c, trace) for c in _list(unpack(plan["candidates"]))]
        _require(len(found) > 2, "a plan comes with those that it was chosen from")
        _require(_whole(plan["budget_bytes"], 0) and _whole(plan["static_bytes"], 0), "bytes")
        chosen, plain, *front = found
        simulate(trace, chosen.drop)  # stumbles over what the checks let through
        result = PlanResult(
            trace=trace,
            static_bytes=plan["static_bytes"],
            budget_bytes=plan["budget_bytes"],
            chosen=chosen,
            front=tuple(front),
            plain=plain,
        )
        k.follow(result, k.static, k.parts, 0)
    else:
        simulate(k.trace, (False,) * len(k.trace.ops))
    _read_tuning(k, step["tuning"])


def _read_tuning(k: Known, tuning: dict[str, Any]) -> None:
    peak, seconds = tuning["measured_peak_bytes"], tuning["extra_seconds"]
    _require(_whole(tuning["target"], -_MOST) and _whole(tuning["tries"], 0), "counts are whole numbers")
    _require((peak is None or _whole(peak, 0)) and (seconds is None or _number(seconds)), "what was measured")
    k.tuner = _read_tuner(tuning["tuner"])
    k.target, k.stale = tuning["target"], tuning["stale"] is True
    k.tries = min(tuning["tries"], k.tries)
    k.measured = None if peak is None else PeakResult(peak_bytes=peak, timeline=())
    k.extra_seconds = None if seconds is None else float(seconds)


def _read_tuner(state: dict[str, Any]) -> Tuner:
    usual = {**Tuner().state_dict(), "ratio": 1.0, "width": 0.0}
    _require(set(state) == set(usual) and len(_list(state["trials"])) <= _MOST_TRIALS, "a tuner has its own figures")
    for name, value in usual.items():
        _require(_alike(state[name], value), "figures are of their kind")
    _require(0 < state["ratio"] < 1e6, "a ratio is a factor")
    for trial in state["trials"]:
        like = asdict(Trial(0, 0, 0))
        _require(set(trial) == set(like), "a trial has its own figures")
        for name, value in like.items():
            _require(_alike(trial[name], value) or (name == "measured" and trial[name] is None), "figures")
    tuner = Tuner()
    tuner.load_state_dict(state)
    return tuner


def _candidate(content: Any, trace: Trace) -> Candidate:
    bits, peak, seconds = content
    _require(_whole(peak, 0) and _number(seconds), "a plan has a peak and a time")
    return Candidate(_drop(bits, trace), peak, float(seconds))


def read_trace(text: Any) -> Trace:
    """A trace in which nothing points beyond the end.

    Raises:
        DAMAGED: it is something else.
    """
    trace = Trace.from_json(_expanded(text))
    ops, values = len(trace.ops), len(trace.nbytes)
    _require(len(trace.makers) == values and all(_whole(m, 0) and m < ops for m in trace.makers), "makers are ops")
    _require(all(_whole(b, 0) for b in trace.nbytes), "sizes are bytes")
    for op in trace.ops:
        names: tuple[object, ...] = (op.name, op.module, op.kind)
        flags: tuple[object, ...] = (op.droppable,)
        _require(all(isinstance(n, str) for n in names) and all(isinstance(f, bool) for f in flags), "an op has a name")
        _require(all(_whole(v, 0) and v < values for v in (*op.inputs, *op.outputs)), "an op has values")
        _require(_whole(op.writes, -1) and op.writes < values, "an op has values")
        _require(_whole(op.scratch, 0) and _whole(op.state, 0) and _whole(op.size, -1), "an op has sizes")
        _require(_number(op.seconds), "an op has a time")
    _require(_whole(trace.slots, 0) and trace.slots <= len(trace.events), "slots are counted")
    most = {RUN: ops, FREE: values, SAVE: trace.slots, NEED: trace.slots, RELEASE: trace.slots, EXIT: 1}
    for kind, a, b in trace.events:
        if kind == OTHER:
            _require(_whole(a, NEVER) and _whole(b, NEVER), "memory is bytes")
        else:
            _require(_whole(a, 0) and a < most[kind] and _whole(b, 0), "an event is about what is there")
            _require(kind != SAVE or b < values, "a slot holds a value")
    _require(all(_whole(s, -1) and s < ops for s in trace.savers), "savers are ops")
    _require(all(_whole(w, 0) for w in trace.weights) and all(_whole(b, 0) for b in trace.borders), "bytes, and places")
    _require(_number(trace.forward_seconds) and _number(trace.backward_seconds), "times are seconds")
    words: tuple[object, ...] = (trace.device, trace.source)
    _require(all(isinstance(w, str) for w in words), "a device and a source")
    return trace


def overload(name: str) -> Any:
    """The op of a name such as ``"aten.addmm.default"``; None if this process has none."""
    try:
        namespace, packet, which = name.split(".")
        function = getattr(getattr(getattr(torch.ops, namespace), packet), which)
    except (AttributeError, RuntimeError, ValueError):
        return None
    return function if isinstance(function, OpOverload) and str(function) == name else None


# ---------------------------------------------------------------------- small things


def pack(content: Any) -> str:
    """Plain data as compressed text."""
    return _compressed(json.dumps(content, separators=(",", ":")))


def unpack(text: Any) -> Any:
    """The reverse.

    Raises:
        DAMAGED: the text is not from there.
    """
    return json.loads(_expanded(text))


def _compressed(text: str) -> str:
    return base64.b64encode(zlib.compress(text.encode(), 9)).decode()


def _expanded(text: Any) -> str:
    _require(isinstance(text, str), "packed data is text")
    reader = zlib.decompressobj()
    content = reader.decompress(base64.b64decode(text, validate=True), _LONGEST)
    _require(reader.eof, "packed data is whole")
    return content.decode()


def length(content: Any) -> int:
    """About how many bytes plain data takes in a checkpoint."""
    return len(json.dumps(content, separators=(",", ":")))


def _bits(drop: Sequence[bool]) -> str:
    return "".join(["1" if d else "0" for d in drop])


def _drop(bits: Any, trace: Trace) -> tuple[bool, ...]:
    _require(isinstance(bits, str) and len(bits) == len(trace.ops) and not set(bits) - {"0", "1"}, "a plan is 0 and 1")
    return tuple([c == "1" for c in bits])


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise ValueError(f"not so: {what}")


def _list(content: Any) -> list[Any]:
    _require(isinstance(content, list), "a list")
    found: list[Any] = content
    return found


def _index(i: Any, among: Sequence[Any]) -> int:
    _require(_whole(i, 0) and i < len(among), "an index")
    found: int = i
    return found


def _alike(value: Any, usual: Any) -> bool:
    """Whether a value is of the kind of the usual one, a number among possible ones."""
    if isinstance(usual, bool) or not isinstance(usual, (int, float)):
        return type(value) is type(usual)
    return _number(value) if isinstance(usual, float) else _whole(value, -_MOST)


def _whole(n: Any, least: int) -> bool:
    return isinstance(n, int) and not isinstance(n, bool) and least <= n <= _MOST


def _number(n: Any) -> bool:
    return isinstance(n, (int, float)) and not isinstance(n, bool) and math.isfinite(n) and abs(n) < 1e12
