"""The report that the page "Read the report" goes through says what the page says of it."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest

import lightning_remat

EXAMPLES = Path(lightning_remat.__file__).parent.parent / "examples"


def test_read_report(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Two reports, figures that fit together, and four files."""
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.setattr(sys, "argv", ["read_report.py", "--json", str(tmp_path / "f.json"), "--save", str(tmp_path)])
    runpy.run_path(str(EXAMPLES / "read_report.py"), run_name="__main__")

    first, second = capsys.readouterr().out.split("== The plan\nRecomputation plan: peak ")
    assert "recomputation policy selective, 6 blocks: blocks.0 ... blocks.5" in first
    assert "the first step, its warm-up included" in first
    matrices = [line.split("│")[4].strip() for line in first.splitlines() if "│ expensive │" in line]
    assert matrices
    assert set(matrices) == {"0 B"}  # the policy drops nothing of these
    for line in ("peak memory", "extra time per step", "budget", "static memory", "blocks", " all "):
        assert f"\n{line}" in second
    assert "not measured yet" not in second

    f = json.loads((tmp_path / "f.json").read_text())
    assert f["measured_peak_bytes"] == f["predicted_peak_bytes"] <= f["budget_bytes"]
    assert f["smallest_peak_bytes"] < f["predicted_peak_bytes"] < f["plain_peak_bytes"]
    assert f["left_bytes"] == f["budget_bytes"] - f["predicted_peak_bytes"]
    parts = ("parameters", "buffers", "gradients", "optimizer_state")
    assert f["static_bytes"] == sum(f[f"{part}_bytes"] for part in parts)
    assert f["gradients_bytes"] == 0  # zero_grad() of PyTorch sets them to None
    assert 0 < f["ops_run_again"] < f["ops"]

    assert (tmp_path / "report.html").read_text().lower().count("<svg") >= 2
    assert json.loads((tmp_path / "report.json").read_text())["budget_bytes"] == f["budget_bytes"]
    assert (tmp_path / "report.svg").is_file()
    assert (tmp_path / "report.txt").read_text().startswith("Recomputation plan: peak ")
