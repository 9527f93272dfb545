"""What the tutorial on policies says of memory is so, and results are the same bits."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest

import lightning_remat

EXAMPLES = Path(lightning_remat.__file__).parent.parent / "examples"


def test_tutorial_policies(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Bytes and operations can be counted, so they are; times are for the page only."""
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr(sys, "argv", ["tutorial_policies.py", "--json", str(tmp_path / "figures.json")])
    runpy.run_path(str(EXAMPLES / "tutorial_policies.py"), run_name="__main__")
    f = json.loads((tmp_path / "figures.json").read_text())

    assert f["all_same"] == "True"
    assert "False" not in capsys.readouterr().out
    # Of the GPT, full needs least: a block holds far more than what enters it. The longer a segment, the more.
    peaks = [f[f"{name}_peak_bytes"] for name in ("full", "every_2", "sqrt", "every_9", "none")]
    assert peaks == sorted(peaks)
    assert f["full_peak_share"] < 0.3
    assert f["every_9_peak_share"] > 0.95  # one segment: everything is back at once
    assert f["full_peak_bytes"] < f["selective_peak_bytes"] < f["none_peak_bytes"]
    again = [f[f"{name}_replayed"] for name in ("none", "selective", "full", "every_2", "sqrt", "every_9")]
    assert again == sorted(again)
    assert again[0] == 0
    # Of the chain, whose blocks hold nothing but what enters the next one, full saves nothing, and sqrt most.
    assert f["chain_full_bytes"] > 0.99 * f["chain_none_bytes"]
    assert f["chain_sqrt_bytes"] < min(f["chain_every_2_bytes"], f["chain_every_32_bytes"]) < f["chain_none_bytes"]
    assert f["chain_sqrt_bytes"] < 0.25 * f["chain_none_bytes"]
    # 9 GELUs and 19 layer norms.
    assert f["function_replayed"] == 28
    assert f["selective_peak_bytes"] < f["function_peak_bytes"] < f["none_peak_bytes"]
