"""What a tutorial's script found, for the pages that tell of it: `python examples/NAME.py --json FILE` writes it there.

Nothing here is needed to use the library.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path


def save_figures(**figures: object) -> None:
    """Write figures to the file named by `--json`, if there is one: bytes and seconds as numbers, nothing rounded."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path, help="write the figures that the script found to this file")
    path = parser.parse_known_args()[0].json
    if path is not None:
        path.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


def curve(timeline: Sequence[tuple[float, int]], bins: int = 160) -> tuple[list[float], list[int]]:
    """Memory over time to draw: seconds and bytes, of each part of the time the first, lowest, highest and last."""
    width = timeline[-1][0] / bins or 1.0
    parts: dict[int, list[int]] = {}
    for i, (at, _) in enumerate(timeline):
        parts.setdefault(int(at / width), []).append(i)
    chosen: list[int] = []
    for part in parts.values():
        low, high = (choose(part, key=lambda i: timeline[i][1]) for choose in (min, max))
        chosen += sorted({part[0], low, high, part[-1]})
    return [round(timeline[i][0], 6) for i in chosen], [timeline[i][1] for i in chosen]
