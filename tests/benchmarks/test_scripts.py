"""The benchmark scripts run and write what they measured; no test asserts a time."""

from __future__ import annotations

import importlib
import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.benchmarks import optimality
from tests.helpers.forks import run_module
from tests.helpers.runif import RunIf

HERE = Path(__file__).parent
SMALL = ("--blocks", "2", "--width", "32", "--context", "16", "--batch", "2")


def run(
    monkeypatch: pytest.MonkeyPatch, script: str, folder: Path, *args: str, small: tuple[str, ...] = SMALL
) -> dict[str, Any]:
    """Run a benchmark on a small model; returns its JSON."""
    monkeypatch.syspath_prepend(HERE)
    siblings = [file.stem for file in HERE.glob("*.py")]  # names that other code may use, too
    for name in siblings:
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(sys, "argv", [script, *small, *args, "--json", str(folder / "out.json")])
    with pytest.raises(SystemExit) as leaving:
        runpy.run_path(str(HERE / script), run_name="__main__")
    for name in siblings:
        sys.modules.pop(name, None)
    assert not leaving.value.code
    return json.loads((folder / "out.json").read_text())


def test_peak_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """`full` takes no more than per-block checkpointing; the peer's list gives less than plain."""
    written = run(monkeypatch, "peak_memory.py", tmp_path)

    assert [result["shape"]["attention"] for result in written["results"]] == ["fused", "eager"]
    for result in written["results"]:
        rows = {row["variant"]: row for row in result["rows"]}
        assert rows["remat full"]["of_peer"] <= 1.03
        assert rows["remat selective"]["of_plain"] < 1


def test_step_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Both tables have every variant, after all of them gave the same gradients."""
    written = run(monkeypatch, "step_time.py", tmp_path, "--rounds", "1", "--tiny-rounds", "1", "--threads", "1")

    steps, host = written["results"]
    assert {"plain", "torch checkpoint", "torch selective", "remat full"} <= {row["variant"] for row in steps["rows"]}
    assert {"pass-through mode", "remat selective"} <= {row["variant"] for row in host["rows"]}
    assert all(row["total_s"] > 0 for result in written["results"] for row in result["rows"])


@pytest.mark.parametrize("model", ["gpt", "llama", "gpt2", "resnet"])
def test_peers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, model: str) -> None:
    """Peers that need no package of their own run on every model, and ours is exact at the peak of each."""
    picture = tmp_path / "plot.svg"
    # The compiler takes minutes.
    args = ["--model", model, "--rounds", "1", "--in-a-row", "1", "--no-compiler", "--plot", str(picture)]
    written = run(monkeypatch, "peers.py", tmp_path, *args)

    peers = {row["variant"]: row for row in written["peers"]}
    assert {"checkpoint per block", "selective, torchtitan's rule", "selective, all matmuls", "2 segments"} <= set(
        peers
    )
    assert ("Hugging Face's switch" in peers) == (model in ("llama", "gpt2"))
    assert not any(row["different"] for row in written["ours"])
    for row in peers.values():
        # Normalisation that is run again counts a batch twice, and nothing else changes.
        assert row["different"] == (["buffers"] if model == "resnet" else []), row["variant"]
    assert "<svg" in picture.read_text()


def test_peers_grid(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Budgets fall from plain's peak to where nothing fits; ours is exact, and within each."""
    args = ["--grid", "--grid-step", "0.2", "--rounds", "1", "--in-a-row", "1"]
    written = run(monkeypatch, "peers.py", tmp_path, *args)

    allowed = [row["allowed_bytes"] / written["plain"]["peak_bytes"] for row in written["ours"]]
    assert allowed[:2] == pytest.approx([1, 0.8], abs=0.01)
    assert all(row["peak_bytes"] <= row["allowed_bytes"] for row in written["ours"])
    assert "no plan" in written["notes"][0]
    assert not any(row["different"] for row in written["ours"])


def test_optimality(tmp_path: Path) -> None:
    """The planner is never better than the optimum, and both say what they took."""
    optimality.main(model=["unet"], count=2, limit=60, randoms=2, json_file=tmp_path / "out.json")

    written = json.loads((tmp_path / "out.json").read_text())
    assert len(written["rows"]) == 2
    for row in written["rows"] + written["random"]:
        assert row["bound_s"] == row["optimum_s"]
        assert row["planner_s"] is None or row["planner_s"] >= row["optimum_s"] * (1 - 1e-9)


