"""The report of a plan says what the simulator says, in numbers and in words."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lightning_remat import ConfigurationError
from lightning_remat.planning.plan import Candidate, PlanResult, judged
from lightning_remat.planning.simulation import simulate
from lightning_remat.planning.trace import NEED, OTHER, RUN, SAVE, Trace
from lightning_remat.reporting import wording
from lightning_remat.reporting.facts import ModuleRow, PlanFacts
from lightning_remat.reporting.plan_report import PlanReport, plan_report
from lightning_remat.reporting.prices import slope_at
from lightning_remat.reporting.text import Folding, format_seconds
from tests.helpers.traces import TraceBuilder, drop_where, plan_by_hand, transformer_trace

MIB = 2**20
TOKENS, WIDTH = 1024, 64
STREAM, STATISTIC = TOKENS * WIDTH * 2, TOKENS * 4
BLOCKS = [f"layers.{i}" for i in range(6)]


def small(**options: object) -> Trace:
    return transformer_trace(6, tokens=TOKENS, width=WIDTH, vocabulary=128, **options)


def result_of(trace: Trace, drop: tuple[bool, ...], **options: int) -> PlanResult:
    """A plan that was not chosen from anything but itself and keeping everything."""
    plain, chosen = judged(trace, [False] * len(trace.ops)), judged(trace, drop)
    front = tuple(sorted({chosen, plain}, key=lambda c: c.peak_bytes))
    figures = {"static_bytes": 0, "budget_bytes": chosen.peak_bytes} | options
    return PlanResult(trace=trace, chosen=chosen, front=front, plain=plain, **figures)


def rows(facts: PlanFacts) -> dict[tuple[str, str], ModuleRow]:
    return {(row.module, row.kind): row for row in facts.rows}


@pytest.mark.parametrize("dropout", [False, True])
@pytest.mark.parametrize("share", [0.0, 0.4, 0.7, 1.0])
def test_sums_are_those_of_the_simulator(share: float, dropout: bool) -> None:
    """Kept bytes are the simulator's level when backward begins, less the loss and generator states."""
    trace = small(dropout=dropout)
    peak = judged(trace, [False] * len(trace.ops)).peak_bytes
    result = plan_by_hand(trace, budget_bytes=int(share * peak))
    facts = plan_report(result, BLOCKS).facts
    ours = simulate(trace, result.chosen.drop, timeline=True)
    turn = next(i for i, event in enumerate(trace.events) if event[0] == NEED)
    recorded = sum(op.state for op, drop in zip(trace.ops, result.chosen.drop, strict=True) if drop)
    loss = 4
    assert facts.kept_bytes == ours.levels[turn - 1] - recorded - loss
    assert sum(row.extra_seconds for row in facts.rows) == pytest.approx(ours.extra_seconds)
    assert facts.recomputed_bytes == sum(trace.nbytes[v] for o in ours.replayed for v in trace.ops[o].outputs)
    plain = plan_report(plan_by_hand(trace), BLOCKS).facts
    assert sum(row.freed_bytes for row in facts.rows) == plain.kept_bytes - facts.kept_bytes
    assert facts.predicted_peak_bytes == ours.peak
    assert facts.plain_peak_bytes == peak


def test_bytes_and_prices_by_hand() -> None:
    """Cheap ops dropped in the first two blocks of six: each figure from the shapes."""
    trace = small()
    drop = drop_where(trace, lambda i, op: op.kind == "cheap" and i + 1 not in trace.borders and 1 <= i <= 20)
    facts = plan_report(result_of(trace, drop), BLOCKS).facts
    found = rows(facts)
    seconds = {op.module: op.seconds for op in trace.ops}

    gelu = found["layers.*.mlp", "cheap"]
    assert (gelu.kept_bytes, gelu.recomputed_bytes, gelu.freed_bytes) == (16 * STREAM, 8 * STREAM, 8 * STREAM)
    assert (gelu.blocks, gelu.blocks_recomputed) == (6, 2)
    price = seconds["layers.0.mlp"] / (4 * STREAM)
    assert gelu.paid == pytest.approx(price)
    assert gelu.asked == pytest.approx(price)
    assert gelu.extra_seconds == pytest.approx(2 * seconds["layers.0.mlp"])

    norm = found["layers.*.norm1", "cheap"]
    assert norm.kept_bytes == 4 * (STREAM + 2 * STATISTIC)
    assert norm.recomputed_bytes == 2 * (STREAM + 2 * STATISTIC)

    qkv = found["layers.*.attention.qkv", "expensive"]
    assert (qkv.kept_bytes, qkv.recomputed_bytes, qkv.paid) == (18 * STREAM, 0, None)
    assert qkv.asked == pytest.approx(seconds["layers.0.attention.qkv"] / (3 * STREAM))

    # The add in the middle of a block is computed again from the projection, which autograd itself would not keep.
    proj = found["layers.*.attention.proj", "expensive"]
    assert (proj.kept_bytes, proj.freed_bytes) == (2 * STREAM, -2 * STREAM)
    assert ("layers.*.mlp.down", "expensive") not in found  # neither kept nor computed again


