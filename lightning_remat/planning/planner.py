"""A stand-in for the planner: local search by the simulator, good enough to try other things on small traces."""

from __future__ import annotations

import random

from lightning_remat.planning.plan import Candidate, PlanResult, judged
from lightning_remat.planning.simulator import simulate
from lightning_remat.planning.trace import Trace


def plan(trace: Trace, budget_bytes: int, static_bytes: int = 0) -> PlanResult:
    """The plan with the least extra time that was found within the budget."""
    budget = budget_bytes - static_bytes
    ops = [o for o, op in enumerate(trace.ops) if op.droppable]
    plain = judged(trace, [False] * len(trace.ops))
    rng = random.Random(0)
    best = plain if plain.peak_bytes <= budget else None
    starts = [[False] * len(trace.ops), [op.kind != "expensive" for op in trace.ops]]
    for turn in range(6):
        start = starts[turn] if turn < 2 else [rng.random() < 0.5 for _ in trace.ops]
        found = _descend(trace, start, ops, budget, rng)
        if found.peak_bytes <= budget and (best is None or found.extra_seconds < best.extra_seconds):
            best = found
    best = best or found
    return PlanResult(
        trace=trace, static_bytes=static_bytes, budget_bytes=budget_bytes, chosen=best, front=(best,), plain=plain
    )


def _descend(trace: Trace, drop: list[bool], ops: list[int], budget: int, rng: random.Random) -> Candidate:
    """Flip one op, or two, as long as that helps."""

    def cost() -> tuple[float, float]:
        run = simulate(trace, drop, timeline=True)
        return sum(max(0, top - budget) for top in run.tops), run.extra_seconds

    least = cost()
    moves = [(a, b) for i, a in enumerate(ops) for b in ops[i:]]
    improved = True
    while improved:
        improved = False
        rng.shuffle(moves)
        for a, b in sorted(moves, key=lambda move: move[0] != move[1]):
            for o in {a, b}:
                drop[o] = not drop[o]
            now = cost()
            if now < least:
                least, improved = now, True
            else:
                for o in {a, b}:
                    drop[o] = not drop[o]
    return judged(trace, drop)
