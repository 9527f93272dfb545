"""What there is to say about a plan, as plain data: the text, the plots, the page and the JSON file all start from it.

Bytes are bytes, times are seconds, prices are seconds per byte. Nothing here is rounded, and nothing is worded.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from lightning_remat.planning.plan import PlanResult
from lightning_remat.planning.simulation import simulate
from lightning_remat.planning.simulator import Simulation
from lightning_remat.planning.trace import Trace
from lightning_remat.planning.transfer import Transfer
from lightning_remat.reporting.places import PeakPlace, peak_place
from lightning_remat.reporting.prices import Kept, slope_at
from lightning_remat.reporting.text import Folding


@dataclass(frozen=True, kw_only=True)
class ModuleRow:
    """What a plan does with one kind of op in one module; repeated blocks are summed up.

    Attributes:
        module: qualified name, repeated blocks folded; ``""`` outside of modules.
        kind: kind of op, as in the trace.
        kept_bytes: what stays in memory for backward.
        fixed_bytes: the part of it that no plan could drop.
        recomputed_bytes: what is computed again in backward.
        extra_seconds: what that takes.
        freed_bytes: how much less stays in memory than if everything were kept; below 0 where something stays only
            because others are computed again from it.
        paid: price of what is computed again; None if nothing is, or if nothing is freed by it.
        asked: price of computing again what is kept; None if nothing would be freed.
        blocks: blocks that the row sums up; 0 outside of blocks.
        blocks_recomputed: those in which something is computed again.
        moved_bytes: what leaves the device and comes back.
    """

    module: str
    kind: str
    kept_bytes: int
    fixed_bytes: int
    recomputed_bytes: int
    extra_seconds: float
    freed_bytes: int
    paid: float | None
    asked: float | None
    blocks: int
    blocks_recomputed: int
    moved_bytes: int = 0

    @property
    def bytes(self) -> int:
        """Of all that is kept, moved and computed again."""
        return self.kept_bytes + self.moved_bytes + self.recomputed_bytes


@dataclass(frozen=True, kw_only=True)
class PlanFacts:
    """All that a reader of the report is told.

    Attributes:
        device: type of the device.
        source: where the trace is from.
        blocks: qualified names of the blocks.
        budget_bytes: what a step may take.
        static_bytes: what is there between steps.
        static_parts: what that is made of; a last part ``"other"`` is what the named ones leave (below 0 if they
            come to more). Empty if not known.
        predicted_peak_bytes: peak of a step, static memory included.
        measured_peak_bytes: the same, measured; None: not measured yet.
        predicted_extra_seconds: what recomputation and transfers add to a step.
        measured_extra_seconds: what recomputation adds, measured; None: not measured yet.
        step_seconds: measured duration of a step under the plan, recomputation included.
        traced_seconds: duration of the traced step, recomputation left out; 0 if not known.
        plain_peak_bytes: predicted peak if everything is kept.
        smallest_peak_bytes: predicted peak of the plan with the lowest one that was found.
        smallest_extra_seconds: what that plan adds to a step.
        kept_bytes: sum over the rows.
        recomputed_bytes: sum over the rows.
        peak: where the peak is, with this plan.
        plain_peak: where it is if everything is kept.
        paid_price: what the last bytes that were freed cost: the slope of the front at the plan.
        next_price: what the next ones would cost; None if no plan frees more.
        rows: by module and kind of op, in order of first use.
        recompute_seconds: the part of the predicted extra time in which ops run again.
        moved_bytes: what leaves the device in a step; a sum over the rows.
        fetched_bytes: what of it is read back; the rest has not gone yet when it is asked for.
        waited_seconds: the part of the predicted extra time in which the step waits for transfers.
        hidden: share of the transfers' time in which it goes on, without the latencies of reads; None: nothing moves.
        compiled: what compiled regions did, in words; empty: nothing was compiled.
    """

    device: str
    source: str
    blocks: tuple[str, ...]
    budget_bytes: int
    static_bytes: int
    static_parts: tuple[tuple[str, int], ...]
    predicted_peak_bytes: int
    measured_peak_bytes: int | None
    predicted_extra_seconds: float
    measured_extra_seconds: float | None
    step_seconds: float | None
    traced_seconds: float
    plain_peak_bytes: int
    smallest_peak_bytes: int
    smallest_extra_seconds: float
    kept_bytes: int
    recomputed_bytes: int
    peak: PeakPlace
    plain_peak: PeakPlace
    paid_price: float
    next_price: float | None
    rows: tuple[ModuleRow, ...]
    recompute_seconds: float = 0.0
    moved_bytes: int = 0
    fetched_bytes: int = 0
    waited_seconds: float = 0.0
    hidden: float | None = None
    compiled: str = ""


def facts_of(
    result: PlanResult,
    blocks: Iterable[str],
    *,
    measured_peak_bytes: int | None = None,
    measured_extra_seconds: float | None = None,
    step_seconds: float | None = None,
    static_parts: Mapping[str, int] | None = None,
    compiled: str = "",
) -> PlanFacts:
    """Everything that is to be said about a plan. The arguments are those of :func:`plan_report`."""
    trace, chosen = result.trace, result.chosen
    ours = simulate(trace, chosen.drop, False, chosen.move, result.transfer)
    plain = simulate(trace, result.plain.drop)
    blocks = tuple(blocks)
    rows = _rows(trace, Folding(blocks), Kept(trace, chosen.drop, ours), Kept(trace, result.plain.drop, plain))
    slope = slope_at(chosen, [*result.front, result.plain])
    smallest = min([*result.front, chosen], key=lambda c: (c.peak_bytes, c.extra_seconds))
    parts = list((static_parts or {}).items())
    if parts and (rest := result.static_bytes - sum(size for _, size in parts)):
        parts.append(("other", rest))
    return PlanFacts(
        device=trace.device,
        source=trace.source,
        blocks=blocks,
        budget_bytes=result.budget_bytes,
        static_bytes=result.static_bytes,
        static_parts=tuple(parts),
        predicted_peak_bytes=result.peak_bytes,
        measured_peak_bytes=measured_peak_bytes,
        predicted_extra_seconds=chosen.extra_seconds,
        measured_extra_seconds=measured_extra_seconds,
        step_seconds=step_seconds,
        traced_seconds=trace.forward_seconds + trace.backward_seconds,
        plain_peak_bytes=result.static_bytes + result.plain.peak_bytes,
        smallest_peak_bytes=result.static_bytes + smallest.peak_bytes,
        smallest_extra_seconds=smallest.extra_seconds,
        kept_bytes=sum(row.kept_bytes for row in rows),
        recomputed_bytes=sum(row.recomputed_bytes for row in rows),
        peak=peak_place(trace, ours.peak_event, set(ours.replayed)),
        plain_peak=peak_place(trace, plain.peak_event, set()),
        paid_price=slope.paid,
        next_price=slope.next,
        rows=rows,
        recompute_seconds=sum(row.extra_seconds for row in rows),
        moved_bytes=ours.moved_bytes,
        fetched_bytes=ours.fetched_bytes,
        waited_seconds=ours.waited_seconds,
        hidden=_hidden(trace, ours, result.transfer),
        compiled=compiled,
    )


def _hidden(trace: Trace, ours: Simulation, transfer: Transfer | None) -> float | None:
    if transfer is None or not ours.left:
        return None
    busy = sum(transfer.out_seconds(trace.nbytes[v]) for v in ours.left)
    busy += ours.fetched_bytes / transfer.in_bytes_per_second
    return max(0.0, 1.0 - ours.waited_seconds / busy) if busy > 0 else 1.0


@dataclass
class _Sum:
    kept: list[int] = field(default_factory=list)
    plain_bytes: int = 0
    moved_bytes: int = 0
    unmoved_plain_bytes: int = 0
    recomputed_bytes: int = 0
    extra_seconds: float = 0.0
    blocks: set[str] = field(default_factory=set)
    recomputed_in: set[str] = field(default_factory=set)


def _rows(trace: Trace, folding: Folding, ours: Kept, plain: Kept) -> tuple[ModuleRow, ...]:
    sums: dict[tuple[str, str], _Sum] = defaultdict(_Sum)
    nbytes = trace.nbytes
    for o, op in enumerate(trace.ops):
        found = sums[folding.name(op.module), op.kind]
        block = folding.block(op.module)
        if block:
            found.blocks.add(block)
        found.kept += [v for v in op.outputs if v in ours.values]
        found.plain_bytes += sum(nbytes[v] for v in op.outputs if v in plain.values)
        found.unmoved_plain_bytes += sum(nbytes[v] for v in op.outputs if v in plain.values and v not in ours.moved)
        found.moved_bytes += sum(nbytes[v] for v in op.outputs if v in ours.moved)
        if o in ours.replayed:
            found.recomputed_bytes += sum(nbytes[v] for v in op.outputs)
            found.extra_seconds += op.seconds
            found.recomputed_in.add(block)
    return tuple(
        _row(trace, ours, module, kind, found)
        for (module, kind), found in sums.items()
        if found.plain_bytes or found.moved_bytes or found.recomputed_in or any(nbytes[v] for v in found.kept)
    )


def _row(trace: Trace, ours: Kept, module: str, kind: str, found: _Sum) -> ModuleRow:
    kept = sum(trace.nbytes[v] for v in found.kept)
    recomputing_frees = found.unmoved_plain_bytes - kept
    return ModuleRow(
        module=module,
        kind=kind,
        kept_bytes=kept,
        fixed_bytes=sum(trace.nbytes[v] for v in found.kept if not trace.ops[trace.makers[v]].droppable),
        recomputed_bytes=found.recomputed_bytes,
        extra_seconds=found.extra_seconds,
        freed_bytes=found.plain_bytes - kept,
        paid=found.extra_seconds / recomputing_frees if found.recomputed_in and recomputing_frees > 0 else None,
        asked=ours.price(found.kept),
        blocks=len(found.blocks),
        blocks_recomputed=len(found.recomputed_in - {""}),
        moved_bytes=found.moved_bytes,
    )
