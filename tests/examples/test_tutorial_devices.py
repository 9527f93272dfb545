"""What the tutorial on several processes says is so."""

from __future__ import annotations

from pathlib import Path

from tests.examples.scripts import run_script


def test_tutorial_devices(tmp_path: Path) -> None:
    """Two processes end in the bits of plain DDP, under other plans and after failures; what cannot work is said."""
    printed, f = run_script("tutorial_devices", tmp_path)

    for section in ("Plain and ours", "Own plans", "One plan", "One process runs out of memory", "Sharded parameters"):
        assert "the same in every bit: True" in printed[section]
    assert f["plain_0"] < f["plain_1"]
    assert f["again_0"] < f["again_1"]
    assert f["predicted_0"] <= f["budget"] >= f["predicted_1"]
    assert (f["retries_0"], f["retries_1"]) == (0, 2)
    assert "report: 2 ranks, 2 plans: predicted peak" in printed["Own plans"]
    assert printed["One plan"].count(f"{f['again_shared']} ops run again") == 2
    assert f["again_0"] < f["again_shared"]
    assert "with recomputation of 0 ops" not in printed["Sharded parameters"]

    refused = " ".join(printed["Refused"].split())
    assert "DeepSpeed with stage=3 is not supported" in refused
    assert "Use base='deepspeed_stage_2'" in refused
    assert "offload='disk': parameters of Sharded are sharded" in refused
    late = " ".join(printed["Too late"].split())
    assert "process 1: NoMemoryLeft: Out of memory in a training step, which cannot be run again" in late
    assert "restart with policy='FOLDER/remat-tightest-plan-1.json'" in late
    assert "another process has ended, since it was out of memory. rank 1:" in late
