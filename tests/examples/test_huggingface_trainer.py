"""The recipe for Hugging Face's Trainer does what it says."""

from __future__ import annotations

from pathlib import Path

from tests.examples.scripts import run_script


def test_huggingface_trainer(tmp_path: Path) -> None:
    """The same losses and weights, in much less memory."""
    printed, f = run_script("huggingface_trainer", tmp_path)

    assert f["equal"] == "True"
    assert f["full_peak"] < 0.6 * f["plain_peak"]
    assert printed["With and without"].splitlines()[1].endswith("transformer.h.5")
