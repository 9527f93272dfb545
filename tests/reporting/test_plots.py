"""The plots show what the simulator says, are the same every time, and leave nothing behind."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from xml.etree import ElementTree

import matplotlib
import pytest

from lightning_remat import ConfigurationError
from lightning_remat.planning.simulation import simulate
from lightning_remat.planning.trace import NEED, Trace
from lightning_remat.planning.transfer import Transfer
from lightning_remat.reporting import plots
from lightning_remat.reporting.curves import Curve, measured_curve, simulated_curve, thinned
from lightning_remat.reporting.plan_report import PlanReport, plan_report
from tests.helpers.traces import plan_by_hand, transformer_trace

MIB = 2**20
BLOCKS = [f"layers.{i}" for i in range(4)]


def report(budget: int = 45 * MIB, static: int = 20 * MIB, trace: Trace | None = None, **options: object) -> PlanReport:
    trace = trace or transformer_trace(4, tokens=1024, width=256, vocabulary=512)
    result = plan_by_hand(trace, budget_bytes=budget, static_bytes=static)
    return plan_report(result, BLOCKS, **options)


def measured() -> PlanReport:
    timeline = [(0.0, 0), (0.01, 30 * MIB), (0.02, 35 * MIB), (0.05, 0)]
    return report(measured_peak_bytes=44 * MIB, measured_extra_seconds=2e-4, step_seconds=0.05, timeline=timeline)


def panel(report: PlanReport, draw: plots.Draw):
    figure = plots._figure([draw], report)
    (found,) = figure.subfigs[0].axes
    return found, [text.get_text() for text in figure.subfigs[0].legends[0].get_texts()]


def test_the_curve_is_the_simulators() -> None:
    """Levels, peak and length: forward and backward as traced, and what runs again on top."""
    shown = report()
    trace, drop = shown.result.trace, shown.result.chosen.drop
    found = simulate(trace, drop, timeline=True)
    curve = simulated_curve(trace, drop)
    assert curve.y[2::2] == found.levels
    assert curve.y[curve.peak] == found.peak
    assert curve.x == sorted(curve.x)
    assert found.extra_seconds > 0
    assert curve.x[-1] == pytest.approx(trace.forward_seconds + trace.backward_seconds + found.extra_seconds)
    assert curve.turn == pytest.approx(trace.forward_seconds)


def test_the_curve_of_a_plan_that_moves() -> None:
    """Levels and peak of the simulator that knows moves; as long as what runs again makes it."""
    trace = report().result.trace
    drop = [False] * len(trace.ops)
    move = [op.module.endswith(".up") for op in trace.ops]
    transfer = Transfer(out_bytes_per_second=1e9, in_bytes_per_second=1e9)
    found = simulate(trace, drop, True, move, transfer)
    curve = simulated_curve(trace, drop, move, transfer)
    assert found.moved_bytes > 0
    assert curve.y[2::2] == found.levels
    assert curve.y[curve.peak] == found.peak < simulate(trace, drop).peak
    assert curve.x[-1] == pytest.approx(trace.forward_seconds + trace.backward_seconds)


def test_without_durations_events_are_counted() -> None:
    """A trace that knows no time, such as one of fake tensors, still has a plot."""
    shown = report()
    trace = shown.result.trace
    for op in trace.ops:
        op.seconds = 0.0
    trace.forward_seconds = trace.backward_seconds = 0.0
    curve = simulated_curve(trace, shown.result.chosen.drop)
    assert not curve.in_seconds
    assert curve.x[-1] == len(trace.events)
    assert curve.turn == next(i for i, event in enumerate(trace.events) if event[0] == NEED)
    assert panel(shown, plots.draw_memory)[0].get_xlabel() == "events of the step, in order"


def test_a_thinned_curve_keeps_its_ends_and_its_peak() -> None:
    x = [i / 1000 for i in range(100_000)]
    y = [(i * 7919) % 1000 for i in range(100_000)]
    y[54_321] = 10_000
    curve = Curve(x, y, 54_321, None, True)
    xs, ys = thinned(curve, bins=100)
    assert 200 < len(xs) <= 404
    assert (xs[0], xs[-1]) == (x[0], x[-1])
    assert xs == sorted(xs)
    assert ys[xs.index(x[54_321])] == max(ys) == 10_000
    assert thinned(Curve([0.0] * 5000, [1] * 5000, 0, None, True))[0] == [0.0] * 5000


def test_measured_time_is_stretched_to_the_step() -> None:
    like = Curve([0.0, 3.0], [0, 0], 0, None, True)
    curve = measured_curve([(0.0, 0), (2.0, 7), (6.0, 1)], like)
    assert (curve.x, curve.y, curve.peak) == ([0.0, 1.0, 3.0], [0, 7, 1], 1)
    assert measured_curve([], like).y == [0]


def test_the_memory_plot() -> None:
    """Axes have units, every curve its peak in words, the budget and the beginning of backward are lines."""
    shown = measured()
    found, legend = panel(shown, plots.draw_memory)
    facts = shown.facts
    assert found.get_ylabel() == "memory [MiB]"
    assert re.search(r"time in the step, estimated.* \[µs\]", found.get_xlabel())
    assert legend == [
        "static memory: 20.0 MiB",
        f"everything kept: peak {facts.plain_peak_bytes / MIB:.1f} MiB",
        f"this plan, predicted: peak {facts.predicted_peak_bytes / MIB:.1f} MiB",
        "this plan, measured: peak 55.0 MiB",
        "budget: 45.0 MiB",
    ]
    assert [text.get_text() for text in found.texts] == ["forward", "backward"]
    lines = {line.get_label().split(":")[0]: line for line in found.lines}
    assert max(lines["this plan, predicted"].get_ydata()) == pytest.approx(facts.predicted_peak_bytes / MIB)
    assert max(lines["everything kept"].get_ydata()) == pytest.approx(facts.plain_peak_bytes / MIB)
    assert set(lines["budget"].get_ydata()) == {45.0}
    assert found.get_ylim()[1] > facts.plain_peak_bytes / MIB


def test_the_front_plot() -> None:
    """Every plan of the front is a point; the chosen one, both ends and the measured one are named."""
    shown = measured()
    found, legend = panel(shown, plots.draw_front)
    result = shown.result
    assert found.get_xlabel() == "peak memory of a step [MiB]"
    assert found.get_ylabel() == "extra time of a step [µs]"
    line = found.lines[0]
    assert list(line.get_xdata()) == pytest.approx([20 + c.peak_bytes / MIB for c in result.front])
    assert list(line.get_ydata()) == pytest.approx([c.extra_seconds * 1e6 for c in result.front])
    assert [text.split(":")[0] for text in legend] == [
        "plans found", "everything kept", "smallest plan", "this plan, predicted", "this plan, measured", "budget",
    ]  # fmt: skip
    assert legend[4] == "this plan, measured: 44.0 MiB, +200 µs"


@pytest.mark.parametrize("draw", [plots.draw_memory, plots.draw_front])
def test_a_budget_far_away_does_not_squeeze_the_plot(draw: plots.Draw) -> None:
    found, legend = panel(report(budget=2**45), draw)
    assert legend[-1] == "budget: 32768.00 GiB (outside of the plot)"
    assert max(found.get_xlim()[1] if draw is plots.draw_front else found.get_ylim()[1], 0) < 1000


@pytest.mark.parametrize("draw", [plots.draw_memory, plots.draw_front])
@pytest.mark.parametrize("make", [report, measured])
def test_no_text_lies_over_another(draw: plots.Draw, make) -> None:
    """Legend, labels and ticks have room of their own."""
    figure = plots._figure([draw], make())
    figure.draw_without_rendering()
    (found,) = figure.subfigs[0].axes
    legend = figure.subfigs[0].legends[0]
    texts = [
        legend.get_title(), *legend.get_texts(), found.xaxis.label, found.yaxis.label, *found.texts,
        *[t for t in (*found.get_xticklabels(), *found.get_yticklabels()) if t.get_text()],
    ]  # fmt: skip
    limits = [(found.get_xlim(), found.get_xticklabels(), 0), (found.get_ylim(), found.get_yticklabels(), 1)]
    hidden = {id(t) for (low, high), ticks, i in limits for t in ticks if not low <= t.get_position()[i] <= high}
    boxes = [(t.get_text(), t.get_window_extent()) for t in texts if id(t) not in hidden]
    whole = figure.bbox
    for i, (text, box) in enumerate(boxes):
        assert whole.x0 <= box.x0, text
        assert box.x1 <= whole.x1 + 12, text  # half of a last tick's number
        for other, there in boxes[i + 1 :]:
            assert not box.overlaps(there), (text, other)


@pytest.mark.parametrize("suffix", [".svg", ".png"])
def test_a_plot_is_the_same_every_time(suffix: str, tmp_path: Path) -> None:
    """Byte by byte, whatever the user's matplotlib is set to write into a file."""
    first = measured().save(tmp_path / f"plan{suffix}").read_bytes()
    second = measured().save(tmp_path / f"plan{suffix}").read_bytes()
    assert first == second