def test_what_has_to_run_first_is_part_of_the_price() -> None:
    """A block's output: the add is cheap, the matrix product before it, which nobody keeps, is not."""
    trace = small()
    facts = plan_report(result_of(trace, (False,) * len(trace.ops)), BLOCKS).facts
    add = rows(facts)["layers.*", "cheap"]
    seconds = {op.module: op.seconds for op in trace.ops}
    both = seconds["layers.0.attention.proj"] + seconds["layers.0.mlp.down"] + 2 * seconds["layers.0"]
    assert add.asked == pytest.approx(both / (2 * STREAM))


def test_what_only_serves_others_has_no_price() -> None:
    """Under full recomputation the projection runs again, and nobody would have kept it."""
    trace = small()
    drop = drop_where(trace, lambda i, op: i + 1 not in trace.borders and op.module.startswith("layers"))
    facts = plan_report(result_of(trace, drop), BLOCKS).facts
    proj = rows(facts)["layers.*.attention.proj", "expensive"]
    assert (proj.paid, proj.freed_bytes, proj.recomputed_bytes) == (None, 0, 6 * STREAM)
    assert wording.cells(proj, facts)[6] == "for others"


def test_fixed_values_and_values_that_free_nothing() -> None:
    """An op that cannot run again; one whose input would have to be kept in its place."""
    b = TraceBuilder()
    (a,) = b.op("a", "first", "fixed", [], [MIB], droppable=False)
    (c,) = b.op("b", "second", "cheap", [a], [MIB], save_outputs=[0])
    b.op("c", "third", "fixed", [c], [8], save_outputs=[0], droppable=False)
    b.free(a, c, 2)
    trace = b.backward()
    facts = plan_report(result_of(trace, (False,) * 3), []).facts
    found = {row.module: row for row in facts.rows}
    assert set(found) == {"second", "third"}
    assert (found["third"].asked, found["third"].fixed_bytes, found["third"].kept_bytes) == (None, 8, 8)
    assert (found["second"].asked, found["second"].fixed_bytes) == (None, 0)
    assert wording.cells(found["third"], facts)[7] == "fixed"
    assert wording.cells(found["second"], facts)[7] == "frees nothing"


def test_what_is_written_into_a_kept_value_is_kept() -> None:
    """An in-place op on a kept value cannot be dropped by itself, whatever the plan says."""
    b = TraceBuilder()
    (x,) = b.op("conv", "conv", "expensive", [], [MIB])
    (y,) = b.op("relu_", "act", "cheap", [x], [MIB], save_outputs=[0], writes=x)
    b.free(y)
    trace = b.backward()
    facts = plan_report(result_of(trace, (False, True)), []).facts
    assert (facts.kept_bytes, facts.recomputed_bytes) == (MIB, 0)
    dropped = plan_report(result_of(trace, (True, True)), []).facts
    assert (dropped.kept_bytes, dropped.recomputed_bytes) == (0, 2 * MIB)


def test_the_price_is_the_slope_of_the_front() -> None:
    """On a corner both sides differ; between two corners they are the same; at the ends one side is missing."""
    front = [Candidate((), peak, seconds) for peak, seconds in ((10, 9.0), (20, 4.0), (25, 3.9), (40, 1.0), (50, 0.0))]
    slopes = [slope_at(c, front) for c in front]
    assert slopes[0] == (0.5, None)
    assert slopes[1] == (pytest.approx(0.15), 0.5)
    assert slopes[2] == (pytest.approx(0.15), pytest.approx(0.15))
    assert slopes[3] == (pytest.approx(0.1), pytest.approx(0.15))
    assert slopes[4] == (0.0, pytest.approx(0.1))
    assert slope_at(front[0], [front[0]]) == (0.0, None)


