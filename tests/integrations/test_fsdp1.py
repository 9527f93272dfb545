"""Two gloo processes, parameters sharded by FullyShardedDataParallel: bit for bit what that gives plainly."""

import json
from typing import Any

import pytest

from tests.integrations.sharded_worker import FSDP1
from tests.integrations.test_ddp import ROOT, finish, free_port, start

SECONDS = 500  # for all scenarios together, on a busy machine; plain FSDP takes a third of it


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two ranks has found, by scenario."""
    folder = tmp_path_factory.mktemp("fsdp1")
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2", "NODE_RANK": "0"}
    script = str(ROOT / "tests/integrations/sharded_worker.py")
    outputs = [folder / f"{rank}.txt" for rank in range(2)]
    processes = [
        start(output, script, str(folder), "fsdp1", LOCAL_RANK=str(i), **place) for i, output in enumerate(outputs)
    ]
    if not finish(processes, SECONDS):
        pytest.fail("\n".join(output.read_text()[-3000:] for output in outputs), pytrace=False)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("name", FSDP1)
def test_each_rank_gives_what_it_gives_plainly(results: list[dict[str, Any]], name: str, rank: int) -> None:
    """Losses, reduced gradients, this rank's shards, buffers, optimizer state and random streams, under each policy."""
    assert results[rank][name].keys() == FSDP1[name].policies.keys()
    for policy, found in results[rank][name].items():
        assert found["difference"] == [], policy
        assert found["gradients"] >= 4
        assert found["some"] > 0
        assert found["different"] == []
        if policy not in ("auto", "one"):
            assert found["units"] >= 3
            assert found["replayed"] > 0


@pytest.mark.parametrize("rank", [0, 1])
def test_checkpoints_can_be_resumed_under_any_policy(results: list[dict[str, Any]], rank: int) -> None:
    assert results[rank]["resumed"] == [[]] * 4


@pytest.mark.parametrize("rank", [0, 1])
def test_shards_in_host_memory_are_refused(results: list[dict[str, Any]], rank: int) -> None:
    assert results[rank]["on the host"].startswith("ConfigurationError")
    assert "cpu_offload=True" in results[rank]["on the host"]
