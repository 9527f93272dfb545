"""A small model under a real limit; `python -m tests.runtime.real_limit` takes a larger one and more limits."""

import json
from typing import Any

import pytest

from tests.helpers.forks import run_module


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Trainings in a room near the lean end, and in one far below it, each in a process of its own."""
    path = tmp_path_factory.mktemp("limit") / "found.json"
    run_module("tests.runtime.real_limit", "--small", "--share", "0.25", "--json", str(path), "--no-fail")
    return json.loads(path.read_text())


def test_plain_training_runs_out_of_memory(found: dict[str, Any]) -> None:
    plain = found["rows"][0]
    assert (plain["strategy"], plain["digest"], plain["out_of_memory"]) == ("auto", None, True)


def test_ours_trains_to_the_same_bits(found: dict[str, Any]) -> None:
    """Weights, optimizer state and random stream of plain training without a limit."""
    ours = found["rows"][1]
    assert ours["error"] is None
    assert ours["digest"] == found["digest"]


def test_where_nothing_helps_the_error_says_what_is_missing(found: dict[str, Any]) -> None:
    below = found["rows"][2]
    assert below["kind"] == "NoMemoryLeft"
    assert below["error"].count("iB") >= 2  # what is needed, what is there


def test_there_is_nothing_else_to_complain_about(found: dict[str, Any]) -> None:
    assert found["faults"] == []
