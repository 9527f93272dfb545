"""Checkpoints of one base and policy, read under others: training goes on as it does without recomputation."""

import json
from typing import Any

import pytest

from tests.helpers.forks import run_module
from tests.integrations.crossing_worker import READERS, SOURCES

CHANGES = [(source, reader, count) for (reader, count), changes in READERS.items() for source, _ in changes]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """All writers and readers, in forks of one process."""
    folder = tmp_path_factory.mktemp("crossing")
    run_module("tests.integrations.crossing_worker", str(folder), seconds=500)
    found: dict[str, Any] = json.loads((folder / "results.json").read_text())
    for part in ("written", "read"):
        for count, ranks in found[part].items():
            for number, rank in enumerate(ranks):
                if rank.keys() & {"error", "signal", "late"}:
                    pytest.fail(f"{part}, rank {number} of {count}: {rank.get('error', rank)}", pytrace=False)
    return found


@pytest.mark.parametrize("name", SOURCES)
def test_writers_differ_in_what_they_learned_only(results: dict[str, Any], name: str) -> None:
    for rank in results["written"][str(SOURCES[name].count)]:
        assert rank[name]["difference"] == []
        assert rank[name]["replayed"] > 0
    assert results["learned"][f"{name} ours"]
    assert not results["learned"][f"{name} plain"]


@pytest.mark.parametrize(("source", "reader", "count"), CHANGES)
def test_a_reader_goes_on_as_without_recomputation(
    results: dict[str, Any], source: str, reader: str, count: int
) -> None:
    """Losses, gradients, weights, optimizer state: with recomputation in both, and in the first one only."""
    ranks = results["read"][str(count)]
    assert len(ranks) == count
    for rank in ranks:
        found = rank[f"{source} to {reader}"]
        assert found["ours"] == []
        assert found["without"] == []
        assert found["replayed"] > 0
        assert found["epochs"] == 2
