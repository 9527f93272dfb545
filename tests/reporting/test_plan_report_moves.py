"""The report of a plan under which something leaves the device: beside what is kept, and what is computed again."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from lightning_remat.planning.plan import PlanResult, judged
from lightning_remat.planning.simulation import simulate
from lightning_remat.planning.trace import Trace
from lightning_remat.planning.transfer import Transfer
from lightning_remat.reporting import wording
from lightning_remat.reporting.facts import ModuleRow, PlanFacts
from lightning_remat.reporting.plan_report import plan_report
from tests.helpers.traces import plan_by_hand, transformer_trace

TOKENS, WIDTH = 1024, 64
STREAM = TOKENS * WIDTH * 2
BLOCKS = [f"layers.{i}" for i in range(6)]


def small() -> Trace:
    return transformer_trace(6, tokens=TOKENS, width=WIDTH, vocabulary=128)


def all_kept() -> PlanResult:
    trace = small()
    plain = judged(trace, [False] * len(trace.ops))
    return PlanResult(trace=trace, chosen=plain, front=(plain,), plain=plain, static_bytes=0, budget_bytes=2**40)


def rows(facts: PlanFacts) -> dict[tuple[str, str], ModuleRow]:
    return {(row.module, row.kind): row for row in facts.rows}


SLOW = Transfer(out_bytes_per_second=1e9, in_bytes_per_second=5e8, min_bytes=STREAM)


def moving(recompute: bool = False, transfer: Transfer = SLOW) -> tuple[Trace, PlanResult]:
    """What the two big linear layers of each block make leaves; GELUs are computed again, or kept."""
    trace = small()
    plain = judged(trace, [False] * len(trace.ops))
    gelu = [recompute and op.module.endswith(".mlp") and op.droppable for op in trace.ops]
    move = [op.module.endswith((".qkv", ".up")) for op in trace.ops]
    chosen = judged(trace, gelu, move, transfer)
    front = tuple(sorted({chosen, plain}, key=lambda c: c.peak_bytes))
    return trace, PlanResult(
        trace=trace, chosen=chosen, front=front, plain=plain, static_bytes=0, budget_bytes=chosen.peak_bytes,
        transfer=transfer,
    )  # fmt: skip


def test_what_moves_is_neither_kept_nor_computed_again() -> None:
    """Rows add up to what the simulator says; what remains is what it was."""
    _, result = moving()
    facts = plan_report(result, BLOCKS).facts
    found = rows(facts)
    assert facts.moved_bytes == result.chosen.moved_bytes == sum(row.moved_bytes for row in facts.rows)
    qkv, up = found["layers.*.attention.qkv", "expensive"], found["layers.*.mlp.up", "expensive"]
    assert (qkv.moved_bytes, qkv.kept_bytes, qkv.freed_bytes) == (18 * STREAM, 0, 18 * STREAM)
    assert (up.moved_bytes, up.kept_bytes, up.recomputed_bytes) == (24 * STREAM, 0, 0)
    assert facts.moved_bytes == 42 * STREAM
    plain = plan_report(all_kept(), BLOCKS).facts
    assert facts.kept_bytes + facts.moved_bytes == plain.kept_bytes
    others = {key: row for key, row in rows(plain).items() if not found[key].moved_bytes}
    assert {key: row.kept_bytes for key, row in others.items()} == {key: found[key].kept_bytes for key in others}
    assert facts.recompute_seconds == 0


def test_waits_and_what_is_hidden_are_the_simulators() -> None:
    trace, result = moving()
    ours = simulate(trace, result.chosen.drop, False, result.chosen.move, SLOW)
    facts = plan_report(result, BLOCKS).facts
    assert (facts.waited_seconds, facts.fetched_bytes) == (ours.waited_seconds, ours.fetched_bytes)
    assert 0 < facts.waited_seconds == result.chosen.waited_seconds
    busy = facts.moved_bytes / 1e9 + facts.fetched_bytes / 5e8
    assert facts.hidden == pytest.approx(max(0, 1 - facts.waited_seconds / busy))
    free = Transfer(out_bytes_per_second=float("inf"), in_bytes_per_second=float("inf"), min_bytes=STREAM)
    facts = plan_report(moving(transfer=free)[1], BLOCKS).facts
    assert (facts.waited_seconds, facts.hidden) == (0.0, 1.0)


def test_the_price_of_computing_again_is_that_of_what_it_frees() -> None:
    """GELUs are computed again from what comes back; what moves does not make them cheaper."""
    trace, result = moving(recompute=True)
    gelu = rows(plan_report(result, BLOCKS).facts)["layers.*.mlp", "cheap"]
    assert (gelu.recomputed_bytes, gelu.moved_bytes) == (24 * STREAM, 0)
    seconds = {op.module: op.seconds for op in trace.ops}
    assert gelu.paid == pytest.approx(seconds["layers.0.mlp"] / (4 * STREAM))


@pytest.mark.parametrize("recompute", [False, True])
def test_moves_in_words(recompute: bool) -> None:
    """A column, a line, and the title; without moves none of these is there."""
    _, result = moving(recompute)
    report = plan_report(result, BLOCKS)
    text = str(report)
    assert len(wording.heads(report.facts)) == len(wording.totals(report.facts)) == 9
    assert all(len(wording.cells(row, report.facts)) == 9 for row in report.facts.rows)
    of = "of computing again and transfers, 5.2 MiB moved" if recompute else "of transfers, 5.2 MiB moved"
    assert of in wording.title(report.facts)
    moved = dict(wording.notes(report.facts))["moved"]
    assert moved.startswith("5.2 MiB out, ")
    assert "the step waits" in moved
    assert '"Moved": leaves the device' in " ".join(text.split())
    plain = str(plan_report(all_kept(), BLOCKS)).lower()
    assert "moved" not in plain
    assert "transfer" not in plain


def test_moves_on_the_page_and_as_data(tmp_path: Path) -> None:
    _, result = moving(recompute=True)
    report = plan_report(result, BLOCKS)
    page = report.save(tmp_path / "plan.html").read_text()
    assert page.count('class="moved"') == 2  # rows that move something
    assert 'class="key moved"' in page
    facts = json.loads(report.to_json())
    assert facts["moved_bytes"] == 42 * STREAM
    without = plan_report(plan_by_hand(small()), BLOCKS)
    assert '"moved' not in without.save(tmp_path / "plain.html").read_text()


def test_why_a_plan_that_moves_is_as_it_is() -> None:
    """By its price, or since it costs nothing."""
    _, result = moving()
    text = wording.explanation(plan_report(result, BLOCKS).facts)
    assert "its last MiB cost" in text
    assert "computing again and transfers" in text
    free = Transfer(out_bytes_per_second=float("inf"), in_bytes_per_second=float("inf"), min_bytes=STREAM)
    _, result = moving(transfer=free)
    assert "the budget costs no time" in wording.explanation(plan_report(result, BLOCKS).facts)
    _, result = moving(recompute=True)
    leaner = replace(result.chosen, peak_bytes=result.chosen.peak_bytes // 2, extra_seconds=1.0)
    facts = plan_report(replace(result, front=(leaner, *result.front)), BLOCKS).facts
    assert "computed again or moved" in wording.explanation(facts)
