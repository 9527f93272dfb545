"""The report of a step: per module and kind of op, what was kept, moved, dropped and computed again."""

from __future__ import annotations

import os
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

from lightning_remat.engine.ledger import Ledger, Line
from lightning_remat.errors import ConfigurationError
from lightning_remat.reporting.text import Folding, Plain
from lightning_remat.sizes import format_bytes


@dataclass
class Row:
    """Totals of one kind of op in one module; bytes and seconds."""

    kept_bytes: int = 0
    dropped_bytes: int = 0
    replayed_ops: int = 0
    replay_seconds: float = 0.0
    offloaded_bytes: int = 0

    def add(self, other: Row | Line) -> None:
        """Sum up."""
        self.kept_bytes += other.kept_bytes
        self.dropped_bytes += other.dropped_bytes
        self.replayed_ops += other.replayed_ops
        self.replay_seconds += other.replay_seconds
        self.offloaded_bytes += other.offloaded_bytes


def rows_of(blocks: list[str], ledger: Ledger | None) -> dict[tuple[str, str], Row]:
    """The report's rows by (module, kind of op), in order of first use. Repeated blocks are summed under one name."""
    rows: dict[tuple[str, str], Row] = defaultdict(Row)
    folding = Folding(blocks)
    for line in ledger.lines.values() if ledger is not None else ():
        if line.kept_bytes or line.dropped_bytes or line.replayed_ops or line.offloaded_bytes:
            rows[folding.name(line.module), line.kind].add(line)
    return rows


class Report(Plain, Table):
    """A ``rich`` table that can be printed plainly as well.

    Example:
        >>> from lightning_remat import Remat
        >>> "no step yet" in str(Remat(policy="full").report())
        True
    """

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the table as plain text; pages, plots and data are of a plan, which there is under a budget.

        Args:
            path: a file; one that is there is overwritten.

        Returns:
            The path.

        Raises:
            ConfigurationError: a suffix other than ``.txt``.
            OSError: the file cannot be written.

        Example:
            >>> from lightning_remat import Remat
            >>> Remat(policy="full").report().save("report.html")
            Traceback (most recent call last):
            ...
            lightning_remat.errors.ConfigurationError: path='report.html': there is no plan, so there is nothing ...
        """
        path = Path(path)
        if path.suffix.lower() != ".txt":
            raise ConfigurationError(
                f"path={str(path)!r}: there is no plan, so there is nothing to draw. Set budget=, and save the report "
                "after the second step; or end the path in .txt for this table."
            )
        path.write_text(str(self), encoding="utf-8")
        return path


def report_table(title: str, blocks: list[str], ledger: Ledger | None, without: str = "no step yet") -> Report:
    """See :meth:`lightning_remat.Remat.report`; ``without``: what is said where there is no ledger."""
    caption = "the first step, its warm-up included" if ledger is not None else without
    table = Report(title=title, caption=caption, title_justify="left", caption_justify="left")
    table.add_column("module", overflow="fold")
    table.add_column("ops", no_wrap=True)
    rows = rows_of(blocks, ledger)
    total = Row()
    for row in rows.values():
        total.add(row)
    moved = bool(total.offloaded_bytes)
    for name in ("kept", *(("offloaded",) if moved else ()), "dropped", "replayed ops", "replay ms"):
        table.add_column(name, justify="right")
    for (module, kind), row in rows.items():
        table.add_row(module or "(outside of modules)", kind, *_cells(row, moved))
    table.add_section()
    table.add_row("all", "", *_cells(total, moved))
    return table


def _cells(row: Row, moved: bool) -> tuple[str, ...]:
    return (
        format_bytes(row.kept_bytes),
        *((format_bytes(row.offloaded_bytes),) if moved else ()),
        format_bytes(row.dropped_bytes),
        str(row.replayed_ops),
        f"{row.replay_seconds * 1e3:.2f}",
    )
