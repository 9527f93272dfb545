"""What docs/results holds is what its scripts made: nothing is missing, nothing is left over, and plots are redrawn."""

from __future__ import annotations

import json
import math
import re
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from docs import plots, results

RESULTS, FIGURES = results.RESULTS, results.RESULTS / "figures"
DRAWN = [(name, language) for name in plots.figures() for language in plots.LANGUAGES]


def figures_of(script: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{script}.json").read_text(encoding="utf-8"))


def test_every_script_has_its_outputs_and_there_are_no_others() -> None:
    """A script that was renamed takes its outputs along."""
    expected = {f"{name}{suffix}" for name in results.SCRIPTS for suffix in (".json", ".txt")} | {"machine.json"}
    assert {path.name for path in RESULTS.iterdir() if path.is_file()} == expected
    assert {path.name for path in FIGURES.iterdir()} == {f"{name}.{language}.svg" for name, language in DRAWN}


@pytest.mark.parametrize("name", results.SCRIPTS)
def test_scripts_exist_and_their_figures_are_flat(name: str) -> None:
    """In the form in which they are written, so that a difference between two runs can be read."""
    assert (results.ROOT / "examples" / f"{name}.py").is_file()
    found = figures_of(name)
    assert results.complaint_about(found) is None
    assert (RESULTS / f"{name}.json").read_text(encoding="utf-8") == results.as_json(found)


def test_no_output_names_the_machine() -> None:
    """Paths of the machine it was made on have no place in a page."""
    for path in RESULTS.rglob("*.*"):
        assert not re.search(r"(?<![\w.])/(tmp|home|root|work|usr|var)/", path.read_text(encoding="utf-8")), path.name


def test_plots_are_of_scripts_in_the_table() -> None:
    assert {figure["script"] for figure in plots.figures().values()} <= set(results.SCRIPTS)


def constrained(package: str) -> str:
    """The version that constraints.txt gives."""
    lines = Path(results.ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return next(line.split("==")[1].split(";")[0].strip() for line in lines if line.startswith(f"{package}=="))


@pytest.mark.skipif(
    version("matplotlib") != constrained("matplotlib"),
    reason="another version of matplotlib draws the same in other bytes",
)
@pytest.mark.parametrize(("name", "language"), DRAWN)
def test_plots_are_what_the_figures_give(name: str, language: str) -> None:
    """Byte for byte, so that none is older than its figures or its words."""
    figure = plots.figures()[name]
    drawn = plots.draw(figure, figures_of(figure["script"]), language)
    assert drawn == (FIGURES / f"{name}.{language}.svg").read_text(encoding="utf-8")


def test_output_is_cut_into_sections() -> None:
    """A heading begins a section; blank lines around it are no part of one."""
    printed = "before\n\n== What a block keeps\n  1 MiB  \n\n2 MiB\n\n== Next\nend\n"
    assert results.with_sections(printed) == (
        "before\n\n"
        "== What a block keeps\n--8<-- [start:what-a-block-keeps]\n"
        "  1 MiB\n\n2 MiB\n--8<-- [end:what-a-block-keeps]\n\n"
        "== Next\n--8<-- [start:next]\nend\n--8<-- [end:next]\n"
    )


@pytest.mark.parametrize(
    "bad",
    [[1], {"a": {"b": 1}}, {"a": None}, {"a": []}, {"a": ["words"]}, {"a": math.nan}, {"a": [math.inf]}, {"a": True}],
)
def test_figures_that_are_not_flat_are_refused(bad: Any) -> None:
    assert results.complaint_about(bad)


def test_a_failing_script_writes_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The one before it neither; what it said is shown."""
    (tmp_path / "examples").mkdir()
    good = "import pathlib, sys; print('fine'); pathlib.Path(sys.argv[2]).write_text('{\"a\": 1}')"
    (tmp_path / "examples" / "good.py").write_text(good)
    (tmp_path / "examples" / "bad.py").write_text("raise SystemExit('no such luck')")
    monkeypatch.setattr(results, "ROOT", tmp_path)
    monkeypatch.setattr(results, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(results, "SCRIPTS", {"good": (), "bad": ()})
    monkeypatch.setattr("sys.argv", ["results.py"])
    monkeypatch.setattr(sys, "path", list(sys.path))

    with pytest.raises(SystemExit, match="no such luck"):
        results.main()
    assert not (tmp_path / "results").exists()

    (tmp_path / "examples" / "bad.py").write_text(good.replace('{"a": 1}', '{"a": 1'))
    with pytest.raises(SystemExit, match=r"bad\.json: it is no JSON"):
        results.main()
    assert not (tmp_path / "results").exists()

    monkeypatch.setattr("sys.argv", ["results.py", "good"])
    results.main()
    assert (tmp_path / "results" / "good.txt").read_text() == "fine\n"
    assert json.loads((tmp_path / "results" / "good.json").read_text()) == {"a": 1}
    assert not (tmp_path / "results" / "machine.json").exists()  # not all were run
    assert "good" in capsys.readouterr().out
