"""Every base, with one process, several or all failing or killed: all end soon and say the same, or all go on."""

import json
from dataclasses import replace
from typing import Any

import pytest

from tests.helpers.forks import run_module
from tests.integrations.fault_worker import ALL_AT_ONCE, GOES_ON, KILLED, MEMORY, MISTAKES, SECONDS, Fault

Results = dict[str, dict[str, list[dict[str, Any]]]]
NOTE = "lightning-remat: another process has ended, "


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """All trainings, forked from one process, since imports take longer than they do."""
    folder = tmp_path_factory.mktemp("faults")
    run_module("tests.integrations.fault_worker", str(folder), seconds=900)
    found: Results = json.loads((folder / "results.json").read_text())
    return found


def ended(found: list[dict[str, Any]], fault: Fault) -> tuple[list[str], list[str]]:
    """What those said that something had happened to, and the others' notes; all have ended in time."""
    failed, others = [], []
    for rank, one in enumerate(found):
        assert "ended" in one, (rank, one)  # not late, not by a signal, and not as if nothing had happened
        assert one["seconds"] < SECONDS, rank
        if rank in fault.ranks:
            failed.append(one["ended"])
            continue
        notes = [line for line in one["ended"].splitlines() if line.startswith(NOTE)]
        assert len(notes) == 1, one["ended"]
        others.append(one["ended"][one["ended"].index(NOTE) :])
    assert len(set(others)) <= 1, others
    return failed, others


@pytest.mark.parametrize("name", GOES_ON)
def test_all_go_on_as_if_nothing_had_been(results: Results, name: str) -> None:
    """Weights, losses, optimizer state and random streams are those of the base without a failure and without us."""
    for rank, found in enumerate(results["goes on"][name]):
        assert found["difference"] == [], rank
        assert found["retries"] == (rank in GOES_ON[name].ranks)


@pytest.mark.parametrize("name", MEMORY)
def test_out_of_memory_ends_all_with_the_same_words(results: Results, name: str) -> None:
    """Who, what of, and where; what it says itself has a way out."""
    fault = MEMORY[name]
    failed, others = ended(results["memory"][name], fault)
    for text in failed:
        assert "out of memory" in text.lower()
        assert "No batch was skipped" in text
        assert NOTE not in text
    for text in others:
        assert text.startswith(f"{NOTE}since it was out of memory")
        assert any(f"rank {rank}: " in text for rank in fault.ranks)
        if fault.place in ("optimizer step", "validation") and fault.base.__name__ != "loop":
            assert f"out of memory in {'the ' if ' ' in fault.place else ''}{fault.place}" in text


@pytest.mark.parametrize("name", MISTAKES)
def test_other_errors_end_all_and_nobody_speaks_of_memory(results: Results, name: str) -> None:
    fault = MISTAKES[name]
    failed, others = ended(results["mistakes"][name], fault)
    (text,) = failed
    assert text.startswith("RuntimeError\n[gloo" if "timed out" in name else "ValueError\na mistake in the model")
    assert NOTE not in text
    assert others == [f"{NOTE}by an error. rank {fault.ranks[0]}: {text.replace(chr(10), ': ', 1)}"]


@pytest.mark.parametrize("name", KILLED)
def test_who_was_killed_is_found_out(results: Results, name: str) -> None:
    """All others say which one, and where to look; the store goes with rank zero, and so does what it knows."""
    fault = KILLED[name]
    found = results["killed"][name]
    assert [found[rank] for rank in fault.ranks] == [{"signal": "SIGKILL"}]
    survivors = [one for rank, one in enumerate(found) if rank not in fault.ranks]
    _, others = ended(survivors, replace(fault, ranks=()))
    assert others
    gone = fault.ranks[0]
    for text in others:
        assert text.startswith(
            NOTE + (f"rank {gone}, without a word" if gone else "and rank zero, which has the store")
        )
        assert "last checkpoint" in text
        assert "a mistake in the model" not in text  # what an earlier training ended by


@pytest.mark.parametrize("name", ALL_AT_ONCE)
def test_each_of_several_says_its_own(results: Results, name: str) -> None:
    """No error is taken for the consequence of another."""
    fault = ALL_AT_ONCE[name]
    failed, _ = ended(results["all at once"][name], fault)
    assert len(failed) == 2
    for rank, text in enumerate(failed):
        assert NOTE not in text
        mine = "a mistake in the model" if "mistake" in name or "saved" in name else "out of memory"
        if "reason of its own" in name:
            mine = ("a mistake in the model", "out of memory in the optimizer step")[rank]
        assert mine in text.replace("Out of memory", "out of memory")
