"""What the tutorial on projects says of a Hugging Face model is so."""

from __future__ import annotations

from pathlib import Path

from tests.examples.scripts import run_script


def test_tutorial_huggingface(tmp_path: Path) -> None:
    """Both at once is refused; each alone gives the losses of plain training in less memory."""
    printed, f = run_script("tutorial_huggingface", tmp_path)

    assert "already recomputes its activations" in printed["Both at once"]
    assert {f[f"{name}_equal"] for name in ("plain", "its_own", "full", "selective")} == {"True"}
    assert f["full_peak"] <= f["its_own_peak"] < f["selective_peak"] < f["plain_peak"]
    assert printed["One at a time"].endswith("model.layers.5")
    assert printed["By its Trainer"].endswith("the same in every bit: True")
    assert "of 0 ops" not in printed["By its Trainer"]