def test_where_the_peak_is() -> None:
    """In backward of the last values; while values are computed again; in forward at a large workspace."""
    trace = small()
    plain = plan_report(plan_by_hand(trace), BLOCKS).facts
    assert (plain.peak.part, plain.peak.recomputing) == ("backward", False)
    assert plain.peak == plain.plain_peak
    assert plain.peak.event == simulate(trace, [False] * len(trace.ops)).peak_event

    b = TraceBuilder()
    b.op("a", "one", "cheap", [], [MIB])
    b.op("b", "two", "cheap", [0], [MIB], save_outputs=[0])
    b.free(0, 1)
    again = b.backward()
    again.ops[0].scratch = 9 * MIB  # when it runs once more
    facts = plan_report(result_of(again, (True, True)), []).facts
    assert (facts.peak.part, facts.peak.module, facts.peak.recomputing) == ("backward", "two", True)
    assert dict(wording.notes(facts))["peak"] == "in backward, in two, while values are computed again"

    b = TraceBuilder()
    b.op("a", "one", "cheap", [], [MIB])
    b.op("b", "two", "cheap", [0], [MIB], save=[0], scratch=9 * MIB)
    b.free(0, 1)
    forward = plan_report(result_of(b.backward(), (False, False)), []).facts
    assert (forward.peak.part, forward.peak.module) == ("forward", "two")


@pytest.mark.parametrize("module", ["layers.5.mlp", "layers.0.mlp.up", "layers.2.norm2", "layers.3.attention"])
def test_the_module_of_a_peak_is_the_one_whose_node_runs(module: str) -> None:
    """Backward of one op takes by far the most."""
    trace = small()
    target = next(i for i, op in enumerate(trace.ops) if op.module == module)
    made = trace.events.index((RUN, target, 0))
    slot = next(a for kind, a, _ in reversed(trace.events[:made]) if kind == SAVE)
    needed = next(i for i, (kind, a, _) in enumerate(trace.events) if kind == NEED and a == slot)
    trace.events.insert(needed + 1, (OTHER, 2**30, 0))
    assert plan_report(plan_by_hand(trace), BLOCKS).facts.peak.module == module


def test_an_unmeasured_plan_says_so() -> None:
    """Both figures are named as not measured; nothing is made up."""
    report = plan_report(plan_by_hand(small()), BLOCKS)
    assert str(report).count("not measured yet") == 2
    assert [line[2] for line in wording.figures(report.facts)] == ["not measured yet"] * 2
    assert "step" not in dict(wording.notes(report.facts))


def test_measured_figures_are_shown_beside_the_predicted_ones() -> None:
    """With the error of the prediction, and the share of the measured step."""
    result = plan_by_hand(small(), budget_bytes=100 * MIB, static_bytes=95 * MIB)
    predicted = result.peak_bytes
    facts = plan_report(result, BLOCKS, int(predicted * 1.02), 0.004, 0.050).facts
    peak, extra = wording.figures(facts)
    assert peak[2].endswith("(+2.0%)")
    assert extra[2] == "4.00 ms (8.0%)"
    assert dict(wording.notes(facts))["step"] == "50.0 ms, measured"


def test_static_memory_adds_up() -> None:
    """What the named parts leave is called other, also if they come to too much."""
    result = plan_by_hand(small(), static_bytes=10 * MIB)
    assert plan_report(result, []).facts.static_parts == ()
    for first, other in ((4, 6), (12, -2)):
        parts = plan_report(result, [], static_parts={"parameters": first * MIB}).facts.static_parts
        assert parts == (("parameters", first * MIB), ("other", other * MIB))
    assert plan_report(result, [], static_parts={"parameters": 10 * MIB}).facts.static_parts[-1][0] == "parameters"
    facts = plan_report(result, []).facts
    assert facts.predicted_peak_bytes == result.chosen.peak_bytes + 10 * MIB
    assert facts.smallest_peak_bytes == result.front[0].peak_bytes + 10 * MIB


@pytest.mark.parametrize(
    ("share", "words"),
    [(2.0, "Everything fits"), (0.5, "The budget sets a price"), (0.0, "Even this plan needs")],
)
def test_the_explanation_fits_the_plan(share: float, words: str) -> None:
    trace = small()
    peak = judged(trace, [False] * len(trace.ops)).peak_bytes
    assert words in str(plan_report(plan_by_hand(trace, budget_bytes=int(share * peak)), BLOCKS))
    smallest = plan_by_hand(trace, budget_bytes=plan_by_hand(trace, budget_bytes=0).chosen.peak_bytes)
    assert "No plan was found that needs less" in wording.explanation(plan_report(smallest, BLOCKS).facts)


