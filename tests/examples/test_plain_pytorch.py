"""What the tutorial on projects says of a plain loop is so."""

from __future__ import annotations

from pathlib import Path

from tests.examples.scripts import run_script


def test_plain_pytorch(tmp_path: Path) -> None:
    """The same losses and weights, checked in two ways, and no more memory than torch.utils.checkpoint takes."""
    printed, f = run_script("plain_pytorch", tmp_path)

    assert "losses equal: True; weights equal: True" in printed["Three lines"]
    assert "losses equal: True" in printed["Checked"]
    assert f["kinds"] > 0
    assert f["verified"] > 0 == f["verified_different"]
    assert f["full_peak"] <= f["checkpoint_peak"] < f["plain_peak"]
    assert printed["From torch.utils.checkpoint"].count("losses equal: True") == 2
    assert f["both_replayed"] == 0