def test_budgets(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A budget is kept and its peak foreseen, nothing differs by a bit, and so it is with a random plan."""
    chosen = ("--tiny", "--model", "resnet", "--share", "0.75", "--random", "1")
    written = run(monkeypatch, "budgets.py", tmp_path, small=chosen)

    assert written["faults"] == []
    (row,), (smallest,), (plans,) = written["budgets"], written["smallest"], written["random"]
    assert row["measured_bytes"] <= 0.75 * row["plain_bytes"]
    assert smallest["measured_bytes"] < smallest["full_bytes"]
    assert plans["lowest"] == pytest.approx(1, abs=0.02)


def test_offload_budgets(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A place never makes a plan slower."""
    chosen = ("--tiny", "--model", "resnet", "--share", "0.8", "--speed", "2")
    written = run(monkeypatch, "offload_budgets.py", tmp_path, small=chosen)

    without, given = written["rows"]
    assert given["extra_seconds"] <= without["extra_seconds"]
    assert given["planning_seconds"] > 0


def test_planning_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A trace has a record for every op, and planning takes some time."""
    written = run(monkeypatch, "planning_time.py", tmp_path, small=("--blocks", "2"))

    (row,) = written["rows"]
    assert row["records"] > 50
    assert row["events"] > 3 * row["records"]
    assert row["planning_seconds"]["0.75"] > 0


@pytest.mark.allow_leak("loggers")  # the script silences them for the rest of what is its own process elsewhere
def test_lengths(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Plain training does not get through the epoch, ours does, in the same budget as the fixed policies."""
    sizes = ("--blocks", "3", "--width", "32", "--context", "192", "--batch", "4", "--count", "8")
    options = ("--files", "15", "--rounds", "1", "--lengths", "varied")
    written = run(monkeypatch, "lengths.py", tmp_path, *options, small=sizes)

    found = written["results"]["varied"]
    assert found["lengths"][-1] > 10 * found["lengths"][0]
    rows = {row["variant"]: row for row in found["rows"]}
    assert rows["none"]["failure"] is not None
    for name in ("full", "auto"):
        assert rows[name]["failure"] is None
        assert rows[name]["trained"] == 8
        assert rows[name]["peak_bytes"] <= found["budget_bytes"]


@pytest.mark.allow_leak("loggers")  # the script silences them for the rest of what is its own process elsewhere
def test_overhead(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A training is plain and ours in turns, and as many batches of each count."""
    written = run(monkeypatch, "overhead.py", tmp_path, "--steps", "13", "--in-a-row", "2")

    for row in written["results"].values():
        assert row["steps"] == 2  # of four turns with two batches each, the second
        assert row["ratio"] > 0
        assert row["at_rest"]


@pytest.mark.parametrize(("device", "place"), [("cpu", "disk"), pytest.param("cuda", "cpu", marks=RunIf(cuda=True))])
def test_offload(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, device: str, place: str) -> None:
    """Whatever keeps activations elsewhere is exact here, and a trace of each is there to look at."""
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)  # the script sets it
    options = ("--device", device, "--place", place, "--traces", str(tmp_path / "traces"))
    written = run(monkeypatch, "offload_gpu.py", tmp_path, "--small", *options, small=())

    rows = {row["variant"]: row for row in written["rows"]}
    names = {"plain", "torch checkpoint", "save_on_cpu", "checkpoint + save_on_cpu", "remat full", "remat auto 50%"}
    assert names | {f"remat {how}, {place}" for how in ("offload_only", "full", "auto 50%")} <= set(rows)
    assert rows[f"remat offload_only, {place}"]["of_plain"] < 0.9
    assert not any(row["different"] for row in rows.values() if row["ours"])
    for row in rows.values():
        assert "save_on_cpu" not in row["variant"] or (tmp_path / "traces" / row["trace"]).exists()
        assert row["seconds"] > 0
    left_out = [note.partition(":")[0] for note in written["notes"]]
    assert "TRL" in left_out or "TRL" in rows


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=RunIf(cuda=True))])
def test_accelerator(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, device: str) -> None:
    """All eager ways run, ours in plain's bits and with less memory; a real shortage is CUDA's."""
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)  # the script sets it
    written = run(monkeypatch, "gpu.py", tmp_path, "--small", "--no-compiled", "--device", device, small=())

    rows = {row["variant"]: row for row in written["eager"]["rows"]}
    ours = {name for name, row in rows.items() if row["ours"]}
    assert ours == {"remat full", "remat selective", "remat auto 75%", "remat auto 50%", "remat auto 30%"}
    assert len(rows) == len(ours) + 4
    assert not any(rows[name]["different"] for name in ours)
    assert all(rows[name]["of_plain"] < 0.8 for name in ours)
    assert written["eager"]["notes"] == []
    if device == "cpu":
        assert "left_out" in written["shortage"]
    else:
        assert written["shortage"]["plain_failed"]
        assert written["shortage"]["same_bits"]


def test_copies_beside_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time in which two kernels run counts once, and so does time in which two copies run."""
    monkeypatch.syspath_prepend(HERE)
    monkeypatch.delitem(sys.modules, "overlap", raising=False)
    overlap = importlib.import_module("overlap")

    def event(cat: str, name: str, begin: float, end: float) -> dict[str, Any]:
        return {"ph": "X", "cat": cat, "name": name, "ts": begin, "dur": end - begin}

    events = [
        event("kernel", "gemm", 0, 10),
        event("kernel", "norm", 5, 12),
        event("kernel", "gemm", 20, 30),
        event("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 8, 16),
        event("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 10, 12),
        event("gpu_memcpy", "Memcpy DtoD (Device -> Device)", 0, 100),
        event("cpu_op", "aten::copy_", 0, 100),
        {"ph": "i", "cat": "kernel", "name": "mark", "ts": 13},
    ]
    found = overlap.hidden_copies(events)
    assert found == {"out_s": 8e-6, "out_hidden": 0.5, "back_s": 0, "back_hidden": None}
    found = overlap.hidden_copies([*events, event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 18, 34)])
    assert found["back_hidden"] == 10 / 16


def test_the_allocator_that_is_made_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """It counts what is alive, views not twice, and a refusal leaves nothing behind."""
    monkeypatch.syspath_prepend(HERE)
    for name in ("fits", "models"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    allocator = importlib.import_module("fits").Allocator(limit=10_000)
    with allocator:
        a = torch.ones(1000)
        b = a.view(10, 100).add_(1)
        assert allocator.live == 4000
        before = torch.get_rng_state()
        with pytest.raises(torch.OutOfMemoryError):
            torch.rand(2000)
        assert torch.equal(before, torch.get_rng_state())
        assert allocator.live == 4000
        del a, b
        assert allocator.live == 0
    assert allocator.peak == 4000
    assert allocator.refused == 1


def test_offload_disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Both tables have every variant; what moves makes the peak smaller, and is in the file."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    small = ("--blocks", "2", "--width", "64", "--context", "64", "--batch", "4")
    args = ("--rounds", "1", "--no-rss", "--shares", "0.7", "--directory", str(tmp_path), "--in-flight", "128KiB")
    written = run(monkeypatch, "offload_disk.py", tmp_path, *args, small=small)

    rows = {row["variant"]: row for row in written["policies"]}
    assert rows["offload_only"]["peak_bytes"] < rows["plain"]["peak_bytes"]
    assert 0 < rows["offload_only"]["bytes_out"] <= rows["offload_only"]["file_bytes"]
    # Not which is faster: each has its own trace, whose times are those of a busy machine.
    without, with_disk = written["budgets"]
    assert without["moved_bytes"] == 0 <= with_disk["moved_bytes"]
    assert with_disk["peak_bytes"] <= with_disk["predicted_bytes"]


def test_ranks(tmp_path: Path) -> None:
    """Of each rank what is predicted is what is counted, and nothing differs by a bit."""
    out = tmp_path / "out.json"
    run_module("tests.benchmarks.ranks", "--base", "fsdp2", "--json", str(out))
    ranks = json.loads(out.read_text())["fsdp2"]
    assert len(ranks) == 2
    for rank in ranks:
        assert rank["different"] == []
        assert rank["smallest"]["predicted"] == rank["smallest"]["measured"] < rank["full"] < rank["plain"]
        assert rank["budget"]["predicted"] == rank["budget"]["measured"] <= rank["allowed"] < rank["plain"]
