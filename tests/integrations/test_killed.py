"""`kill -9` at bad moments, and a new process that goes on from the newest checkpoint as if nothing had been."""

import json
from typing import Any

import pytest

from tests.helpers.forks import run_module
from tests.integrations.killed_worker import BATCHES, EPOCHS

MOMENTS = {
    "tuning": "step=002.ckpt",
    "epoch": "step=016.ckpt",
    "half a file": "step=006.ckpt",
    "writing": "step=006.ckpt",
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """All trainings, started by one process, since imports take longer than they do."""
    folder = tmp_path_factory.mktemp("killed")
    run_module("tests.integrations.killed_worker", str(folder))
    return json.loads((folder / "results.json").read_text())


def test_plain_training_runs_to_its_end(results: dict[str, Any]) -> None:
    assert results["plain"]["error"] is None
    assert results["plain"]["steps"] == BATCHES * EPOCHS


@pytest.mark.parametrize("moment", MOMENTS)
def test_training_goes_on_in_every_bit(results: dict[str, Any], moment: str) -> None:
    """Weights, optimizer state, random streams and metrics are those of one uninterrupted plain training."""
    found = results[moment]
    assert found["signal"] == "SIGKILL"
    assert found["error"] is None
    assert found["resumed_from"] == MOMENTS[moment]
    assert found["broken"] == (["step=008.ckpt"] if moment == "half a file" else [])
    assert found["steps"] == BATCHES * EPOCHS - found["begun_at"]
    assert found["different"] == []


# After two steps, where "tuning" goes on, both have been traced, and there is no plan yet.
@pytest.mark.parametrize("moment", [moment for moment in MOMENTS if moment != "tuning"])
def test_it_goes_on_with_the_plan(results: dict[str, Any], moment: str) -> None:
    """What was found out before the last checkpoint is in it, and nothing is traced again."""
    assert results[moment]["planned_at_start"]
