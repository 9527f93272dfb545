"""Two processes over which layers are spread (DTensor): bit for bit what tensor parallel gives by itself."""

import json
from typing import Any

import pytest

from tests.helpers.forks import run_module
from tests.integrations.tensor_parallel_worker import SCENARIOS

Results = list[dict[str, Any]]


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Results]:
    """All trainings, in forks of one process, since imports take longer than they do."""
    folder = tmp_path_factory.mktemp("tensor_parallel")
    run_module("tests.integrations.tensor_parallel_worker", str(folder))
    found: dict[str, Results] = json.loads((folder / "results.json").read_text())
    return found


@pytest.fixture(scope="module")
def results(everything: dict[str, Results]) -> Results:
    """What each of the ranks has found, by scenario."""
    for number, found in enumerate(everything["scenarios"]):
        if "budget" not in found:
            pytest.fail(f"rank {number}: {found.get('error', found)}", pytrace=False)
    return everything["scenarios"]


@pytest.mark.parametrize("name", SCENARIOS)
def test_each_rank_gives_what_tensor_parallel_gives(results: Results, name: str) -> None:
    """Losses, local gradients, local weights, random streams, and how often the model ran."""
    for number, rank in enumerate(results):
        assert rank[name]["difference"] == [], number
        assert (rank[name]["replayed"] > 0) is SCENARIOS[name].replays, number


@pytest.mark.parametrize("name", [name for name, scenario in SCENARIOS.items() if scenario.less is not None])
def test_memory_falls(results: Results, name: str) -> None:
    """The peak of a step, counted in every allocation, what libraries take for communication included."""
    for rank in results:
        plain, ours = rank[name]["peaks"]
        assert ours < SCENARIOS[name].less * plain


def test_the_peak_is_the_predicted_one(results: Results) -> None:
    """What gloo's threads hold left out, which is more in one step than in another."""
    for rank in results:
        assert rank["budget"]["peaks"][1] == rank["budget"]["predicted"]


def test_verification_finds_nothing(results: Results) -> None:
    for rank in results:
        assert rank["verified"]["different"] == []
        assert {"aten.gelu.default", "aten._softmax.default"} <= set(rank["verified"]["verified"])


def test_writes_to_what_was_saved_raise_what_they_raise_plainly(results: Results) -> None:
    for rank in results:
        for said in rank["written within"]:
            assert "modified by an inplace operation" in said


def test_writes_after_the_step_to_what_a_replay_reads_are_seen(results: Results) -> None:
    """Plainly they do no harm, since nobody has saved it; a replay would read the new content."""
    for rank in results:
        plain, kept, dropped = rank["written after"]
        assert plain == kept == "nothing"
        assert dropped.startswith("ReplayError")
        assert "changed in place" in dropped


def test_nothing_waits_for_the_garbage_collector(results: Results) -> None:
    for rank in results:
        assert rank["left behind"] == []


def test_out_of_memory_after_a_collective_ends_on_both(everything: dict[str, Results]) -> None:
    """A step that has spoken to the others is not run again by one of them alone."""
    other, failed = everything["out of memory"]
    assert failed["said"].startswith("NoMemoryLeft")
    assert "communication with the other processes had begun" in failed["said"]
    assert other["said"].startswith("RuntimeError")
