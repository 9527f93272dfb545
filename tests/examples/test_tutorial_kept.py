"""What the tutorial on kept activations says of bytes is so."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest

import lightning_remat

EXAMPLES = Path(lightning_remat.__file__).parent.parent / "examples"


def test_tutorial_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """By hand, by print_kept and by the allocator, bytes are the same; what grows, grows as the page says."""
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.setattr(sys, "argv", ["tutorial_kept.py", "--json", str(tmp_path / "figures.json")])
    runpy.run_path(str(EXAMPLES / "tutorial_kept.py"), run_name="__main__")
    f = json.loads((tmp_path / "figures.json").read_text())

    assert f["small_by_hand_bytes"] == f["small_bytes"] == 2 * 32 * 1024 * 4
    assert f["block_by_hand_bytes"] == f["block_bytes"]
    assert f["gpt_allocated_bytes"] == f["gpt_bytes"] + f["loss_bytes"]

    # In proportion to batch and sequence, but for the 4 bytes of a sum that the loss keeps.
    for sizes in (f["batch_bytes"], f["length_bytes"]):
        assert [size - 4 for size in sizes] == [(sizes[0] - 4) * times for times in (1, 2, 4, 8)]
    growth = [f["depth_bytes"][i] - f["depth_bytes"][0] for i in range(4)]
    assert growth == [0, f["bytes_per_block"], 3 * f["bytes_per_block"], 7 * f["bytes_per_block"]]
    # Written out, attention keeps a square: more than eight times for eight times the length.
    extra = [w - s for w, s in zip(f["written_out_bytes"], f["length_bytes"], strict=True)]
    assert extra[3] > 30 * extra[0]
    # Of a block, in a GPT, its input is an activation as well.
    assert f["bytes_per_block"] == f["block_bytes"] + f["unit_bytes"]

    assert (f["small_bytes"], f["relu_bytes"]) == (2 * 131072, 131072)
    assert (f["view_bytes"], f["copy_bytes"]) == (131072, 512)

    # The answers to the exercises.
    assert f["block_bytes"] - f["no_dropout_bytes"] == 2 * f["unit_bytes"]
    assert 0.5 < f["bfloat16_bytes"] / f["block_bytes"] < 0.502  # half, but for the sums of attention in float32
    assert f["frozen_bytes"] == 131072
    assert f["no_grad_tensors"] == 0
