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


COUNTED = [(base, way, count) for base, way, count in CASES if RUNS[count][base][way].quiet]


@pytest.mark.parametrize(("base", "way", "count"), COUNTED)
def test_memory_falls_on_each_rank(results: Results, base: str, way: str, count: int) -> None:
    """Counted in every allocation of a step."""
    for rank in results[str(count)]:
        for policy, found in rank[base][way].items():
            plain, ours = found["counted"]
            assert max(ours) < min(plain), policy


PLANS = [
    (base, way, count, policy)
    for base, way, count in COUNTED
    for policy, options in RUNS[count][base][way].policies.items()
    if "budget" in options and (base, way) != ("tensor parallel", "sometimes")  # too few steps of each sequence
]


@pytest.mark.parametrize(("base", "way", "count", "policy"), PLANS)
def test_the_peak_of_each_rank_is_the_predicted_one(
    results: Results, base: str, way: str, count: int, policy: str
) -> None:
    """To the byte; and so is that of the base by itself."""
    for rank in results[str(count)]:
        found = rank[base][way][policy]
        (kind,) = found["peaks"]
        assert kind["measured"] == kind["predicted"] < kind["plain"]
        plain, ours = found["counted"]
        assert plain == [kind["plain"] - kind["static"]] * 2
        if "fsdp" in base and policy == "smallest":
            # Others take a snapshot as well, or agree on a plan, before the step that is predicted begins.
            assert ours == [kind["predicted"] - kind["static"]] * 2


@pytest.mark.parametrize(("base", "way", "count"), [(b, w, n) for b, w, n, policy in PLANS if policy == "one plan"])
def test_ranks_can_follow_one_plan(results: Results, base: str, way: str, count: int) -> None:
    """One that fits on each of them, whatever their rows."""
    for rank in results[str(count)]:
        found = rank[base][way]["one plan"]
        figures = found["ranks"]
        assert [f["rank"] for f in figures] == list(range(count))
        assert len({f["plan"] for f in figures}) == 1
        assert all(f["dropped"] for f in figures)
        assert all(f["predicted_peak_bytes"] <= f["budget_bytes"] for f in figures)
        assert any(f"all {count} ranks follow one plan" in note for note in found["notes"])
