"""The report of a plan: what is kept, what is moved, what is computed again, what that costs, and why."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.box import SIMPLE_HEAVY
from rich.console import Group
from rich.table import Table
from rich.text import Text

from lightning_remat.errors import ConfigurationError
from lightning_remat.planning.plan import PlanResult
from lightning_remat.reporting import wording
from lightning_remat.reporting.facts import PlanFacts, facts_of
from lightning_remat.reporting.ranks import RankFigures, ranks_in_words
from lightning_remat.reporting.report import Report
from lightning_remat.reporting.text import Plain

ROWS = 40
"""Rows of a printed table; the page and the JSON file have all."""


@dataclass(frozen=True)
class PlanReport(Plain):
    """A plan and what there is to say about it: to print, plainly or with ``rich``, and to save.

    Attributes:
        result: the plan, and what it was chosen from.
        facts: everything that is told, as plain data.
        timeline: measured memory of one step under the plan, (seconds since its begin, bytes above what was there
            then), as in :class:`~lightning_remat.runtime.memory.PeakResult`; drawn over the predicted one.
        ranks: figures of the plan of each process, where several train together.

    Example:
        >>> import torch
        >>> from lightning_remat import Remat
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 1))
        >>> remat = Remat(budget="1GiB")
        >>> for _ in range(3):
        ...     with remat:
        ...         loss = model(torch.ones(8, 64)).sum()
        ...     loss.backward()
        >>> facts = remat.report().facts
        >>> facts.recomputed_bytes, facts.moved_bytes, facts.budget_bytes
        (0, 0, 1073741824)
    """

    result: PlanResult
    facts: PlanFacts
    timeline: tuple[tuple[float, int], ...] | None = None
    ranks: tuple[RankFigures, ...] = ()

    def __rich__(self) -> Group:
        """Figures of the whole step, the table by module, and why."""
        facts = self.facts
        figures = Table(box=None, padding=(0, 2, 0, 0))
        for i, head in enumerate(wording.FIGURES):
            figures.add_column(head, justify="right" if i else "left")
        for line in wording.figures(facts):
            figures.add_row(*line)
        notes = Table.grid(padding=(0, 2, 0, 0))
        notes.add_column(no_wrap=True)
        for subject, text in wording.notes(facts):
            notes.add_row(Text(subject), Text(text))
        if ranks := ranks_in_words(self.ranks):
            notes.add_row(Text("ranks"), Text(ranks))
        return Group(
            Text(wording.title(facts), style="bold"), "", figures, "", notes, "", self._modules(),
            Text(wording.explanation(facts)), "", Text(wording.legend(facts), style="dim"),
        )  # fmt: skip

    def _modules(self) -> Report:
        facts = self.facts
        table = Report(box=SIMPLE_HEAVY, pad_edge=False, padding=(0, 1, 0, 0))
        for i, head in enumerate(wording.heads(facts)):
            table.add_column(head, justify="right" if i > 1 else "left", overflow="fold", no_wrap=i > 0)
        shown = sorted(facts.rows, key=lambda row: row.bytes, reverse=True)[:ROWS]
        for row in facts.rows:
            if row in shown:
                table.add_row(*map(Text, wording.cells(row, facts)))  # a name is no markup
        table.add_section()
        if rest := len(facts.rows) - len(shown):
            table.add_row(f"({rest} smaller ones)")
        table.add_row(*wording.totals(facts))
        return table

    def to_json(self) -> str:
        """The facts as text: bytes, seconds, and prices in seconds per byte."""
        ranks = {"ranks": [asdict(rank) for rank in self.ranks]} if self.ranks else {}
        return json.dumps({"format": 1, **asdict(self.facts), **ranks}, indent=1)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the report to a file; the suffix says how.

        ``.html`` is a page that needs nothing else, ``.png`` and ``.svg`` are the plots, ``.json`` the facts as data,
        ``.txt`` what ``str`` gives.

        Args:
            path: a file; one that is there is overwritten.

        Returns:
            The path.

        Raises:
            ConfigurationError: another suffix, or plots without matplotlib.
            OSError: the file cannot be written.
        """
        path = Path(path)
        suffix = path.suffix.lower()
        if suffix in (".png", ".svg"):
            from lightning_remat.reporting.plots import save_plots  # matplotlib only for those who ask

            save_plots(self, path)
            return path
        if suffix == ".html":
            from lightning_remat.reporting.html import page

            text = page(self)
        elif suffix == ".json":
            text = self.to_json() + "\n"
        elif suffix == ".txt":
            text = str(self)
        else:
            raise ConfigurationError(
                f"path={str(path)!r}: the suffix says what is written, and {path.suffix!r} is none that is known; "
                "end it in .html (a page), .png or .svg (the plots), .json (data) or .txt (plain text)."
            )
        path.write_text(text, encoding="utf-8")
        return path


def plan_report(
    result: PlanResult,
    blocks: Iterable[str],
    measured_peak_bytes: int | None = None,
    measured_extra_seconds: float | None = None,
    step_seconds: float | None = None,
    static_parts: Mapping[str, int] | None = None,
    timeline: Sequence[tuple[float, int]] | None = None,
    ranks: Sequence[RankFigures] = (),
    compiled: str = "",
) -> PlanReport:
    """What there is to say about a plan.

    Args:
        result: the plan, and what it was chosen from.
        blocks: qualified names of the blocks; those that differ in their number only are shown as one.
        measured_peak_bytes: peak of a real step under the plan, static memory included. None: not measured yet.
        measured_extra_seconds: time that a real step spends on recomputation.
        step_seconds: duration of a real step under the plan, recomputation included.
        static_parts: what the static memory is made of, in bytes, such as ``{"parameters": ..., "gradients": ...,
            "optimizer state": ...}``.
        timeline: measured memory of one step under the plan, see :class:`PlanReport`.
        ranks: figures of the plan of each process.
        compiled: what there is to say of compiled regions; empty: nothing was compiled.

    Returns:
        The report. Takes about the time of two simulations.
    """
    facts = facts_of(
        result,
        blocks,
        measured_peak_bytes=measured_peak_bytes,
        measured_extra_seconds=measured_extra_seconds,
        step_seconds=step_seconds,
        static_parts=static_parts,
        compiled=compiled,
    )
    return PlanReport(result, facts, tuple(timeline) if timeline is not None else None, tuple(ranks))
