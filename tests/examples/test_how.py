"""The examples of the pages on how it works show what those pages say."""

from __future__ import annotations

import json
import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

import lightning_remat

EXAMPLES = Path(lightning_remat.__file__).parent.parent / "examples"


@pytest.fixture(autouse=True)
def _as_scripts_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.chdir(tmp_path)


def figures(monkeypatch: pytest.MonkeyPatch, name: str) -> dict[str, Any]:
    """Run an example; returns what it has written."""
    monkeypatch.setattr(sys, "argv", [name, "--json", "figures.json"])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    found: dict[str, Any] = json.loads(Path("figures.json").read_text())
    return found


def test_the_toy_tape_halves_what_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """GELU's and LayerNorm's results are as large as what is kept, and gradients are the same bits."""
    found = figures(monkeypatch, "how_tape.py")
    assert found["equal"] == "yes"
    assert found["share"] == pytest.approx(0.5, abs=0.01)


def test_the_toy_tape_is_as_short_as_it_says() -> None:
    """Forty lines, without those that are empty or say what they are."""
    toy = (EXAMPLES / "how_tape.py").read_text().split("[start:toy]")[1].split("# --8<-- [end:toy]")[0]
    lines = [line for line in toy.splitlines() if line.strip() and '"""' not in line]
    assert len(lines) <= 40


def test_the_planner_keeps_every_budget(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Less memory, more time; and never more time than a plan by hand of the same peak."""
    found = figures(monkeypatch, "how_planner.py")
    rows = re.findall(r"^(.+?) +peak +([\d.]+)%, +(\d+) ops again, +([\d.]+) ms", capsys.readouterr().out, re.MULTILINE)
    budgets = [(float(peak), float(ms)) for name, peak, _, ms in rows if name.endswith("%")]
    assert [peak <= share for (peak, _), share in zip(budgets, (100, 70, 50, 35), strict=True)] == [True] * 4
    assert [ms for _, ms in budgets] == sorted(ms for _, ms in budgets)
    (_, hand, again, by_hand), (_, planned, _, by_planner) = rows[-2:]
    assert again == "4"  # one GELU for each block
    assert float(planned) <= float(hand)
    assert float(by_planner) <= float(by_hand)
    assert found["smallest_peak_bytes"] < 0.35 * found["plain_peak_bytes"]


def test_the_tuner_takes_what_was_measured_to_fit(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Predictions are too low by 8 %: after four trials the largest plan that fits is found."""
    found = figures(monkeypatch, "how_tuner.py")
    assert found["trials"] == 4
    assert 0.98 * found["room_bytes"] < found["best_bytes"] <= found["room_bytes"]
    assert capsys.readouterr().out.count("does not fit") == 3
