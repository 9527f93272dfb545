"""Four processes, layers spread over two and each part sharded over two: bit for bit what that gives by itself."""

from typing import Any

import pytest

from tests.helpers.forks import run_ranks
from tests.integrations.both_parallel_worker import OWN, SCENARIOS

Results = list[dict[str, Any]]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """What each of four ranks has found, by scenario."""
    return run_ranks("tests.integrations.both_parallel_worker", tmp_path_factory.mktemp("both_parallel"))


@pytest.mark.parametrize("name", SCENARIOS)
def test_each_rank_gives_what_it_gives_plainly(results: Results, name: str) -> None:
    """Losses, local gradients, local weights, random streams, and how often the model ran."""
    assert len(results) == 4
    for number, rank in enumerate(results):
        assert rank[name]["difference"] == [], number
        expected = name != "another on each rank" or OWN[number] != "none"
        assert (rank[name]["replayed"] > 0) is expected, number


@pytest.mark.parametrize("name", [name for name, scenario in SCENARIOS.items() if scenario.less is not None])
def test_memory_falls(results: Results, name: str) -> None:
    for rank in results:
        plain, ours = rank[name]["peaks"]
        assert ours < SCENARIOS[name].less * plain


def test_a_parameter_that_has_changed_raises(results: Results) -> None:
    """Never a wrong gradient."""
    for rank in results:
        assert "were changed between forward and backward" in rank["changed"]
