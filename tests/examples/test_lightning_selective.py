"""What the tutorial on projects says of a Lightning project is so."""

from __future__ import annotations

from pathlib import Path

from tests.examples.scripts import run_script


def test_lightning_selective(tmp_path: Path) -> None:
    """One argument more: the same weights in less memory, and a report by module."""
    printed, f = run_script("lightning_selective", tmp_path)

    assert "recomputation policy selective, 4 blocks" in printed["Trained"]
    assert "gpt.blocks.*.mlp.1" in printed["Report"]
    assert f["equal"] == "True"
    assert f["peak"] < f["plain_peak"]
