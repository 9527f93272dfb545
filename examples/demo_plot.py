"""The demo's picture: live memory over one training step, one panel per policy."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from lightning_remat.runtime.memory import PeakResult

MIB = 2**20
# Blue, orange, green, ... of Okabe and Ito, which people with any colour vision can tell apart; grey for the reference.
COLOURS = ["#5f6b7a", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00"]
INK = "#22272e"
MUTED = "#6b7280"


class Curve(NamedTuple):
    """Memory over one step under one policy."""

    policy: str
    memory: PeakResult
    forward_seconds: float
    """When forward was done and backward began."""


def draw_memory(curves: list[Curve], path: Path, title: str) -> str:
    """Write the plot to ``path``; the first curve is the reference. Returns a sentence for the user, which without
    matplotlib says what to install."""
    try:
        import matplotlib
    except ModuleNotFoundError:
        return "No plot: matplotlib is not installed. Get it with the plot extra: pip install 'lightning-remat[plot]'"
    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    last = max(curve.memory.timeline[-1][0] for curve in curves)
    rows = -(-len(curves) // 4)
    columns = -(-len(curves) // rows)
    figure, axes = plt.subplots(
        rows,
        columns,
        figsize=(1.2 + 3.1 * columns, 1.4 + 2.9 * rows),
        sharex=True,
        sharey=True,
        squeeze=False,
        layout="constrained",
    )
    top = max(curve.memory.peak_bytes for curve in curves) / MIB
    for index, panel in enumerate(axes.flat):
        if index >= len(curves):
            panel.set_visible(False)
            continue
        _draw_panel(panel, curves[index], curves[0], COLOURS[index % len(COLOURS)], top)
        panel.set_xlim(0, last * 1.02)
        panel.locator_params(axis="x", nbins=5)
        panel.tick_params(labelbottom=index + columns >= len(curves))  # the last panel of its column has the numbers
    figure.supxlabel(
        f"time in the step, profiled [s]{' · grey: ' + curves[0].policy if len(curves) > 1 else ''}",
        fontsize=9,
        color=MUTED,
    )
    figure.supylabel("memory of the step [MiB]", fontsize=9, color=MUTED)
    figure.suptitle(f"Live memory over one training step\n{title}", x=0.01, ha="left", fontsize=11, color=INK)
    figure.savefig(path, dpi=150, facecolor="white")
    plt.close(figure)
    return f"Memory against time: {path}"


def _draw_panel(panel: Any, curve: Curve, reference: Curve, colour: str, top: float) -> None:
    from matplotlib.patheffects import withStroke

    """One policy as a filled curve, the reference as an outline behind it, the peak marked and named."""
    if curve is not reference:
        panel.plot(*_steps(reference.memory), color="#c3c9d1", lw=1.0, drawstyle="steps-post", zorder=1)
    seconds, live = _steps(curve.memory)
    panel.fill_between(seconds, live, step="post", color=colour, alpha=0.22, lw=0, zorder=2)
    panel.plot(seconds, live, color=colour, lw=1.1, drawstyle="steps-post", zorder=3)

    peak = max(range(len(live)), key=live.__getitem__)
    share = "" if curve is reference else f" · {curve.memory.peak_bytes / reference.memory.peak_bytes:.0%}"
    panel.plot(seconds[peak], live[peak], "o", color=colour, ms=5, mec="white", mew=1.0, zorder=4)
    panel.axhline(live[peak], color=colour, lw=0.8, ls=(0, (3, 3)), zorder=1)
    panel.annotate(
        f"{live[peak]:.3g} MiB{share}",
        (0.98, live[peak]),
        xycoords=("axes fraction", "data"),
        xytext=(0, 4),
        textcoords="offset points",
        ha="right",
        fontsize=9,
        fontweight="bold",
        color=colour,
        path_effects=[withStroke(linewidth=3, foreground="white")],
        zorder=5,
    )
    panel.axvline(curve.forward_seconds, color=MUTED, lw=0.8, zorder=1)
    for text, side, align in (
        ("forward ", curve.forward_seconds, "right"),
        (" backward", curve.forward_seconds, "left"),
    ):
        panel.text(side, top * 1.22, text, ha=align, va="top", fontsize=8, color=MUTED)
    panel.set_title(curve.policy, loc="left", fontsize=11, fontweight="bold", color=colour)
    panel.set_ylim(0, top * 1.25)
    panel.tick_params(colors=MUTED, labelsize=8, length=0)
    panel.grid(axis="y", color="#e7eaee", lw=0.8)
    panel.set_axisbelow(True)
    for side in ("top", "right", "left"):
        panel.spines[side].set_visible(False)
    panel.spines["bottom"].set_color("#c3c9d1")


def _steps(memory: PeakResult) -> tuple[list[float], list[float]]:
    """Seconds and MiB as two lists."""
    return [at for at, _ in memory.timeline], [live / MIB for _, live in memory.timeline]
