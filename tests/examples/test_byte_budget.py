"""What the tutorial on budgets says of bytes and plans is so."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest

import lightning_remat
from lightning_remat.planning.planfile import PlanFile

EXAMPLES = Path(lightning_remat.__file__).parent.parent / "examples"


def test_byte_budget(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The plan fits, the losses are those of plain training, and report and plan are written."""
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr(sys, "argv", ["byte_budget.py", "--json", "figures.json"])
    runpy.run_path(str(EXAMPLES / "byte_budget.py"), run_name="__main__")
    f = json.loads(Path("figures.json").read_text())
    output = capsys.readouterr().out

    assert "losses equal: True; within the budget: True" in output
    assert f["losses_equal"] == "True"
    assert "step 1: recomputation policy auto" in output
    assert "the first step runs lean and is traced" in output
    assert "Recomputation plan: peak" in output
    assert "<html" in Path("plan.html").read_text()
    assert PlanFile.load("plan.json").names

    # Predicted to the byte; what we count ourselves has the batch on top.
    assert f["predicted_peak_bytes"] == f["reported_peak_bytes"] == f["peak_bytes"] - f["batch_bytes"]
    assert f["peak_bytes"] == f["file_peak_bytes"]
    assert f["predicted_peak_bytes"] <= f["budget_bytes"] < f["plain_peak_bytes"]
    # 20 MiB is not feasible: one warning says so, and training goes on under the plan with the smallest peak.
    assert f["small_warnings"] == 1
    assert "is not feasible" in output
    assert 20 * 2**20 < f["small_peak_bytes"] < f["budget_bytes"]
    assert f["front_bytes"] == sorted(f["front_bytes"])
    assert f["front_seconds"] == sorted(f["front_seconds"], reverse=True)
