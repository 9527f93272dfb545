"""What is known of a model's steps: which sequences of ops at which shapes, and where one turns out to be another.

It is a tree. Every step begins like one entry; where it leaves what that expects, a *turn* leads to the entry that
knows how it goes on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

from lightning_remat.engine.planned import Script, script_for, without
from lightning_remat.planning.moving import fetch_order
from lightning_remat.planning.plan import Candidate, PlanResult, judged
from lightning_remat.planning.planner import Planner, pareto
from lightning_remat.planning.rescale import rescaled
from lightning_remat.planning.trace import Trace
from lightning_remat.planning.transfer import Transfer
from lightning_remat.runtime.memory import PeakResult
from lightning_remat.runtime.tuning.tuner import Tuner

MOST_SHAPES = 64
"""How many shapes are told apart, all sequences together."""

ESTIMATED = 0.98
"""Share of the room that a plan for a shape that was never traced may take."""

_SIMILAR = 1.15  # a plan for a shape of at most this many times the bytes serves a smaller one
_TRIES = 3  # steps in which the peak under a new plan is looked for; the shape may come up in none of them


@dataclass(eq=False)
class Known:
    """What is known of one sequence of ops at one shape.

    Attributes:
        number: identity, for turns.
        trace: as measured, or rescaled from another shape.
        functions: overload of each op.
        traced: the trace was measured.
        renewed: the gradients that are there when such a step begins go before its backward.
        passes: how many backward passes such a step has.
        sequence: the trace's fingerprint.
        script: instructions of the plan in force.
        lean: instructions of the plan with the smallest peak.
        result: the plan in force.
        static: memory between steps that it was made for.
        parts: what that consists of.
        steps: optimizer steps that had been seen when this was looked at.
        tuner: what is known of how predictions and measured peaks of such steps go together.
        target: what the plan in force was asked for with: at most so many bytes above static memory.
        stale: there is to be another plan; the one in force may be followed meanwhile.
        keeps_all: the plan in force drops nothing.
        tries: steps in which its peak is still to be measured.
        measured: what was counted in a step under the plan; None before.
        extra_seconds: time of replay and of fetching in the last such step; None before.
        like: plans for another shape of the same sequence: what they drop, and what they move.
        transfer: where contents may move to; None: nothing moves.
        recompute: whether a plan may drop anything.
        order: contents that leave under the plan in force, by number, in the order in which they are asked for.
        met: how often a step turned out to be this one.
    """

    number: int
    trace: Trace
    functions: Sequence[Any]
    traced: bool = True
    passes: int = 1
    renewed: bool = False
    sequence: str = ""
    script: Script = field(default_factory=list)
    lean: Script = field(default_factory=list)
    result: PlanResult | None = None
    planner: Planner | None = None
    static: int = -1
    parts: dict[str, int] = field(default_factory=dict)
    steps: int = -1
    tuner: Tuner = field(default_factory=Tuner)
    target: int = 0
    stale: bool = False
    keeps_all: bool = False
    tries: int = 0
    measured: PeakResult | None = None
    extra_seconds: float | None = None
    like: tuple[tuple[tuple[bool, ...], tuple[bool, ...]], ...] = ()
    transfer: Transfer | None = None
    recompute: bool = True
    order: list[int] = field(default_factory=list)
    met: int = 0

    def __post_init__(self) -> None:
        self.sequence = self.sequence or self.trace.sequence

    @property
    def names(self) -> str:
        """A fingerprint of the ops without their sizes: what fits one such step can be followed by another."""
        return sha256("\n".join(op.name for op in self.trace.ops).encode()).hexdigest()[:16]

    @property
    def nbytes(self) -> int:
        """All values of the step together."""
        return sum(self.trace.nbytes)

    @property
    def elements(self) -> int:
        """The same in elements, as far as they are known; what was estimated from nothing has no bytes."""
        return sum(op.size for op in self.trace.ops if op.size > 0)

    @property
    def rests(self) -> bool:
        """The plan in force drops nothing, and no peak has been measured yet that speaks against it."""
        return self.result is not None and self.keeps_all and not self.stale and not self.tries

    def quick_plan(self, budget: int, static: int) -> PlanResult | None:
        """The best of the plans for another shape, without a search; None if none of them fits.

        A search takes long in the middle of a step, and many a shape comes up once or twice only.
        """
        plain = judged(self.trace, (False,) * len(self.trace.ops))
        choices = self.transfer.choices() if self.transfer is not None else []
        known = [
            judged(self.trace, drop, move, choice)
            for drop, move in self.like
            for choice in (choices if any(move) else [None])
        ]
        tried = pareto([*known, plain])
        fitting = [c for c in tried if static + c.peak_bytes <= budget]
        if not self.like or not fitting:
            return None
        return PlanResult(
            trace=self.trace,
            static_bytes=static,
            budget_bytes=budget,
            chosen=fitting[-1],
            front=tried,
            plain=plain,
            transfer=self.transfer,
        )

    def follow(self, result: PlanResult, static: int, parts: dict[str, int], target: int | None = None) -> None:
        """Put a plan into force."""
        self.result, self.static, self.parts = result, static, parts
        self.target = result.budget_bytes - static if target is None else target
        chosen = result.chosen
        self.stale, self.keeps_all = False, not any(chosen.drop) and not chosen.moves
        self.order = []
        if (
            chosen.moves and result.transfer is not None
        ):  # the trace may be that of another shape: the order is the same
            self.order = fetch_order(result.trace, chosen.drop, chosen.move, result.transfer)
        self.tries, self.measured, self.extra_seconds = _TRIES, None, None
        self.script = self._script(result.chosen)
        self.lean = self._script(result.smallest)

    def _script(self, plan: Candidate) -> Script:
        return script_for(self.functions, [op.size for op in self.trace.ops], plan.drop, plan.move)

    def tightest_plan(self) -> PlanResult:
        """The plan with the smallest peak that can be found, which may take a while; what is in force stays."""
        planner = self.planner = self.planner or self.new_planner()
        if self.result is not None and not self.result.smallest.moves:
            planner.judge(self.result.smallest.drop)
        return PlanResult(
            trace=self.trace,
            static_bytes=max(0, self.static),
            budget_bytes=self.result.budget_bytes if self.result is not None else 0,
            chosen=planner.smallest(),
            front=(planner.smallest(),),
            plain=planner.plain,
            transfer=self.transfer,
        )

    def new_planner(self) -> Planner:
        """A planner for its trace."""
        return Planner(self.trace, self.transfer, recompute=self.recompute)

    def moves_to(self, transfer: Transfer | None, recompute: bool) -> None:
        """Say where contents may move to; if that is news, what was planned before is planned anew."""
        if (transfer, recompute) != (self.transfer, self.recompute):
            self.transfer, self.recompute = transfer, recompute
            self.planner = None

    def never_drop(self, kept: set[str]) -> None:
        """Ops of these names are kept from now on; the plan has to be made anew."""
        for op in self.trace.ops:
            op.droppable = op.droppable and op.name not in kept
        self.planner = self.result = None
        self.like = ()
        self.tuner.restart()
        self.script, self.lean = without(self.script, kept), without(self.lean, kept)


class KnownSteps:
    """All entries.

    Attributes:
        roots: where a step begins, by whether gradients are there already.
        all: every entry.
        turns: where a step that began like an entry (its number) has another op or size (position, name or elements).
    """

    def __init__(self) -> None:
        self.roots: dict[bool, Known] = {}
        self.all: list[Known] = []
        self.turns: dict[tuple[int, int, int | str], Known] = {}

    @property
    def sequences(self) -> int:
        """How many sequences of ops there are."""
        return len({known.sequence for known in self.all})

    @property
    def full(self) -> bool:
        """Whether no more shapes are learned."""
        return len(self.all) >= MOST_SHAPES

    @property
    def largest(self) -> Known | None:
        """Of those whose plan was followed (or else that have one), the one that would take most memory without."""
        planned = [known for known in self.all if known.result is not None]
        followed = [known for known in planned if known.measured is not None or known.extra_seconds is not None]
        return max(followed or planned, key=lambda k: (k.nbytes, k.measured is not None, k.traced), default=None)

    def turn(self, known: Known, position: int, what: int | str) -> Known | None:
        """The entry for a step that began like ``known`` and has another op (name) or size at ``position``."""
        return self.turns.get((known.number, position, what))

    def add(
        self, accumulating: bool, trace: Trace, functions: Sequence[Any], passes: int, renewed: bool = False
    ) -> bool:
        """A traced step; False if there is one like it already."""
        new = Known(len(self.all), trace, functions, passes=passes, renewed=renewed)
        at = self.roots.setdefault(accumulating, new)
        while at is not new:
            turn = _difference(at.trace, new.trace)
            if turn is None:
                return self._improve(at, new)
            at = self.turns.setdefault((at.number, *turn), new)
        self.all.append(new)
        return True

    def _improve(self, known: Known, new: Known) -> bool:
        """A step that was only estimated has been traced."""
        if known.traced or len(new.trace.ops) < len(known.trace.ops):
            return False
        known.trace, known.functions, known.sequence = new.trace, new.functions, new.sequence
        known.traced, known.passes = True, new.passes
        known.planner = known.result = None
        known.like = ()
        known.tuner = Tuner()
        return True

    def learn(self, base: Known, position: int, sizes: Sequence[int]) -> Known:
        """A step that began like ``base`` had other sizes from ``position`` on: ``sizes`` is all of them."""
        new = Known(
            len(self.all),
            rescaled(base.trace, sizes),
            base.functions,
            traced=False,
            passes=base.passes,
            renewed=base.renewed,
            sequence=base.sequence,
            like=tuple([(c.drop, c.move) for c in base.result.front]) if base.result is not None else (),
            transfer=base.transfer,
            recompute=base.recompute,
            tuner=Tuner(ratio=base.tuner.ratio / (ESTIMATED if base.traced else 1.0), upward=False),
        )
        self.all.append(new)
        self.turns[base.number, position, sizes[position]] = new
        total = new.nbytes
        for other in sorted(self.all, key=lambda k: k.nbytes):
            if (
                other.result is not None
                and other.sequence == new.sequence
                and total <= other.nbytes <= _SIMILAR * total
                and all(a >= b for a, b in zip(other.trace.nbytes, new.trace.nbytes, strict=True))
            ):
                # Its plan fits, and another search would gain next to nothing.
                new.follow(other.result, other.static, other.parts, other.target)
                new.tries = 0
                break
        return new

    def never_drop(self, kept: set[str]) -> None:
        """Ops of these names are kept from now on."""
        for known in self.all:
            known.never_drop(kept)


def _difference(known: Trace, new: Trace) -> tuple[int, int | str] | None:
    """Where a step under ``known`` would notice that it is ``new``: the position, and the op's name or size."""
    for position, op in enumerate(new.ops):
        if position >= len(known.ops) or known.ops[position].name != op.name:
            return position, op.name
        if known.ops[position].size != op.size:
            return position, op.size
    return None
