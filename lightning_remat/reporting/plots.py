"""A plan in pictures: memory over a step before and after, and the front from which the plan was taken.

Needs matplotlib, which comes with the extra ``plot``. Figures are made without ``pyplot``: no backend is chosen, no
global state changed, and the same report gives the same bytes every time.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_remat.errors import ConfigurationError
from lightning_remat.reporting.curves import Curve, measured_curve, simulated_curve, thinned
from lightning_remat.reporting.text import format_seconds, format_size

if TYPE_CHECKING:
    from lightning_remat.reporting.plan_report import PlanReport

# Blue, vermilion and green of Okabe and Ito, which people with any colour vision can tell apart, and greys; what they
# stand for differs in shape or dash as well.
PLAN, MEASURED, SMALLEST = "#0072b2", "#d55e00", "#009e73"
PLAIN, INK, MUTED, FAINT, BAND = "#6b7280", "#22272e", "#555d68", "#e7eaee", "#cdd3da"

DPI = 150
WIDTH, HEIGHT = 9.0, 4.1
"""Of one plot, in inches."""


def save_plots(report: PlanReport, path: Path) -> None:
    """Write both plots, one above the other, as PNG or SVG by the path's suffix.

    Raises:
        ConfigurationError: matplotlib is not installed.
    """
    if path.suffix.lower() == ".svg":
        path.write_text(_svg([draw_memory, draw_front], report, path.stem), encoding="utf-8")
    else:
        figure = _figure([draw_memory, draw_front], report)
        figure.savefig(path, dpi=DPI, facecolor="white", metadata={"Software": None})


def memory_svg(report: PlanReport) -> str:
    """Memory over a step, as an SVG element that can stand in a page beside others."""
    return _inline(_svg([draw_memory], report, "memory"), "memory")


def front_svg(report: PlanReport) -> str:
    """Peak against extra time, as an SVG element that can stand in a page beside others."""
    return _inline(_svg([draw_front], report, "front"), "front")


def draw_memory(panel: Any, report: PlanReport) -> None:
    """Memory over a step: everything kept, under the plan, and as measured."""
    result, facts = report.result, report.facts
    static = result.static_bytes
    plain = simulated_curve(result.trace, result.plain.drop)
    plan = simulated_curve(result.trace, result.chosen.drop, result.chosen.move, result.transfer)
    top = max(facts.plain_peak_bytes, facts.predicted_peak_bytes)
    curves: list[tuple[Curve, str, Any, float, str]] = [
        (plain, PLAIN, (0, (4, 1.5)), 1.2, "everything kept"),
        (plan, PLAN, "-", 1.5, "this plan, predicted"),
    ]
    if report.timeline:
        seen = measured_curve(report.timeline, plan)
        curves.append((seen, MEASURED, (0, (1.2, 1.0)), 1.5, "this plan, measured"))
        top = max(top, static + seen.y[seen.peak])
    scale, unit = _bytes_unit(top)
    x_scale, x_unit = _seconds_unit(max(curve.x[-1] for curve, *_ in curves)) if plan.in_seconds else (1.0, "")
    if static:
        panel.axhspan(0, static / scale, color=BAND, lw=0, label=f"static memory: {format_size(static)}")
    for curve, colour, dash, width, name in curves:
        x, y = thinned(curve)
        peak = static + curve.y[curve.peak]
        steps = "steps-post" if colour == MEASURED else "default"
        xs, ys = [at / x_scale for at in x], [(static + level) / scale for level in y]
        if colour == PLAN:
            panel.fill_between(xs, static / scale, ys, color=PLAN, alpha=0.15, lw=0)
        panel.plot(xs, ys, color=colour, ls=dash, lw=width, drawstyle=steps, label=f"{name}: peak {format_size(peak)}")
        at = curve.x[curve.peak] / x_scale
        if colour == MEASURED:
            panel.plot(at, peak / scale, "D", mfc="none", mec=MEASURED, ms=7.5, mew=1.8, zorder=6)
        else:
            panel.plot(at, peak / scale, "o", color=colour, ms=6.5, mec="white", mew=1.2, zorder=5)
    panel.set_ylim(0, top / scale * 1.16)
    panel.set_xlim(0, max(curve.x[-1] for curve, *_ in curves) / x_scale or 1.0)
    _draw_budget(panel.axhline, facts.budget_bytes, scale, (0.0, top * 1.08))
    if plan.turn is not None:
        panel.axvline(plan.turn / x_scale, color=MUTED, lw=0.9)
        for text, side, away in (("forward", "right", -4), ("backward", "left", 4)):
            panel.annotate(
                text, (plan.turn / x_scale, 0.985), (away, 0), ha=side, va="top", color=MUTED, fontsize=9,
                xycoords=panel.get_xaxis_transform(), textcoords="offset points",
            )  # fmt: skip
    stretched = ", measured: stretched to fit" if report.timeline else ""
    panel.set_xlabel(
        f"time in the step, estimated{stretched} [{x_unit}]" if plan.in_seconds else "events of the step, in order"
    )
    panel.set_ylabel(f"memory [{unit}]")
    _finish(panel, "y", "Memory over one training step")


def draw_front(panel: Any, report: PlanReport) -> None:
    """Peak memory against extra time of every plan on the front, and where the chosen one is."""
    result, facts = report.result, report.facts
    static = result.static_bytes
    points = sorted({(c.peak_bytes, c.extra_seconds) for c in [*result.front, result.chosen, result.plain]})
    right = max(static + points[-1][0], facts.measured_peak_bytes or 0)
    scale, unit = _bytes_unit(right)
    slowest = max(max(seconds for _, seconds in points), facts.measured_extra_seconds or 0.0)
    y_scale, y_unit = _seconds_unit(slowest)

    def mark(peak: int, seconds: float, shape: str, colour: str, size: float, label: str, **more: Any) -> None:
        text = f"{label}: {format_size(peak)}, +{format_seconds(seconds)}"
        style = {"ls": "none", "mec": "white", "mew": 1.2, "zorder": 4, "clip_on": False} | more
        panel.plot([peak / scale], [seconds / y_scale], shape, color=colour, ms=size, label=text, **style)

    xs, ys = [(static + peak) / scale for peak, _ in points], [seconds / y_scale for _, seconds in points]
    panel.plot(xs, ys, color=INK, lw=1.0, marker="o", ms=3.5, label=f"plans found: {len(points)}", zorder=2)
    mark(facts.plain_peak_bytes, result.plain.extra_seconds, "s", PLAIN, 13.0, "everything kept")
    mark(facts.smallest_peak_bytes, facts.smallest_extra_seconds, "^", SMALLEST, 15.0, "smallest plan")
    mark(facts.predicted_peak_bytes, facts.predicted_extra_seconds, "o", PLAN, 9.0, "this plan, predicted", zorder=5)
    if facts.measured_peak_bytes is not None and facts.measured_extra_seconds is not None:
        hollow = {"mfc": "none", "mec": MEASURED, "mew": 2.0, "zorder": 6}
        mark(
            facts.measured_peak_bytes, facts.measured_extra_seconds, "D", MEASURED, 9.0, "this plan, measured", **hollow
        )
    left = min(xs)
    margin = max(right / scale - left, right / scale * 0.02) * 0.06
    ends = max(left - margin, 0.0), right / scale + margin
    panel.set_xlim(*ends)
    panel.set_ylim(0, slowest / y_scale * 1.08 or 1.0)
    _draw_budget(panel.axvline, facts.budget_bytes, scale, (ends[0] * scale, ends[1] * scale))
    panel.set_xlabel(f"peak memory of a step [{unit}]")
    panel.set_ylabel(f"extra time of a step [{y_unit}]")
    _finish(panel, "both", "What memory costs in time")


Draw = Callable[[Any, "PlanReport"], None]


def _figure(draws: Sequence[Draw], report: PlanReport) -> Any:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ConfigurationError(
            'Plots need matplotlib, which is not installed: pip install "lightning-remat[plot]", or save the report as '
            ".html, .txt or .json."
        ) from error
    figure = Figure(figsize=(WIDTH, HEIGHT * len(draws)), layout="constrained")
    FigureCanvasAgg(figure)
    parts = figure.subfigures(len(draws), 1, squeeze=False, hspace=0.04)
    for part, draw in zip(parts[:, 0], draws, strict=True):
        draw(part.subplots(), report)
    return figure


def _svg(draws: Sequence[Draw], report: PlanReport, salt: str) -> str:
    """An SVG document without date, version or address; its identifiers depend on what is drawn alone."""
    figure = _figure(draws, report)
    import matplotlib

    out = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": f"lightning-remat {salt}", "svg.fonttype": "path"}):
        unsaid = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(out, format="svg", facecolor="white", metadata=unsaid)
    return out.getvalue()


def _inline(document: str, name: str) -> str:
    """The element out of an SVG document, its identifiers made unlike those of any other in the page."""
    element = document[document.index("<svg") :]
    element = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", element)
    begin = element.index(">")
    # In HTML an SVG element needs no namespaces, and its size is the page's affair.
    head = re.sub(r' (xmlns(:\w+)?|version|width|height)="[^"]*"', "", element[:begin])
    return f'{head} role="img"' + element[begin:].replace("xlink:href", "href")


def _draw_budget(line: Callable[..., Any], budget: int, scale: float, shown: tuple[float, float]) -> None:
    """A line at the budget; where that is far outside of what is shown, only its entry in the legend."""
    label = f"budget: {format_size(budget)}"
    if shown[0] < budget <= shown[1]:
        line(budget / scale, color=INK, lw=1.2, ls=(0, (7, 3)), label=label)
    else:
        line(shown[1] / scale, color="none", label=f"{label} (outside of the plot)")


def _finish(panel: Any, grid: str, title: str) -> None:
    # The title stands in the legend, so that the two can never lie over each other.
    panel.figure.legend(
        loc="outside upper left", ncols=3, fontsize=8.5, frameon=False, labelcolor=INK, handlelength=2.2,
        columnspacing=1.6, title=title, title_fontproperties={"size": 12, "weight": "bold"}, alignment="left",
    )  # fmt: skip
    panel.grid(axis=grid, color=FAINT, lw=0.8)
    panel.set_axisbelow(True)
    panel.tick_params(colors=MUTED, labelsize=9, length=0)
    for axis in (panel.xaxis, panel.yaxis):
        axis.label.set(color=MUTED, fontsize=9.5)
    for side in ("top", "right", "left"):
        panel.spines[side].set_visible(False)
    panel.spines["bottom"].set_color(BAND)


def _bytes_unit(largest: float) -> tuple[float, str]:
    """A unit for an axis that ends at ``largest`` bytes, as (bytes, name)."""
    units = (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))
    return next(((float(size), name) for name, size in units if largest >= 2 * size), (1.0, "bytes"))


def _seconds_unit(largest: float) -> tuple[float, str]:
    """A unit for an axis that ends at ``largest`` seconds, as (seconds, name)."""
    units = (("s", 1.0), ("ms", 1e-3))
    return next(((size, name) for name, size in units if largest >= 2 * size), (1e-6, "µs"))
