"""Two and four gloo processes under each base: on each, bit for bit what that base gives by itself."""

import json
from typing import Any

import pytest

from tests.helpers.forks import run_module
from tests.integrations.bases_worker import RUNS, SECONDS

CASES = [(base, name, count) for count, bases in RUNS.items() for base, ways in bases.items() for name in ways]
Results = dict[str, list[dict[str, dict[str, dict[str, Any]]]]]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """By number of processes and rank: all trainings, in forks of one process, since imports take long."""
    folder = tmp_path_factory.mktemp("bases")
    run_module("tests.integrations.bases_worker", str(folder), seconds=2 * SECONDS)
    found: Results = json.loads((folder / "results.json").read_text())
    for count, ranks in found.items():
        for number, rank in enumerate(ranks):
            if rank.keys() != RUNS[int(count)].keys():
                pytest.fail(f"rank {number} of {count}: {rank.get('error', rank)}", pytrace=False)
    return found


@pytest.mark.parametrize(("base", "way", "count"), CASES)
def test_each_rank_gives_what_the_base_gives(results: Results, base: str, way: str, count: int) -> None:
    """Losses, local parts of gradients, weights and optimizer state, buffers and random streams, under each policy."""
    for number, rank in enumerate(results[str(count)]):
        assert rank[base][way].keys() == RUNS[count][base][way].policies.keys()
        for policy, found in rank[base][way].items():
            assert found["difference"] == [], (number, policy)
            assert found["world"] == count
            assert found["gradients"] > 0
            assert found["replayed"] > 0, (number, policy)
            assert (found["units"] > 0) is ("fsdp" in base)


@pytest.mark.parametrize(("base", "count"), [(base, count) for base, way, count in CASES if way == "rows by rank"])
def test_ranks_can_follow_one_plan(results: Results, base: str, count: int) -> None:
    """Where they run the same ops, whatever their rows."""
    for rank in results[str(count)]:
        found = rank[base]["rows by rank"].get("one plan")
        if found is None:
            assert "one plan" not in RUNS[count][base]["rows by rank"].policies
            continue
        assert [f["rank"] for f in found["ranks"]] == list(range(count))
        assert len({f["plan"] for f in found["ranks"]}) == 1
        assert all(f["dropped"] for f in found["ranks"])
        assert any(f"all {count} ranks follow one plan" in note for note in found["notes"])
