"""Plan files of plans in which something moves; those of plans in which nothing does are as they ever were."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lightning_remat.errors import PlanFileError
from lightning_remat.planning.plan import PlanResult
from lightning_remat.planning.planfile import PlanFile
from lightning_remat.planning.planner import Planner
from lightning_remat.planning.transfer import Transfer
from tests.planning.small_models import transformer

FAST = Transfer(
    out_bytes_per_second=1e12, in_bytes_per_second=1e12, min_bytes=1000, window_bytes=2**20, ahead_bytes=2**21
)


@pytest.fixture(scope="module")
def result() -> PlanResult:
    planner = Planner(transformer(blocks=1), FAST)
    found = planner.result(int(planner.plain.peak_bytes * 0.8))
    assert found.chosen.moves
    return found


@pytest.fixture
def content(result: PlanResult, tmp_path: Path) -> dict[str, Any]:
    path = tmp_path / "plan.json"
    PlanFile.of(result).save(path)
    return json.loads(path.read_text())


def load(content: dict[str, Any], tmp_path: Path) -> PlanFile:
    path = tmp_path / "changed.json"
    path.write_text(json.dumps(content))
    return PlanFile.load(path)


def test_what_is_written_is_what_is_read(result: PlanResult, content: dict[str, Any], tmp_path: Path) -> None:
    plan = load(content, tmp_path)
    assert content["version"] == 2
    assert plan == PlanFile.of(result)
    assert plan.move == result.chosen.move
    assert (plan.window_bytes, plan.ahead_bytes, plan.min_bytes) == (2**20, 2**21, 1000)
    assert plan.moves
    plan.save(tmp_path / "again.json")
    assert json.loads((tmp_path / "again.json").read_text()) == content


def test_without_moves_it_is_of_the_first_version(tmp_path: Path) -> None:
    """So that earlier releases can follow it."""
    planner = Planner(transformer(blocks=1))
    PlanFile.of(planner.result(planner.plain.peak_bytes)).save(tmp_path / "plan.json")
    content = json.loads((tmp_path / "plan.json").read_text())
    read = PlanFile.load(tmp_path / "plan.json")
    assert content["version"] == 1
    assert not set(content) & {"move", "lean_move", "window_bytes", "ahead_bytes", "min_bytes"}
    assert (read.move, read.lean_move, read.window_bytes, read.moves) == ((), (), 0, False)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("version", 1, "does not belong into version 1"),
        ("move", "01", "move has 2 entries"),
        ("move", "012", "consists of 0 and 1"),
        ("lean_move", None, "consists of 0 and 1"),
        ("window_bytes", -1, "limits of moves"),
        ("ahead_bytes", 1.5, "limits of moves"),
        ("min_bytes", True, "limits of moves"),
    ],
)
def test_what_is_damaged_is_refused(
    content: dict[str, Any], tmp_path: Path, name: str, value: object, words: str
) -> None:
    with pytest.raises(PlanFileError, match=words):
        load(content | {name: value}, tmp_path)


def test_what_is_dropped_does_not_move(content: dict[str, Any], tmp_path: Path) -> None:
    everything = "1" * len(content["names"])
    with pytest.raises(PlanFileError, match="moves that is dropped"):
        load(content | {"drop": everything, "move": everything}, tmp_path)


@pytest.mark.parametrize("name", ["move", "lean_move"])
def test_moves_that_are_missing(content: dict[str, Any], tmp_path: Path, name: str) -> None:
    del content[name]
    with pytest.raises(PlanFileError, match=f"'{name}' is missing"):
        load(content, tmp_path)
