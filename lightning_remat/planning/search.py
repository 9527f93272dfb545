"""The search over borders and menus: dynamic programming from the first op to the last.

A state is a cut and the bytes kept before it; its worth is the least extra time with which it is reached. Going from
one cut to a later one runs the ops in between as one segment, under one item of its menu, which must fit on top of what
is kept before: when backward is there, everything behind has been released. Borders and what is kept between them are
so chosen together.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lightning_remat.planning.segments import Item, Layout, Segment, find_cuts, interval_kinds, layout_of, levels_around
from lightning_remat.planning.trace import Trace

_LABELS = 64  # states kept at each cut
_STEPS = 12  # minimum cuts along the hull of one segment
_WIDTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)  # segments, in intervals between neighbouring cuts


@dataclass(slots=True)
class Arc:
    """A segment between two cuts (by number), and the plans for it as arrays."""

    start: int
    end: int
    first: int
    items: list[Item]
    kept: np.ndarray
    peak: np.ndarray
    seconds: np.ndarray


class Search:
    """All segments of a trace, judged once, and the best way through them for any budget.

    Args:
        trace: the step.
        effort: about how many ops all segments that are judged may have together.
    """

    def __init__(self, trace: Trace, effort: int = 20_000) -> None:
        self.trace = trace
        self.layout: Layout = layout_of(trace)
        self.cuts = find_cuts(self.layout, most=128)
        self.arcs: list[list[Arc]] = [[] for _ in self.cuts]  # by the cut they end at
        menus: dict[tuple[int, ...], tuple[Segment, list[Item]]] = {}
        kinds = interval_kinds(self.layout, self.cuts)
        spent = 0
        for start, end in self._spans():
            first, last = self.cuts[start], self.cuts[end]
            kind = tuple(kinds[start:end])
            if kind not in menus:
                if spent > effort and end - start > 1 and last - first < len(trace.ops):
                    continue
                spent += last - first
                segment = Segment(self.layout, first, last)
                menus[kind] = segment, segment.menu(_STEPS if last - first < 400 else _STEPS // 2)
            segment, items = menus[kind]
            enters, returns = levels_around(self.layout, first, last)
            peak = [max(enters + i.forward, returns + i.backward) for i in items]
            self.arcs[end].append(
                Arc(
                    start,
                    end,
                    first,
                    items,
                    np.asarray([i.kept for i in items], dtype=np.float64),
                    np.asarray(peak, dtype=np.float64),
                    np.asarray([i.seconds for i in items]),
                )
            )
        self.menus = len(menus)

    def _spans(self) -> list[tuple[int, int]]:
        """Pairs of cuts: near ones first, then ever longer ones, and the whole step."""
        last = len(self.cuts) - 1
        spans = [(i, i + w) for w in _WIDTHS for i in range(last - w + 1)]
        if (0, last) not in spans:
            spans.append((0, last))
        return spans

    def best(self, budget: float) -> list[bool] | None:
        """The plan with the least extra time within a budget of bytes; None if the search finds none."""
        last = len(self.cuts) - 1
        kept = [np.zeros(1)] + [np.empty(0)] * last
        time = [np.zeros(1)] + [np.empty(0)] * last
        back: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = [(np.zeros(1, int),) * 3] * (last + 1)
        for end in range(1, last + 1):
            parts = []
            for a, arc in enumerate(self.arcs[end]):
                k, t = kept[arc.start], time[arc.start]
                if not len(k):
                    continue
                fits = k[:, None] + arc.peak[None, :] <= budget
                which, item = np.nonzero(fits)
                if len(which):
                    parts.append((k[which] + arc.kept[item], t[which] + arc.seconds[item], a, which, item))
            if not parts:
                continue
            all_kept = np.concatenate([p[0] for p in parts])
            all_time = np.concatenate([p[1] for p in parts])
            arcs = np.concatenate([np.full(len(p[0]), p[2]) for p in parts])
            froms = np.concatenate([p[3] for p in parts])
            taken_items = np.concatenate([p[4] for p in parts])
            chosen = _front(all_kept, all_time)
            kept[end], time[end] = all_kept[chosen], all_time[chosen]
            back[end] = (arcs[chosen], froms[chosen], taken_items[chosen])
        if not len(kept[last]):
            return None
        label = int(np.argmin(time[last]))
        drop = [False] * len(self.trace.ops)
        cut = last
        while cut:
            way, labels, items = back[cut]
            taken = self.arcs[cut][way[label]]
            for o in taken.items[items[label]].replay:
                drop[taken.first + o] = True
            cut, label = taken.start, int(labels[label])
        return drop


def _front(kept: np.ndarray, time: np.ndarray) -> np.ndarray:
    """Indices of states that no other one beats in both, at most _LABELS of them, by rising bytes."""
    order = np.argsort(kept, kind="stable")
    best = np.minimum.accumulate(time[order])
    front = order[np.concatenate(([True], best[1:] < best[:-1]))]
    # Of equal bytes, the last has the least time.
    front = front[np.concatenate((kept[front[1:]] > kept[front[:-1]], [True]))]
    if len(front) > _LABELS:
        # The fastest of each bucket, and the smallest of all.
        edges = np.linspace(kept[front[0]], kept[front[-1]], _LABELS)
        bucket = np.searchsorted(edges, kept[front])
        last = np.concatenate((bucket[1:] != bucket[:-1], [True]))
        last[0] = True
        front = front[last]
    return front
