"""The first page's example shows what that page says: half of the memory, and the same weights."""

from __future__ import annotations

import json
import logging
import re
import runpy
import sys
from pathlib import Path

import pytest

import lightning_remat

EXAMPLES = Path(lightning_remat.__file__).parent.parent / "examples"


def test_half_of_the_memory_and_the_same_weights(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """It prints the summary of training under a budget, which is kept by computing something again."""
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["start.py", "--json", "start.json"])
    handlers = list(logging.getLogger("lightning.pytorch").handlers)

    runpy.run_path(str(EXAMPLES / "start.py"), run_name="__main__")

    lines = [line for line in capsys.readouterr().out.splitlines() if line]
    assert lines[0].startswith("Plain training: peak ")
    assert lines[1].startswith("Recomputation in this training: 12 steps, ")
    assert lines[2].startswith("  in force    recomputation policy auto (budget ")
    assert any(re.match(r"  run again   \d+ ops in the last step", line) for line in lines)
    assert lines[-1] == "Weights equal in every bit: yes"
    assert logging.getLogger("lightning.pytorch").handlers == handlers

    figures = json.loads(Path("start.json").read_text())
    assert figures["budget_bytes"] == figures["plain_peak_bytes"] // 2
    assert figures["peak_bytes"] == figures["predicted_peak_bytes"] <= figures["budget_bytes"]
    assert figures["replayed_ops"] > 0
    assert figures["same_weights"] == "yes"
