"""A plan's facts in words: what the printed report and the page both say, amounts with their units."""

from __future__ import annotations

from lightning_remat.reporting.facts import ModuleRow, PlanFacts
from lightning_remat.reporting.places import PeakPlace
from lightning_remat.reporting.text import format_seconds, format_size, three_digits

NOT_MEASURED = "not measured yet"
MIB = 2**20


def title(facts: PlanFacts) -> str:
    """One line for the whole plan."""
    saved = 1 - facts.predicted_peak_bytes / facts.plain_peak_bytes if facts.plain_peak_bytes else 0.0
    if not facts.recomputed_bytes and not facts.moved_bytes:
        return f"Recomputation plan: everything kept, peak {format_size(facts.predicted_peak_bytes)}"
    extra, step = format_seconds(facts.predicted_extra_seconds), _predicted_step(facts)
    if step:
        extra += f" ({facts.predicted_extra_seconds / step:.1%} of a step)"
    of = "computing again"
    if facts.moved_bytes:
        again = "computing again and " if facts.recomputed_bytes else ""
        of = f"{again}transfers, {format_size(facts.moved_bytes)} moved"
    return (
        f"Recomputation plan: peak {format_size(facts.predicted_peak_bytes)} instead of "
        f"{format_size(facts.plain_peak_bytes)} (-{saved:.0%}), for {extra} of {of}"
    )


FIGURES = ("", "predicted", "measured", "everything kept", "smallest plan found")
"""Heads of the columns of :func:`figures`."""


def figures(facts: PlanFacts) -> list[tuple[str, str, str, str, str]]:
    """Peak memory and extra time, predicted and measured, between the two ends of what is possible."""
    measured_peak, measured_extra = NOT_MEASURED, NOT_MEASURED
    if facts.measured_peak_bytes is not None:
        off = facts.measured_peak_bytes / facts.predicted_peak_bytes - 1 if facts.predicted_peak_bytes else 0.0
        measured_peak = f"{format_size(facts.measured_peak_bytes)} ({off:+.1%})"
    if facts.measured_extra_seconds is not None:
        measured_extra = _with_share(facts.measured_extra_seconds, facts.step_seconds)
    return [
        (
            "peak memory",
            format_size(facts.predicted_peak_bytes),
            measured_peak,
            format_size(facts.plain_peak_bytes),
            format_size(facts.smallest_peak_bytes),
        ),
        (
            "extra time per step",
            _with_share(facts.predicted_extra_seconds, _predicted_step(facts)),
            measured_extra,
            "0 s",
            format_seconds(facts.smallest_extra_seconds),
        ),
    ]


def notes(facts: PlanFacts) -> list[tuple[str, str]]:
    """What else there is to know about the whole step, as (subject, text)."""
    room = facts.budget_bytes - facts.predicted_peak_bytes
    budget = f"{format_size(facts.budget_bytes)}, of which {format_size(room)} are left"
    if room < 0:
        budget = f"{format_size(facts.budget_bytes)}, exceeded by {format_size(-room)}: no plan was found that fits"
    parts = ", ".join(f"{name} {format_size(size)}" for name, size in facts.static_parts)
    found = [
        ("budget", budget),
        ("static memory", format_size(facts.static_bytes) + (f": {parts}" if parts else "")),
        ("peak", _place(facts.peak)),
        ("peak, everything kept", _place(facts.plain_peak)),
    ]
    if facts.step_seconds is not None:
        found.append(("step", f"{format_seconds(facts.step_seconds)}, measured"))
    if facts.moved_bytes:
        hidden = f"; {facts.hidden:.0%} of the transfers hidden" if facts.hidden is not None else ""
        found.append(
            (
                "moved",
                f"{format_size(facts.moved_bytes)} out, {format_size(facts.fetched_bytes)} back; the step waits "
                f"{format_seconds(facts.waited_seconds)}{hidden}, predicted{_beside(facts)}",
            )
        )
    if facts.compiled:
        found.append(("compiled", facts.compiled))
    if facts.blocks:
        ends = facts.blocks[0] if len(facts.blocks) == 1 else f"{facts.blocks[0]} ... {facts.blocks[-1]}"
        found.append(("blocks", f"{len(facts.blocks)}: {ends}"))
    return found


