"""The figures of `peers.py` as tables, sentences and a plot."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

from models import Shape
from rich.table import Table

Row = dict[str, Any]
MIB = 2**20
NOISE = 0.03
"""A curve of times may fall by this much where it should rise, and is still called monotone."""


def _table(title: str, model: str, shape: Shape, results: dict[str, Any]) -> Table:
    plain = results["plain"]
    low, high = plain["quartiles_s"]
    table = Table(
        title=f"{title}: {model}, {shape.blocks} blocks, d={shape.width}, T={shape.context}, B={shape.batch}, "
        f"dropout {shape.dropout}",
        title_justify="left",
        caption=f"processor time (wall time), medians of {plain['rounds']} interleaved rounds; plain takes "
        f"{plain['peak_bytes'] / MIB:.1f} MiB and {plain['processor_s']:.3f} s, half of its rounds between "
        f"{low:.3f} and {high:.3f} s",
        caption_justify="left",
    )
    return table


def _times(row: Row, suffix: str = "of_plain") -> str:
    return f"{row[f'processor_{suffix}']:.2f} ({row[f'wall_{suffix}']:.2f})"


def _of_compiled(row: Row) -> str:
    return f"{row['peak_of_compiled']:.3f}, {row['processor_of_compiled']:.2f}" if "peak_of_compiled" in row else ""


def _same(row: Row) -> str:
    return f"differs: {', '.join(row['different'])}" if row["different"] else "equal"


def verdict(peer: Row, ours: Row | None) -> str:
    """Whether ours, at no more than the peer's peak, takes no more of its time."""
    if ours is None:
        return "no: no plan"
    if ours["peak_bytes"] > peer["peak_bytes"]:
        return f"no: peak {ours['peak_bytes'] / peer['peak_bytes'] - 1:+.1%}"
    if ours["processor_s"] > peer["processor_s"]:
        return f"no: time {ours['processor_s'] / peer['processor_s'] - 1:+.1%}"
    return "yes"


def _ours_for(results: dict[str, Any]) -> Iterator[tuple[Row, Row | None]]:
    """Each peer with the run of ours at its peak."""
    by_name = {row["variant"]: row for row in results["ours"]}
    for peer in results["peers"]:
        yield peer, by_name.get(peer["ours"])


def best_peers(results: dict[str, Any]) -> list[Row]:
    """Eager peers of which no other is at most as large and faster, by rising peak."""
    eager = [row for row in results["peers"] if "peak_of_compiled" not in row]
    eager.sort(key=lambda row: (row["peak_bytes"], row["processor_s"]))
    best: list[Row] = []
    for row in eager:
        if not best or row["processor_s"] < best[-1]["processor_s"]:
            best.append(row)
    return best


def peers_table(model: str, shape: Shape, results: dict[str, Any]) -> Table:
    """One line for each peer, with ours at its peak beside it."""
    table = _table("Peers, and ours at the peak of each", model, shape, results)
    table.add_column("variant", no_wrap=True)
    for header in (
        "peak,\nMiB",
        "peak of\nplain",
        "time of\nplain",
        "of compiled:\npeak, time",
        "ours:\npeak",
        "ours:\ntime",
    ):
        table.add_column(header, justify="right", no_wrap=True)
    table.add_column("ours no\nslower", no_wrap=True)
    table.add_column("results,\nagainst plain")
    best = {row["variant"] for row in best_peers(results)}
    for row, ours in [(results["plain"], None), *_ours_for(results)]:
        peer = row is not results["plain"]
        table.add_row(
            f"{row['variant']} *" if row["variant"] in best else row["variant"],
            f"{row['peak_bytes'] / MIB:.1f}",
            f"{row['peak_of_plain']:.3f}",
            _times(row),
            _of_compiled(row),
            f"{ours['peak_of_plain']:.3f}" if ours else "",
            _times(ours) if ours else "",
            verdict(row, ours) if peer else "",
            _same(row),
        )
    return table


