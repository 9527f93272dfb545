"""What the tutorial on offload says is so."""

from __future__ import annotations

from pathlib import Path

from tests.examples.scripts import run_script


def test_offload(tmp_path: Path) -> None:
    """The same losses in less memory, whatever moves; what has no room stays; what is altered is noticed."""
    disk = tmp_path / "disk"
    disk.mkdir()
    printed, f = run_script("offload", tmp_path, str(disk))

    assert "A step of 1 s hides about" in printed["bench-io"]
    everything = [line for text in printed.values() for line in text.splitlines() if "losses equal" in line]
    assert len(everything) == 5 + 3 + 2
    assert all("losses equal: True" in line for line in everything)

    assert f["offload_only_share"] < 0.3
    assert f["selective_offload_share"] < 0.4
    assert f["full_share"] < 0.4
    assert f["full_peak"] <= f["full_offload_peak"] < f["full_peak"] + 2 * 2**20  # borders are not what matters
    assert f["offload_only_again"] == 0 < f["selective_offload_again"] < f["full_again"] == f["full_offload_again"]
    assert f["full_offload_out"] < f["selective_offload_out"] < f["offload_only_out"]
    assert all(f[f"{name}_back"] < f[f"{name}_out"] for name in ("offload_only", "selective_offload", "full_offload"))

    for name in ("recompute", "recompute_or_move", "move"):
        assert f[f"{name}_predicted"] <= f["budget"]
    assert f["recompute_moved"] == f["move_run_again"] == 0
    assert f["recompute_run_again"] > 0
    assert f["move_moved"] > 0

    assert "are taken" in printed["A disk that is too small"]
    assert f["small_disk_refused"] > 0
    assert f["offload_only_peak"] < f["small_disk_peak"] < f["none_peak"]
    altered = " ".join(printed["A disk that alters a byte"].split())
    assert "what was read is not what was written" in altered
    assert "altered: 1 times; steps run again: 1;" in altered
    assert "no accelerator is available here" in " ".join(printed["Refused"].split())
    assert not list(disk.iterdir())
