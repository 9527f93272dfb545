"""The plots of the pages. plots.toml says what is drawn and in which words; docs/results/NAME.json has the figures.

`python docs/results.py --plots` draws all of them again. The same figures give the same bytes. Letters stay letters
(svg.fonttype "none"), so that the reader's browser shapes Devanagari and a screen reader can read them.

A figure in plots.toml:

    [growth]                                  # [..](figure:growth) in a page
    script = "tutorial_kept"                  # whose figures
    [[growth.panel]]                          # one or more, side by side
    title = { en = "..", es = "..", hi = ".." }            # where there are several panels
    x = { label = { en = "..", .. }, scale = "ms" }        # scale: MiB, KiB, ms, s, percent; none: as it is
    y = { label = { en = "..", .. }, scale = "MiB", top = "most_bytes" }   # top: a figure up to which the axis goes
    [[growth.panel.curve]]                    # lists of numbers; drawn in this order
    x = "times"                               # the name of a list in the JSON file
    y = "bytes"
    label = { en = "..", .. }                 # in the legend; curves without one share the look of the last
    steps = true                              # a level holds until the next point, as memory does
    points = true                             # points are marked
    peak = true                               # the highest point is marked, its value beside it
    [[growth.panel.line]]                     # a straight line at one figure; two of them at most
    y = "budget_bytes"                        # or x
    label = { en = "..", .. }
    [[growth.panel.bar]]                      # or bars, one below the other, their values beside them; y is not used
    x = "full_bytes"
    label = { en = "..", .. }
"""

from __future__ import annotations

import io
import sys
import warnings
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

LANGUAGES = ("en", "es", "hi")
SCALES = {"": 1.0, "KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30, "ms": 1e-3, "s": 1.0, "percent": 1e-2}

# Of Okabe and Ito, which people with any colour vision can tell apart; curves differ in dash and marker as well.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#a6468b", "#5f6b7a", "#8a6d00")
DASHES: tuple[Any, ...] = ("-", (0, (5, 1.5)), (0, (1.5, 1)), (0, (5, 1.5, 1.2, 1.5)), "-", (0, (5, 1.5)))
MARKERS = "osD^vP"
INK, MUTED, FAINT = "#22272e", "#555d68", "#e1e5ea"

STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "lightning-remat",
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],  # comes with matplotlib, so that lengths are the same everywhere
    "font.size": 10.0,
}


def figures() -> dict[str, Any]:
    """What plots.toml says, by figure."""
    return tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))


def draw_all(script: str, values: dict[str, Any], into: Path) -> None:
    """Draw every figure of a script, in each language."""
    for name, figure in figures().items():
        if figure["script"] == script:
            for language in LANGUAGES:
                (into / f"{name}.{language}.svg").write_text(draw(figure, values, language), encoding="utf-8")


def draw(figure: dict[str, Any], values: dict[str, Any], language: str) -> str:
    """A figure as an SVG document.

    Raises:
        KeyError: plots.toml names a figure that the script does not have, or a language is missing.
    """
    panels = figure["panel"]
    bars = max(len(panel.get("bar", ())) for panel in panels)
    height = 0.9 + 0.42 * bars if bars else 3.9
    with matplotlib.rc_context(STYLE), warnings.catch_warnings():
        # Devanagari is measured with a font that lacks it, and drawn by the reader's browser, which has one.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font", category=UserWarning)
        canvas = Figure(figsize=(8.4, height), layout="constrained")
        FigureCanvasSVG(canvas)
        axes = canvas.subplots(1, len(panels), squeeze=False)[0]
        for axis, panel in zip(axes, panels, strict=True):
            (_draw_bars if "bar" in panel else _draw_curves)(axis, panel, values, language)
            _finish(axis, panel, language)
        if not bars:
            _legend(canvas, axes)
        out = io.StringIO()
        unsaid = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        canvas.savefig(out, format="svg", facecolor="white", metadata=unsaid)
    # What matplotlib measured with is no reason to ask the browser for it first: any font of the reader's will do.
    text = out.getvalue().replace("'DejaVu Sans'", "system-ui, 'Noto Sans', 'Noto Sans Devanagari'")
    return "\n".join(line.rstrip() for line in text.splitlines()) + "\n"


