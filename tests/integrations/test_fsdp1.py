"""Two gloo processes, parameters sharded by FullyShardedDataParallel: bit for bit what that gives plainly."""

from typing import Any

import pytest

from tests.helpers.forks import run_ranks
from tests.integrations.sharded_worker import FSDP1, SECONDS, same_as_plainly


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two ranks has found, by scenario."""
    return run_ranks("tests.integrations.sharded_worker", tmp_path_factory.mktemp("fsdp1"), "fsdp1", seconds=SECONDS)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("name", FSDP1)
def test_each_rank_gives_what_it_gives_plainly(results: list[dict[str, Any]], name: str, rank: int) -> None:
    """Losses, reduced gradients, this rank's shards, buffers, optimizer state and random streams, under each policy."""
    same_as_plainly(results[rank][name], FSDP1[name])


@pytest.mark.parametrize("rank", [0, 1])
def test_checkpoints_can_be_resumed_under_any_policy(results: list[dict[str, Any]], rank: int) -> None:
    assert results[rank]["resumed"] == [[]] * 4


@pytest.mark.parametrize("rank", [0, 1])
def test_shards_in_host_memory_are_refused(results: list[dict[str, Any]], rank: int) -> None:
    assert results[rank]["on the host"].startswith("ConfigurationError")
    assert "cpu_offload=True" in results[rank]["on the host"]