def price_unit(facts: PlanFacts) -> tuple[str, float]:
    """One unit of time for all prices of a report, and its size in seconds, so that they can be compared at sight."""
    prices = [facts.paid_price, facts.next_price, *(p for row in facts.rows for p in (row.paid, row.asked))]
    known = sorted(p * MIB for p in prices if p)
    middle = known[len(known) // 2] if known else 1e-6
    return ("s", 1.0) if middle >= 1 else ("ms", 1e-3) if middle >= 1e-3 else ("µs", 1e-6)


def heads(facts: PlanFacts) -> tuple[str, ...]:
    """Heads of the columns of :func:`cells`."""
    unit, _ = price_unit(facts)
    again = f"recomputed\n{unit} per MiB"
    moved = ("moved",) if facts.moved_bytes else ()
    return ("module", "ops", "kept", *moved, "recomputed", "extra ms", "in blocks", again, f"kept\n{unit} per MiB")


def cells(row: ModuleRow, facts: PlanFacts) -> tuple[str, ...]:
    """A row of the table by module."""
    _, size = price_unit(facts)
    again = bool(row.recomputed_bytes or row.blocks_recomputed)
    paid = "" if not again else "for others" if row.paid is None else three_digits(row.paid * MIB / size)
    if row.asked is not None:
        asked = three_digits(row.asked * MIB / size)
    else:
        asked = "" if not row.kept_bytes else "fixed" if row.fixed_bytes == row.kept_bytes else "frees nothing"
    return (
        row.module or "(outside of modules)",
        row.kind,
        format_size(row.kept_bytes) if row.kept_bytes else "",
        *((format_size(row.moved_bytes) if row.moved_bytes else "",) if facts.moved_bytes else ()),
        format_size(row.recomputed_bytes) if again else "",
        f"{row.extra_seconds * 1e3:.2f}" if again else "",
        f"{row.blocks_recomputed} of {row.blocks}" if row.blocks > 1 and again else "",
        paid,
        asked,
    )


def totals(facts: PlanFacts) -> tuple[str, ...]:
    """The last row of the table."""
    extra = f"{(facts.recompute_seconds if facts.moved_bytes else facts.predicted_extra_seconds) * 1e3:.2f}"
    moved = (format_size(facts.moved_bytes),) if facts.moved_bytes else ()
    return ("all", "", format_size(facts.kept_bytes), *moved, format_size(facts.recomputed_bytes), extra, "", "", "")


def explanation(facts: PlanFacts) -> str:
    """Why the plan is as it is, in one sentence."""
    moves = bool(facts.moved_bytes)
    paid, following = _price(facts.paid_price), _price(facts.next_price or 0.0)
    if facts.predicted_peak_bytes > facts.budget_bytes:
        missing = format_size(facts.predicted_peak_bytes - facts.budget_bytes)
        return f"Even this plan needs {missing} more than the budget has: take a smaller batch, or allow more memory."
    if not facts.paid_price and moves:
        return (
            "What leaves the device does so beside the step and is back in time, so that the budget costs no time."
            if not facts.predicted_extra_seconds
            else "No plan was found that takes less time than this one, whatever memory it may have."
        )
    if not facts.paid_price:
        first = f"; freeing the first MiB would cost {following}" if facts.next_price is not None else ""
        return f"Everything fits into the budget, so nothing has to be computed again for it{first}."
    if facts.next_price is None:
        return (
            f"No plan was found that needs less memory than this one: its last MiB cost {paid} of "
            f"{'computing again and transfers' if moves else 'computing again'}."
        )
    what = "computed again or moved" if moves else "computed again"
    if facts.next_price <= facts.paid_price * 1.05:
        return (
            f"The budget sets a price of about {paid} per MiB: what can be {what} for less is, and what would cost "
            "more is kept."
        )
    return (
        f"The budget sets a price between {paid} per MiB, which the last memory freed has cost, and {following}, which "
        f"the next would: what can be {what} for less is, and what would cost more is kept."
    )


LEGEND = (
    "A price is the time that it takes to compute something again, per MiB that need not be kept for that; for what is "
    'kept it is the price not paid, with all that would have to run first. "For others": runs again only because '
    'other values are made from it. "Fixed": cannot run again. "Frees nothing": as much would have to be kept '
    "instead. Single values may be on the other side of the price: what others start from is kept, and what goes "
    "together is computed again together."
)
"""What the words and figures of the table mean."""

_MOVED_LEGEND = (
    ' "Moved": leaves the device in forward, and is back when backward asks for it; what that adds to the step is '
    "in the extra time of the whole step, and not in that of the rows."
)


def legend(facts: PlanFacts) -> str:
    """What the words and figures of the table mean, of those that are there."""
    return LEGEND + (_MOVED_LEGEND if facts.moved_bytes else "")


MEMORY_PLOT = (
    "Memory over one training step, foreseen by the simulator. The area is what the plan takes; the dashed curve is "
    "the same step with everything kept. What is computed again makes the step longer."
)
"""What the first plot shows."""

FRONT_PLOT = (
    "Every plan that was found and that no other one beats in both memory and time. The further to the left, the less "
    "memory, and the more has to be computed again."
)
"""What the second plot shows."""


def _price(price: float) -> str:
    """Seconds per byte as time per MiB."""
    return format_seconds(price * MIB)


def _place(place: PeakPlace) -> str:
    where = f"in {place.module}" if place.module else "outside of modules"
    return f"in {place.part}, {where}{', while values are computed again' if place.recomputing else ''}"


def _beside(facts: PlanFacts) -> str:
    """What moving takes from a step on a CPU although nobody waits: processor time."""
    taken = facts.predicted_extra_seconds - facts.recompute_seconds - facts.waited_seconds
    return f"; moving takes {format_seconds(taken)} of processor time from the step" if taken > 5e-5 else ""


def _predicted_step(facts: PlanFacts) -> float | None:
    return facts.traced_seconds + facts.predicted_extra_seconds if facts.traced_seconds else None


def _with_share(seconds: float, step: float | None) -> str:
    return format_seconds(seconds) + (f" ({seconds / step:.1%})" if step else "")
