"""Exact optima for small traces: the least time within a budget, and the least peak that any plan reaches.

The program (:mod:`tests.planning.exact_model`) is solved by HiGHS through SciPy. Every solution is played by the
simulator; one that exceeds the budget, which a solver's tolerance can let through, is excluded and the rest solved
again. :func:`brute_force` tries all plans, for traces of a dozen ops.
"""

from __future__ import annotations

import itertools
import math
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array

from lightning_remat.planning.plan import Candidate, judged
from lightning_remat.planning.trace import Trace
from tests.planning.exact_model import NOT, Lin, Model

_SCALE = 1000.0  # the solver's tolerances are absolute: no larger than this are right-hand sides and objective
_ATTEMPTS = 50


@dataclass(frozen=True, slots=True)
class Optimum:
    """The best plan found, and how good any could be.

    Attributes:
        plan: the plan with what the simulator says about it.
        bound: no plan takes less, in seconds or in bytes; equal to the plan's own if ``proven``.
        proven: the solver finished.
        variables, binaries, rows: size of the program.
        nodes: of the search tree.
        elapsed: seconds that it took.
    """

    plan: Candidate
    bound: float
    proven: bool
    variables: int
    binaries: int
    rows: int
    nodes: int
    elapsed: float


def least_time(trace: Trace | Model, budget: int, limit: float = 60.0) -> Optimum | None:
    """The plan with the least extra time whose peak is within the budget; None if there is no such plan.

    Raises:
        TimeoutError: no plan was found within ``limit`` seconds.
    """
    model = trace if isinstance(trace, Model) else Model(trace)
    ops = model.trace.ops
    total = sum(op.seconds for op in ops) or 1.0
    cost = np.zeros(max(1, len(model.columns)))  # the solver wants a variable even where nothing can be dropped
    for o, op in enumerate(ops):
        if model.final[o] != NOT:
            cost[model.final[o]] += op.seconds * _SCALE / total
    rows = _Rows(model)
    unit = max(1.0, budget / _SCALE)
    for terms, constant in _strongest(model):
        if not terms and constant > budget:
            return None
        rows.add([(c, x / unit) for c, x in terms], (budget - constant) / unit)
    start = time.perf_counter()
    nodes = 0
    for _ in range(_ATTEMPTS):
        found = _solve(cost, rows, model.binaries, len(cost), limit - (time.perf_counter() - start))
        nodes += found.mip_node_count or 0
        if found.status == 2:
            return None
        drop = _plan(model, found)
        best = judged(model.trace, drop)
        if best.peak_bytes <= budget:
            bound = _bound(found) * total / _SCALE
            return _optimum(model, rows, found, best, best.extra_seconds, bound, nodes, start)
        rows.exclude(found.x[: model.binaries] > 0.5)
    raise RuntimeError(f"{_ATTEMPTS} solutions in a row exceed the budget by less than the solver's tolerance")


def least_peak(trace: Trace | Model, limit: float = 60.0) -> Optimum:
    """A plan with the least peak.

    Raises:
        TimeoutError: no plan was found within ``limit`` seconds.
    """
    model = trace if isinstance(trace, Model) else Model(trace)
    unit = max(1.0, judged(model.trace, [False] * len(model.trace.ops)).peak_bytes / _SCALE)
    peak = len(model.columns)
    cost = np.zeros(peak + 1)
    cost[peak] = 1.0
    rows = _Rows(model)
    for terms, constant in _strongest(model):
        rows.add([*((c, x / unit) for c, x in terms), (peak, -1.0)], -constant / unit)
    start = time.perf_counter()
    found = _solve(cost, rows, model.binaries, peak, limit)
    best = judged(model.trace, _plan(model, found))
    bound = _bound(found) * unit
    return _optimum(model, rows, found, best, best.peak_bytes, bound, found.mip_node_count or 0, start)


