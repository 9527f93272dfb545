"""What ``lightning-remat plan`` prints: a table over batch sizes, and the answer in words."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from lightning_remat.runtime.estimate import Fit, Static
from lightning_remat.sizes import format_bytes


def fits_table(rows: Sequence[Fit], budget: int, title: str) -> Table:
    """One row for each batch size: peak without recomputation, and the plan that fits."""
    table = Table(title=title, title_justify="left", caption="all figures are estimates", caption_justify="left")
    for name in ("batch", "peak\nas it is", "fits\nas it is", "peak under\na plan", "ops run\nagain", "extra\ntime"):
        table.add_column(name, justify="right", no_wrap=True)
    for fit in sorted(rows, key=lambda f: f.batch_size):
        table.add_row(str(fit.batch_size), *_cells(fit, budget))
    return table


def _cells(fit: Fit, budget: int) -> tuple[str, ...]:
    plain = fit.plain_bytes <= budget
    if fit.chosen is None or fit.planned_bytes is None:
        return format_bytes(fit.plain_bytes), "no", f"none fits: {format_bytes(_least(fit))}", "", ""
    if plain:
        return format_bytes(fit.plain_bytes), "yes", format_bytes(fit.planned_bytes), "0", "none"
    again = sum(fit.chosen.drop)
    return format_bytes(fit.plain_bytes), "no", format_bytes(fit.planned_bytes), str(again), _share(fit)


def _least(fit: Fit) -> int:
    return fit.plain_bytes if fit.smallest_bytes is None else fit.smallest_bytes


def _share(fit: Fit) -> str:
    extra = fit.chosen.extra_seconds if fit.chosen is not None else 0.0
    share = extra / fit.step_seconds if fit.step_seconds else 0.0
    return f"+{share:.0%}" if share >= 0.005 else "under 1%"


def static_sentence(static: Static) -> str:
    """What a step finds when it begins, and what the optimizer needs."""
    parts = [
        f"parameters {format_bytes(static.parameters)}",
        f"gradients {format_bytes(static.gradients)}",
        f"optimizer state {format_bytes(static.optimizer_state)}",
    ]
    if static.buffers:
        parts.append(f"buffers {format_bytes(static.buffers)}")
    return f"In every figure: {', '.join(parts)}."


def answer(rows: Sequence[Fit], budget: int, static: Static, plain: int, planned: int, most: int) -> str:
    """The largest batches, in words.

    Args:
        rows: what was looked at, the largest batches among them.
        budget: bytes.
        static: see :class:`~lightning_remat.runtime.estimate.Static`.
        plain: largest batch without recomputation, 0 if none fits.
        planned: largest batch under a plan, 0 if none fits.
        most: the largest that was looked at.
    """
    if not planned:
        least = min(rows, key=_least)
        why = ""
        if static.optimizer_peak > budget:
            why = (
                f" The optimizer's step alone takes {format_bytes(static.optimizer_peak)}, which no recomputation "
                "changes."
            )
        return (
            f"Does not fit: a batch of {least.batch_size} takes {format_bytes(_least(least))} under the leanest "
            f"plan, and there are {format_bytes(budget)}.{why}"
        )
    at = next(f for f in rows if f.batch_size == planned)
    beyond = " (more was not looked at)" if planned >= most else ""
    if planned == plain:
        return f"Largest batch: {planned}{beyond}, without recomputation."
    return (
        f"Largest batch: {planned}{beyond} with recomputation, at {_share(at)} of the step's time by estimate; "
        f"{plain or 'none'} without."
    )


def one_answer(fit: Fit, budget: int) -> str:
    """Whether one batch size fits, in words."""
    if fit.plain_bytes <= budget:
        return f"A batch of {fit.batch_size} fits as it is (policy='none')."
    if fit.chosen is None:
        return (
            f"A batch of {fit.batch_size} does not fit: the leanest plan takes {format_bytes(_least(fit))} of "
            f"{format_bytes(budget)}."
        )
    return (
        f"A batch of {fit.batch_size} fits with recomputation (policy='auto' and a budget), at {_share(fit)} of the "
        "step's time by estimate."
    )
