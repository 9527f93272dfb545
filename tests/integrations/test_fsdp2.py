"""Two gloo processes, parameters sharded by fully_shard: bit for bit what that gives plainly."""

from typing import Any

import pytest

from tests.helpers.forks import run_ranks
from tests.integrations.sharded_worker import FSDP2, SECONDS, same_as_plainly


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two ranks has found, by scenario."""
    return run_ranks("tests.integrations.sharded_worker", tmp_path_factory.mktemp("fsdp2"), "fsdp2", seconds=SECONDS)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("name", FSDP2)
def test_each_rank_gives_what_it_gives_plainly(results: list[dict[str, Any]], name: str, rank: int) -> None:
    """Losses, reduced gradients, this rank's shards, buffers, optimizer state and random streams, under each policy."""
    same_as_plainly(results[rank][name], FSDP2[name])


@pytest.mark.parametrize("rank", [0, 1])
def test_the_peak_of_each_rank_falls_as_predicted(results: list[dict[str, Any]], rank: int) -> None:
    found = results[rank]["peaks"]
    assert found["full"] < 0.7 * found["plain"]
    assert found["budget"] < 0.7 * found["plain"]
    assert found["measured"] == found["predicted"]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_parameter_that_is_not_gathered_or_has_changed_raises(results: list[dict[str, Any]], rank: int) -> None:
    """Never a wrong gradient."""
    assert "sharded parameters are not gathered" in results[rank]["leaked"]
    assert "were changed between forward and backward" in results[rank]["changed"]


@pytest.mark.parametrize("rank", [0, 1])
def test_what_is_not_supported_says_so(results: list[dict[str, Any]], rank: int) -> None:
    assert results[rank]["out of memory"].startswith("NoMemoryLeft")
    assert "its parameters are sharded" in results[rank]["out of memory"]
    assert results[rank]["offload"].startswith("ConfigurationError: offload='disk'")
    assert "sharded" in results[rank]["offload"]


@pytest.mark.parametrize("rank", [0, 1])
def test_checkpoints_can_be_resumed_under_any_policy(results: list[dict[str, Any]], rank: int) -> None:
    assert results[rank]["resumed"] == [[]] * 4