def budgets(model: Model, count: int = 10) -> list[int]:
    """Evenly spaced between the least peak that any plan reaches and that of keeping everything, both excluded.

    Raises:
        TimeoutError: that least peak was not found in a minute.
    """
    least = least_peak(model)
    if not least.proven:
        raise TimeoutError("no proof within a minute that there is no lower peak")
    plain = judged(model.trace, [False] * len(model.trace.ops)).peak_bytes
    low = least.plan.peak_bytes
    return [low + (plain - low) * i // (count + 1) for i in range(1, count + 1)]


def brute_force(trace: Trace) -> list[Candidate]:
    """All plans."""
    choices = [(False, True) if op.droppable else (False,) for op in trace.ops]
    return [judged(trace, drop) for drop in itertools.product(*choices)]


# ---------------------------------------------------------------------- the program as a matrix


class _Rows:
    """Rows a.x <= b."""

    def __init__(self, model: Model) -> None:
        self.at: list[int] = []
        self.columns: list[int] = []
        self.entries: list[float] = []
        self.bounds: list[float] = []
        for column, lower in enumerate(model.columns):
            for terms, constant in lower:
                self.add([*terms, (column, -1)], -constant)
        for terms, constant in model.caps:
            self.add(terms, -constant)

    def add(self, terms: Sequence[tuple[int, float]], bound: float) -> None:
        for column, entry in terms:
            self.at.append(len(self.bounds))
            self.columns.append(column)
            self.entries.append(entry)
        self.bounds.append(bound)

    def exclude(self, dropped: Sequence[bool]) -> None:
        """Any plan but this one."""
        self.add([(c, 1 if x else -1) for c, x in enumerate(dropped)], sum(map(bool, dropped)) - 1)


def _strongest(model: Model) -> list[Lin]:
    """Memory at all points, those left out that are never above another."""
    most: dict[Any, int] = {}
    for terms, constant in model.points.values():
        most[terms] = max(constant, most.get(terms, constant))
    return list(most.items())


def _solve(cost: np.ndarray, rows: _Rows, binaries: int, unbounded: int, limit: float) -> Any:
    count = len(cost)
    matrix = coo_array((rows.entries, (rows.at, rows.columns)), shape=(len(rows.bounds), count)).tocsr()
    whole = np.zeros(count)
    whole[:binaries] = 1
    highest = np.ones(count)
    highest[unbounded:] = np.inf
    with _quiet():
        found = milp(
            cost,
            integrality=whole,
            bounds=Bounds(0, highest),
            constraints=LinearConstraint(matrix, -np.inf, np.array(rows.bounds)),
            options={"time_limit": max(1.0, limit), "mip_rel_gap": 0.0},
        )
    if found.x is None and found.status != 2:
        raise TimeoutError(f"no plan found: {found.message}")
    return found


def _bound(found: Any) -> float:
    return float(found.fun if found.mip_dual_bound is None else found.mip_dual_bound)  # None: nothing is binary


def _plan(model: Model, found: Any) -> list[bool]:
    return [d != NOT and bool(found.x[d] > 0.5) for d in model.drops]


def _optimum(
    model: Model, rows: _Rows, found: Any, best: Candidate, reached: float, bound: float, nodes: int, start: float
) -> Optimum:
    proven = found.status == 0
    return Optimum(
        plan=best,
        bound=reached if proven and math.isclose(reached, bound, rel_tol=1e-5, abs_tol=1e-12) else bound,
        proven=proven,
        variables=len(found.x),
        binaries=model.binaries,
        rows=len(rows.bounds),
        nodes=nodes,
        elapsed=time.perf_counter() - start,
    )


@contextmanager
def _quiet() -> Iterator[None]:
    """HiGHS prints a line of its own now and then, past Python's stdout."""
    sys.stdout.flush()
    out = os.dup(1)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 1)
        yield
    finally:
        os.dup2(out, 1)
        os.close(out)
        os.close(nowhere)
