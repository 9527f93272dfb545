"""Planning exactly: the simulator's rules as variables and linear expressions of a mixed-integer program.

For each op that can be dropped there is a binary d (dropped). Everything else follows from those, and is therefore
continuous:

- R[o, k]: op o has run again by the end of the k-th NEED. It does so if it is dropped, has not run yet, and is asked
  for: by the NEED itself or by an op that runs again at the same NEED. Bounds from both sides make that exact.
- A[o, p]: the record of o is alive at point p: dropped, not yet run again, and one of its outputs is wanted, that is
  saved, shown by the program, or read by a record that is alive.
- L[v, p]: a value that is neither saved nor shown is there: kept or made again, and read by a record that is alive.
- Z[o, p]: an op in place copies what it writes into, since another record that is alive reads the old content.

A, L and Z only ever cost memory, so lower bounds do. Variables that mean the same at several points are one variable.
Points are all moments at which the simulator looks at the level: after a RUN, in an OTHER event, and each op that may
run again at each NEED. Each gives one row, bytes <= budget. Since levels never exceed the peak between points either,
the rows of replays need no big-M: what an op adds while it runs is multiplied by "it runs here".

The relatives are Checkmate (Jain et al., 2020), whose schedule decides anew at each stage what to recompute, and
Moccasin (Bartan et al., 2023). Here an op is replayed at most once and at a moment that the tape fixes, so the plan is
one bit per op, and models are small: 40 ops make about 1,000 variables.

The trace must be one that :func:`~tests.planning.small_traces.check` accepts; nothing else is restricted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from lightning_remat.planning.trace import EXIT, FREE, NEED, NEVER, OTHER, RELEASE, RUN, SAVE, Trace

NOT = -1  # instead of a column: the variable is zero

Lin = tuple[tuple[tuple[int, int], ...], int]
"""Linear expression: (column, coefficient) pairs and a constant."""

Point = tuple[int, int]
"""(event, op that runs again in it or -1)."""


class Model:
    """Variables and expressions of a trace; what is minimised, and under which budget, comes later.

    Attributes:
        drops: for each op, the column of its d, or NOT; these come first.
        binaries: how many those are.
        final: for each op, the column that says whether it ever runs again.
        columns: for each variable, expressions that it must not fall below (besides 0). The least such value is the
            true one, for all but the binaries.
        caps: expressions that must not be positive.
        points: bytes at each point, as an expression.
    """

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.columns: list[list[Lin]] = []
        self.caps: list[Lin] = []
        self.points: dict[Point, Lin] = {}
        self._same: dict[object, int] = {}
        self._timetable()
        self.drops = [NOT] * len(trace.ops)
        for o, op in enumerate(trace.ops):
            maker = trace.makers[op.writes] if op.writes >= 0 else o
            if op.droppable and (maker == o or self.drops[maker] != NOT):
                self.drops[o] = self._column()
                if maker != o:  # what is written into kept content is kept
                    self._cap([(self.drops[o], 1), (self.drops[maker], -1)], 0)
        self.binaries = len(self.columns)
        self._replays()
        self._points()

    # ------------------------------------------------------------------ what no plan changes

    def _timetable(self) -> None:
        trace = self.trace
        values, ops = len(trace.nbytes), len(trace.ops)
        self.ran = [math.inf] * ops
        self.readers: list[list[int]] = [[] for _ in range(values)]
        for o, op in enumerate(trace.ops):
            for u in op.inputs:
                self.readers[u].append(o)
        self.held = [(math.inf, math.inf)] * values  # shown by the program from which event to which
        self.left = math.inf  # when the step was left
        self.saved: list[list[tuple[float, float]]] = [[] for _ in range(values)]
        self.needs: list[tuple[int, int]] = []  # (event, value)
        slot: dict[int, tuple[int, int]] = {}
        for e, (kind, a, b) in enumerate(trace.events):
            if kind == RUN:
                self.ran[a] = e
                for v in trace.ops[a].outputs:
                    self.held[v] = (e, math.inf)
                if trace.ops[a].writes >= 0:
                    self._let_go(trace.ops[a].writes, e)
            elif kind == FREE:
                self._let_go(a, e)
            elif kind == SAVE:
                slot[a] = (b, e)
            elif kind == NEED and a in slot:
                self.needs.append((e, slot[a][0]))
            elif kind == EXIT:
                self.left = e
            elif kind == RELEASE and a in slot:
                v, since = slot.pop(a)
                self.saved[v].append((since, e))
        for v, since in slot.values():
            self.saved[v].append((since, math.inf))

    def _let_go(self, v: int, e: int) -> None:
        since, until = self.held[v]
        self.held[v] = (since, min(until, e))

    def _is_held(self, v: int, t: int) -> bool:
        """Whether the program shows v when events before t have happened."""
        since, until = self.held[v]
        return since < t <= until

    def _is_shown(self, v: int, t: int) -> bool:
        """Whether the program's tensor also keeps the record that makes a dropped v."""
        return self._is_held(v, t) and t <= self.left

    def _is_saved(self, v: int, t: int) -> bool:
        return any(since < t <= until for since, until in self.saved[v])

    # ------------------------------------------------------------------ variables

    def _column(self, *lower: Lin, key: object = None) -> int:
        if key is not None:
            known = self._same.get(key)
            if known is not None:
                return known
            self._same[key] = len(self.columns)
        self.columns.append(list(lower))
        return len(self.columns) - 1

    def _cap(self, terms: list[tuple[int, int]], constant: int) -> None:
        self.caps.append(_lin(terms, constant))

    def _replays(self) -> None:
        """R[o, k], from the last op to the first within each NEED."""
        trace, drops = self.trace, self.drops
        again = [NOT] * len(trace.ops)  # R after the NEED before
        self.again: list[list[int]] = []  # after each NEED
        self.may_run: list[list[int]] = []  # ops that may run at each NEED, in order
        for _, value in self.needs:
            asked = trace.makers[value]
            found = {asked} if drops[asked] != NOT and again[asked] != drops[asked] else set()
            stack = list(found)
            while stack:
                for u in trace.ops[stack.pop()].inputs:
                    o = trace.makers[u]
                    if o not in found and drops[o] != NOT and again[o] != drops[o]:
                        found.add(o)
                        stack.append(o)
            now = list(again)
            for o in sorted(found, reverse=True):
                if o == asked:
                    now[o] = drops[o]
                    continue
                users = [p for v in trace.ops[o].outputs for p in self.readers[v] if p in found]
                users = list(dict.fromkeys(users))
                lower = [_lin([(now[p], 1), (drops[o], 1)], -1) for p in users]
                now[o] = self._column(_lin([(again[o], 1)], 0), *lower)
                self._cap([(now[o], 1), (drops[o], -1)], 0)
                here = [(now[o], 1), (again[o], -1)]
                for p in users:  # it runs here only if one that runs here asks for it
                    here += [(now[p], -1), (again[p], 1)]
                self._cap(here, 0)
            again = now
            self.again.append(again)
            self.may_run.append(sorted(found))
        self.final = again

    # ------------------------------------------------------------------ memory

    def _points(self) -> None:
        trace = self.trace
        net = 0
        k = -1
        nobody = [NOT] * len(trace.ops)
        for e, (kind, a, b) in enumerate(trace.events):
            again = self.again[k] if k >= 0 else nobody
            if kind == RUN:
                terms, constant = self._level(e + 1, again)
                self.points[e, -1] = _lin(terms, constant + net)
            elif kind == OTHER:
                if a != NEVER:
                    terms, constant = self._level(e, again)
                    self.points[e, -1] = _lin(terms, constant + net + a)
                net += b
            elif kind == NEED and k + 1 < len(self.needs) and self.needs[k + 1][0] == e:
                k += 1
                for o in self.may_run[k]:
                    midway = [*self.again[k][:o], *again[o:]]
                    terms, constant = self._level(e, midway)
                    terms += self._while_it_runs(o, e, midway, self.again[k][o])
                    self.points[e, o] = _lin(terms, constant + net)

    def _level(self, t: int, again: list[int]) -> tuple[list[tuple[int, int]], int]:
        """Bytes when events before t have happened and ops have run again according to ``again``."""
        trace, drops = self.trace, self.drops
        alive = self._alive(t, again)
        terms: list[tuple[int, int]] = []
        constant = 0
        for o, op in enumerate(trace.ops):
            if op.state and alive[o] is not None:
                terms += [(c, x * op.state) for c, x in alive[o][0]]
            made = again[o]
            for v in op.outputs:
                nbytes = trace.nbytes[v]
                if not nbytes or self.ran[o] >= t:
                    continue
                if self._is_held(v, t):  # a replay cannot see what the program has, and makes its own
                    constant += nbytes
                    if self._is_shown(v, t) or self._is_saved(v, t):
                        terms.append((made, nbytes))
                        continue
                    readers = [alive[p] for p in self.readers[v] if alive[p] is not None]
                    if readers:
                        lower = [_lin([*r, (made, 1)], x - 1) for r, x in readers]
                        terms.append((self._column(*lower, key=("C", *lower)), nbytes))
                elif self._is_saved(v, t):
                    constant += nbytes
                    terms += [(drops[o], -nbytes), (made, nbytes)]
                else:
                    readers = [alive[p] for p in self.readers[v] if alive[p] is not None]
                    if not readers:
                        continue
                    if made == drops[o] and len(readers) == 1:
                        terms += [(c, x * nbytes) for c, x in readers[0][0]]
                        constant += readers[0][1] * nbytes
                        continue
                    here = [(made, 1), (drops[o], -1)]
                    lower = [_lin([*r, *here], x) for r, x in readers]
                    terms.append((self._column(*lower, key=("L", *lower)), nbytes))
        return terms, constant

    def _alive(self, t: int, again: list[int]) -> list[Lin | None]:
        """For each op whether its record is alive; None: it cannot be."""
        trace, drops = self.trace, self.drops
        alive: list[Lin | None] = [None] * len(trace.ops)
        for o in range(len(trace.ops) - 1, -1, -1):
            if drops[o] == NOT or again[o] == drops[o] or self.ran[o] >= t:
                continue
            waiting = [(drops[o], 1), (again[o], -1)]
            outputs = trace.ops[o].outputs
            if any(self._is_shown(v, t) or self._is_saved(v, t) for v in outputs):
                alive[o] = _lin(waiting, 0)
                continue
            readers = dict.fromkeys(p for v in outputs for p in self.readers[v] if alive[p] is not None)
            if readers:
                lower = [_lin([*alive[p][0], *waiting], alive[p][1] - 1) for p in readers]
                alive[o] = _lin([(self._column(*lower, key=("A", *lower)), 1)], 0)
        return alive

    def _while_it_runs(self, o: int, t: int, again: list[int], after: int) -> list[tuple[int, int]]:
        """What op o adds while it runs again: outputs and workspace; in place, a copy if the old content is needed."""
        trace = self.trace
        op = trace.ops[o]
        here = [(after, 1), (again[o], -1)]
        terms = [(c, x * op.scratch) for c, x in here]
        old = op.writes
        nbytes = sum(trace.nbytes[v] for v in op.outputs)
        if old < 0 or self._is_saved(old, t) or self._is_shown(old, t):
            return terms + [(c, x * nbytes) for c, x in here]
        alive = self._alive(t, again)
        others = [alive[p] for p in self.readers[old] if p != o and alive[p] is not None]
        if others:
            lower = [_lin([*here, *terms_of], x - 1) for terms_of, x in others]
            terms.append((self._column(*lower, key=("Z", *lower)), nbytes))
        return terms

    # ------------------------------------------------------------------ under a plan

    def of_plan(self, drop: Sequence[bool]) -> np.ndarray:
        """All variables under a plan."""
        x = np.zeros(len(self.columns))
        for o, op in enumerate(self.trace.ops):
            if self.drops[o] != NOT:
                old = self.trace.makers[op.writes] if op.writes >= 0 else -1
                x[self.drops[o]] = bool(drop[o]) and (old < 0 or x[self.drops[old]] > 0)
        for c in range(self.binaries, len(self.columns)):
            x[c] = max([0.0, *(value(lin, x) for lin in self.columns[c])])
        return x


def _lin(terms: Sequence[tuple[int, int]], constant: int) -> Lin:
    found: dict[int, int] = {}
    for column, coefficient in terms:
        if column != NOT:
            found[column] = found.get(column, 0) + coefficient
    return tuple(sorted((c, x) for c, x in found.items() if x)), constant


def value(lin: Lin, x: np.ndarray) -> float:
    """An expression's value."""
    return sum(coefficient * x[c] for c, coefficient in lin[0]) + lin[1]