def notes_below(results: dict[str, Any]) -> list[str]:
    """What the table does not say."""
    pairs = [(row, ours) for row, ours in _ours_for(results) if "peak_of_compiled" not in row]
    good = sum(verdict(row, ours) == "yes" for row, ours in pairs)
    best = ", ".join(row["variant"] for row in best_peers(results)) or "none"
    lines = [
        f"* Best peers (no other one is at most as large and faster): {best}.",
        f"Ours is no slower, at no higher peak, than {good} of {len(pairs)} eager peers.",
    ]
    if differing := [row["variant"] for row in results["ours"] if row["different"]]:
        lines.append(f"Ours DIFFERS from plain: {', '.join(differing)}.")
    else:
        lines.append("Ours is equal to plain in every bit, in every step looked at.")
    return lines + results["notes"]


def grid_table(model: str, shape: Shape, results: dict[str, Any]) -> Table:
    """One line for each budget."""
    table = _table("Ours at falling budgets", model, shape, results)
    for header in ("budget,\nof plain", "predicted,\nof plain", "measured,\nof plain", "error", "time of\nplain"):
        table.add_column(header, justify="right", no_wrap=True)
    table.add_column("within", no_wrap=True)
    table.add_column("results,\nagainst plain")
    plain = results["plain"]["peak_bytes"]
    for row in results["ours"]:
        predicted = row["predicted_bytes"]
        table.add_row(
            f"{row['allowed_bytes'] / plain:.2f}",
            f"{predicted / plain:.3f}" if predicted else "",
            f"{row['peak_of_plain']:.3f}",
            f"{row['peak_bytes'] / predicted - 1:+.1%}" if predicted else "",
            _times(row),
            "yes" if row["peak_bytes"] <= row["allowed_bytes"] else "NO",
            _same(row),
        )
    return table


def grid_verdict(results: dict[str, Any]) -> list[str]:
    """Whether the curve is what a user may expect of it."""
    rows, plain = results["ours"], results["plain"]["peak_bytes"]
    over = [row for row in rows if row["peak_bytes"] > row["allowed_bytes"]]
    above = [row for row in rows if row["peak_bytes"] > plain]
    steps = list(pairwise(rows))
    peak_up = [b for a, b in steps if b["peak_bytes"] > a["peak_bytes"]]
    time_down = [b for a, b in steps if b["processor_s"] < a["processor_s"] * (1 - NOISE)]

    def said(what: str, bad: list[Row]) -> str:
        where = ", ".join(f"{row['allowed_bytes'] / plain:.0%}" for row in bad)
        return f"{what}: no, at {where}" if bad else f"{what}: yes"

    return [
        said("Measured peak within the budget", over),
        said("Never above plain's peak", above),
        said("Peak falls with the budget", peak_up),
        said(f"Time rises as the budget falls, within {NOISE:.0%}", time_down),
        *results["notes"],
    ]


def plot(model: str, results: dict[str, Any], path: Path) -> None:
    """Time against peak memory, both relative to plain: peers as points, ours as a curve."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 5.5), layout="constrained")
    axes.scatter([1], [1], color="black", marker="s", label="plain")
    peers = results.get("peers", [])
    for number, row in enumerate(peers):
        differs = ", differs" if row["different"] else ""
        marker = "x" if "peak_of_compiled" in row else "o^vDP"[number // 10 % 5]
        axes.scatter(
            row["peak_of_plain"],
            row["processor_of_plain"],
            marker=marker,
            color=f"C{number % 10}",
            label=row["variant"] + differs,
        )
    ours = sorted(results["ours"], key=lambda row: row["peak_bytes"])
    axes.plot(
        [row["peak_of_plain"] for row in ours],
        [row["processor_of_plain"] for row in ours],
        color="black",
        marker=".",
        label="ours",
    )
    axes.set_xlabel("peak memory of a step, relative to plain")
    axes.set_ylabel("processor time of a step, relative to plain")
    axes.set_title(f"{model}: medians of {results['plain']['rounds']} interleaved rounds", loc="left")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
    figure.savefig(path)
    plt.close(figure)