def _draw_curves(axis: Any, panel: dict[str, Any], values: dict[str, Any], language: str) -> None:
    look = -1
    for curve in panel.get("curve", ()):
        look += "label" in curve
        x, y = _scaled(panel, "x", values[curve["x"]]), _scaled(panel, "y", values[curve["y"]])
        colour = COLOURS[look % len(COLOURS)]
        axis.plot(
            x, y, color=colour, ls=DASHES[look % len(DASHES)], lw=1.6,
            drawstyle="steps-post" if curve.get("steps") else "default",
            marker=MARKERS[look % len(MARKERS)] if curve.get("points") else "", ms=5.5,
            label=curve["label"][language] if "label" in curve else "_",
        )  # fmt: skip
        if curve.get("peak"):
            top = max(range(len(y)), key=y.__getitem__)
            axis.plot(x[top], y[top], MARKERS[look % len(MARKERS)], color=colour, ms=6.5, mec="white", mew=1, zorder=5)
            axis.annotate(
                f"{y[top]:.1f}", (x[top], y[top]), xytext=(0, 6), textcoords="offset points", ha="center", color=colour
            )
    axis.set_xlim(left=0 if panel["x"].get("from_zero", True) else None)
    for line, dash in zip(panel.get("line", ()), ((0, (7, 3)), (0, (1, 2))), strict=False):
        which = "x" if "x" in line else "y"
        at = _scaled(panel, which, [values[line[which]]])[0]
        put = axis.axvline if which == "x" else axis.axhline
        put(at, color=INK, lw=1.2, ls=dash, label=line["label"][language])
    highest = _scaled(panel, "y", [values[panel["y"]["top"]]])[0] if "top" in panel["y"] else axis.get_ylim()[1]
    axis.set_ylim(0, highest * 1.06 or 1.0)


def _draw_bars(axis: Any, panel: dict[str, Any], values: dict[str, Any], language: str) -> None:
    lengths = _scaled(panel, "x", [values[bar["x"]] for bar in panel["bar"]])
    names = [bar["label"][language] for bar in panel["bar"]]
    places = range(len(names))
    axis.barh(places, lengths, color=[COLOURS[i % len(COLOURS)] for i in places], height=0.62)
    for place, length in zip(places, lengths, strict=True):
        axis.annotate(
            f"{length:.1f}", (length, place), xytext=(5, 0), textcoords="offset points", va="center", color=INK
        )
    axis.set_yticks(places, names)
    axis.set_xlim(0, max(lengths) * 1.14 or 1.0)
    axis.invert_yaxis()


def _scaled(panel: dict[str, Any], which: str, numbers: list[float]) -> list[float]:
    scale = SCALES[panel[which].get("scale", "")]
    return [number / scale for number in numbers]


def _finish(axis: Any, panel: dict[str, Any], language: str) -> None:
    bars = "bar" in panel
    if "title" in panel:
        axis.set_title(panel["title"][language], loc="left", fontsize=10.5, fontweight="bold", color=INK)
    axis.set_xlabel(panel["x"]["label"][language], color=MUTED)
    if not bars:
        axis.set_ylabel(panel["y"]["label"][language], color=MUTED)
    axis.grid(axis="x" if bars else "y", color=FAINT, lw=0.8)
    axis.set_axisbelow(True)
    axis.tick_params(colors=MUTED, length=0, labelsize=9.5)
    if bars:
        axis.tick_params(axis="y", colors=INK)
    for side in ("top", "right", "left"):
        axis.spines[side].set_visible(False)
    axis.spines["bottom"].set_color("#c3c9d1")


def _legend(canvas: Any, axes: Any) -> None:
    """One legend over all panels, where curves are named."""
    found: dict[str, Any] = {}
    for axis in axes:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    if found:
        canvas.legend(
            list(found.values()), list(found), loc="outside upper left", ncols=min(4, len(found)), frameon=False,
            labelcolor=INK, handlelength=2.4, columnspacing=1.6,
        )  # fmt: skip
