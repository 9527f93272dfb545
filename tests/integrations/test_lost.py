"""Processes of which one fails or is killed: all end soon and say the same, or all go on as if nothing had been."""

import json
from typing import Any

import pytest

from tests.helpers.forks import run_module
from tests.integrations.lost_worker import ENDS, GOES_ON, SECONDS, killed


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """All trainings, forked from one process, since imports take longer than they do."""
    folder = tmp_path_factory.mktemp("lost")
    run_module("tests.integrations.lost_worker", str(folder))
    found: dict[str, list[dict[str, Any]]] = json.loads((folder / "results.json").read_text())
    return found


SAID = {
    "optimizer step": "out of memory in the optimizer step",
    "optimizer step of one of four": "out of memory in the optimizer step",
    "backward of one of four, after a bucket": "communication with the other processes had begun",
    "killed in forward": "without a word",
    "killed in backward": "without a word",
    "rank zero killed": "rank zero",
}


@pytest.mark.parametrize("name", ENDS)
def test_all_end_soon_and_say_the_same(results: dict[str, list[dict[str, Any]]], name: str) -> None:
    """No process waits for one that is gone."""
    scenario = ENDS[name]
    for number, found in enumerate(results[name]):
        assert found.get("seconds", 0) < SECONDS
        if number == scenario.rank:
            if scenario.what is killed:
                assert found == {"signal": "SIGKILL"}
            else:
                assert "out of memory" in found["ended"].lower()
        else:
            assert "another process has ended" in found["ended"], number
            # Who keeps the words goes with rank zero; if that has ended first, it is said where to look.
            assert SAID[name] in found["ended"] or (number and "rank zero" in found["ended"]), number


@pytest.mark.parametrize("name", GOES_ON)
def test_all_go_on_as_if_nothing_had_been(results: dict[str, list[dict[str, Any]]], name: str) -> None:
    """Weights, optimizer state and random streams are those of plain DDP without a failure."""
    for number, found in enumerate(results[name]):
        assert found["difference"] == [], number
        assert found["retries"] == (number == GOES_ON[name].rank)
