"""Two processes that train compiled models under recomputation: bit for bit what compiled ones give without."""

from typing import Any

import pytest

from tests.helpers.forks import run_ranks
from tests.integrations.compiled_worker import SCENARIOS


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """All trainings, of each rank."""
    found = run_ranks("tests.integrations.compiled_worker", tmp_path_factory.mktemp("compiled"))
    assert all(rank.keys() == SCENARIOS.keys() for rank in found)
    return found


@pytest.mark.parametrize("name", SCENARIOS)
def test_each_rank_gives_what_its_base_gives_compiled(results: list[dict[str, Any]], name: str) -> None:
    """Losses, gradients, weights, optimizer state and random streams."""
    for rank in results:
        found = rank[name]
        assert found["difference"] == []
        assert found["compilations"] > 0
        if name.startswith("block"):
            assert found["replayed"] > 0  # the blocks that are not compiled


@pytest.mark.parametrize("name", [name for name in SCENARIOS if "budget" in name])
def test_each_rank_is_held_to_its_budget(results: list[dict[str, Any]], name: str) -> None:
    """Nothing as small as the budget is found; training goes on under what takes least of what was measured."""
    for rank in results:
        found = rank[name]
        peaks = {float(share): peak for share, peak in found["peaks"].items()}
        assert peaks[found["share"]] == min(peaks.values()) < peaks[1.0]