def test_an_svg_names_no_address_and_no_date(tmp_path: Path) -> None:
    """Namespaces are all that looks like one."""
    text = measured().save(tmp_path / "plan.svg").read_text()
    root = ElementTree.fromstring(text)
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    for element in root.iter():
        for name, value in element.attrib.items():
            assert not name.endswith("href") or value.startswith("#")
            assert "://" not in value
    assert "Matplotlib" not in text
    assert "metadata" not in text


def test_the_users_matplotlib_is_left_alone(tmp_path: Path) -> None:
    """No backend chosen, no setting changed, no figure left in pyplot."""
    before, backend = dict(matplotlib.rcParams), matplotlib.get_backend(auto_select=False)
    measured().save(tmp_path / "plan.svg")
    assert dict(matplotlib.rcParams) == before
    assert matplotlib.get_backend(auto_select=False) == backend


@pytest.mark.parametrize("suffix", [".svg", ".png"])
def test_without_matplotlib_the_way_out_is_named(suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("matplotlib.figure", "matplotlib.backends.backend_agg"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigurationError, match=r'pip install "lightning-remat\[plot\]"'):
        report().save(tmp_path / f"plan{suffix}")
    assert not list(tmp_path.iterdir())


def test_traces_of_any_size_can_be_drawn(tmp_path: Path) -> None:
    """Nothing at all; one event; thousands, of which no more is drawn than can be seen."""
    for trace in (Trace(), Trace(events=[(5, MIB, 0)]), transformer_trace(40, tokens=64, width=32)):
        path = report(trace=trace).save(tmp_path / "plan.svg")
        assert path.stat().st_size < 600_000
