"""Two processes of which one runs out of memory: it undoes and runs its part again by itself, or both end."""

import json
from pathlib import Path
from typing import Any

import pytest

from lightning_remat import Remat
from tests.integrations.ddp_failing_worker import ENDS, SCENARIOS
from tests.integrations.test_ddp import ROOT, finish, free_port, start


def both(folder: Path, *arguments: str, script: str = "ddp_failing_worker.py") -> list[Any]:
    """What each of two ranks has found."""
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2", "NODE_RANK": "0"}
    path = str(ROOT / "tests/integrations" / script)
    outputs = [folder / f"{rank}.txt" for rank in range(2)]
    processes = [
        start(output, path, str(folder), *arguments, LOCAL_RANK=str(i), **place) for i, output in enumerate(outputs)
    ]
    if not finish(processes):
        pytest.fail("\n".join(output.read_text()[-3000:] for output in outputs), pytrace=False)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """All scenarios in one pair of processes."""
    return both(tmp_path_factory.mktemp("ddp_failing"))


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("name", SCENARIOS)
def test_each_rank_ends_where_plain_ddp_ends(results: list[dict[str, Any]], name: str, rank: int) -> None:
    """Weights, buffers, optimizer state, metrics, counters and random streams, without a failure in the plain run."""
    found = results[rank][name]
    assert found["difference"] == []
    expected = sorted([call, place] for r, call, place in SCENARIOS[name].failures if r == rank)
    assert found["failed"] == expected
    assert found["retries"] == len(expected)
    assert found["global_step"][0] == found["global_step"][1]


REASONS = {
    "static_graph, first step": "static_graph",
    "after a collective in forward": "communication with the other processes had begun",
    "after a bucket has been sent": "communication with the other processes had begun",
}


@pytest.mark.parametrize("name", ENDS)
def test_what_cannot_be_made_right_ends_on_both(tmp_path: Path, name: str) -> None:
    """Soon, and both say why."""
    other, failed = both(tmp_path, name)
    assert failed.startswith("NoMemoryLeft")
    assert REASONS[name] in failed
    assert "another process has ended, since it was out of memory" in other
    assert REASONS[name] in other
    plan = tmp_path / "remat-tightest-plan-1.json"
    if "first step" not in name:
        assert f"restart with policy={str(plan)!r}" in failed
        assert Remat(policy=str(plan)).summary