def test_the_printed_report() -> None:
    """Blocks under one name, one line for all, the reasons in plain words, and nothing wider than it may be."""
    text = str(plan_report(plan_by_hand(small(), budget_bytes=2 * MIB), BLOCKS))
    assert "layers.*.attention.qkv" in text
    assert "layers.3." not in text
    assert "\n all " in text
    assert "6: layers.0 ... layers.5" in text
    assert max(map(len, text.splitlines())) <= 110


def test_names_are_no_markup() -> None:
    """A module may be called anything."""
    trace = small(name="[red]h[/red].{}")
    text = str(plan_report(plan_by_hand(trace, budget_bytes=2 * MIB), [f"[red]h[/red].{i}" for i in range(6)]))
    assert "[red]h[/red].*.norm1" in text
    assert "[red]h[/red].0 ... [red]h[/red].5" in text


def test_a_long_table_is_cut_and_says_so() -> None:
    """Without blocks to fold by, the largest rows are printed; the data has all."""
    report = plan_report(plan_by_hand(small(), budget_bytes=2 * MIB), [])
    hidden = len(report.facts.rows) - 40
    assert hidden > 0
    assert f"({hidden} smaller ones)" in str(report)


def test_a_trace_of_nothing() -> None:
    """An empty report, not an error."""
    text = str(plan_report(plan_by_hand(Trace(), budget_bytes=MIB), []))
    assert "everything kept, peak 0 B" in text


def test_data_can_be_read_back(tmp_path: Path) -> None:
    """JSON holds every fact, unrounded."""
    report = plan_report(plan_by_hand(small(), budget_bytes=2 * MIB), BLOCKS, static_parts={"parameters": 5})
    data = json.loads(report.save(tmp_path / "plan.json").read_text())
    assert data.pop("format") == 1
    data["rows"] = tuple(ModuleRow(**row) for row in data["rows"])
    for name in ("peak", "plain_peak"):
        data[name] = type(report.facts.peak)(**data[name])
    data["blocks"] = tuple(data["blocks"])
    data["static_parts"] = tuple(map(tuple, data["static_parts"]))
    assert PlanFacts(**data) == report.facts


def test_the_suffix_says_what_is_written(tmp_path: Path) -> None:
    report = plan_report(plan_by_hand(small(), budget_bytes=2 * MIB), BLOCKS)
    begins = {
        ".html": b"<!DOCTYPE html>",
        ".png": b"\x89PNG",
        ".svg": b"<?xml",
        ".json": b"{",
        ".TXT": b"Recomputation",
    }
    for suffix, begin in begins.items():
        path = tmp_path / f"plan{suffix}"
        assert report.save(str(path)) == path
        assert path.read_bytes().startswith(begin)
    assert (tmp_path / "plan.TXT").read_text(encoding="utf-8") == str(report)


@pytest.mark.parametrize("name", ["plan.pdf", "plan", ".html"])
def test_another_suffix_is_refused(name: str, tmp_path: Path) -> None:
    report: PlanReport = plan_report(plan_by_hand(small()), BLOCKS)
    with pytest.raises(ConfigurationError, match=r"\.html .*\.png or \.svg .*\.json .*\.txt") as raised:
        report.save(tmp_path / name)
    assert name in str(raised.value)
    assert not list(tmp_path.iterdir())


def test_folding() -> None:
    """Blocks that repeat share a name; one alone keeps its own; a number that only begins alike is another block."""
    folding = Folding(["h.1", "h.10", "stage2", "stage3", "0", "1", "alone.4"])
    assert folding.name("h.10.mlp.0") == "h.*.mlp.0"
    assert folding.block("h.10.mlp.0") == "h.10"
    assert folding.name("h.2") == "h.2"
    assert folding.name("stage3.conv") == "stage*.conv"
    assert folding.name("1.conv") == "*.conv"
    assert folding.name("alone.4.conv") == "alone.4.conv"
    assert folding.name("") == ""


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (4.1e-7, "0.41 µs"), (8.5e-4, "850 µs"), (0.0041, "4.10 ms"), (1.5, "1.50 s"), (123.4, "123 s")],
)
def test_durations_in_words(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text
