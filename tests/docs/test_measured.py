"""Figures in the text: how they are written, and what is said where one cannot be."""

import json
from pathlib import Path

import pytest

from docs.measured import Measured

FIGURES = {"bytes": 12_582_912, "seconds": 0.01234, "share": 0.2814, "small": 0.0012, "name": "aten.addmm", "half": 1.5}


@pytest.fixture
def measured(tmp_path: Path) -> Measured:
    (tmp_path / "run.json").write_text(json.dumps(FIGURES), encoding="utf-8")
    return Measured(tmp_path)


@pytest.mark.parametrize(
    ("mark", "expected"),
    [
        ("{{ run.bytes | bytes }}", "12,582,912\u00a0bytes"),
        ("{{ run.bytes | MiB }}", "12.0\u00a0MiB"),
        ("{{ run.bytes | GiB }}", "0.01\u00a0GiB"),
        ("{{ run.bytes | MB }}", "12.6\u00a0MB"),
        ("{{ run.share | percent }}", "28\u00a0%"),
        ("{{ run.small | percent }}", "0.1\u00a0%"),
        ("{{ run.share | ratio }}", "0.28"),
        ("{{ run.seconds | ms }}", "12.3\u00a0ms"),
        ("{{ run.small | ms }}", "1.20\u00a0ms"),
        ("{{ run.half | s }}", "1.50\u00a0s"),
        ("{{ run.bytes | int }}", "12,582,912"),
        ("{{ run.name | text }}", "aten.addmm"),
        ("{{run.name}}", "aten.addmm"),
    ],
)
def test_a_figure(measured: Measured, mark: str, expected: str) -> None:
    assert measured.fill(f"about {mark}.") == (f"about {expected}.", [])


@pytest.mark.parametrize(
    ("mark", "said"),
    [
        ("{{ gone.bytes }}", "there is no gone.json in docs/results; `python docs/results.py gone` makes it"),
        ("{{ run.gone }}", "run.json has no 'gone'; it has bytes, half"),
        ("{{ run.bytes | KiB }}", "there is no format 'KiB'; there are bytes, MiB"),
        ("{{ run.name | MiB }}", "'aten.addmm' is no number, as 'MiB' needs it"),
        ("{{ run.half | int }}", "1.5 is no integer, as 'int' needs it"),
        ("{{ run }}", "a figure is named like"),
        ("{{ run.bytes | }}", "a figure is named like"),
    ],
)
def test_what_cannot_be_written(measured: Measured, mark: str, said: str) -> None:
    """It stays as it is, and is named."""
    text, faults = measured.fill(f"about {mark}.")
    assert text == f"about {mark}."
    assert len(faults) == 1
    assert faults[0].startswith(f"{mark}: {said}")


@pytest.mark.parametrize("unit", [" MiB", "\u00a0MiB", " bytes"])
def test_a_unit_that_is_written_twice(measured: Measured, unit: str) -> None:
    _, faults = measured.fill(f"{{{{ run.bytes | MiB }}}}{unit}, so")
    assert len(faults) == 1
    assert "has its unit already" in faults[0]


def test_a_unit_after_a_plain_number(measured: Measured) -> None:
    assert measured.fill("{{ run.bytes | int }} bytes") == ("12,582,912 bytes", [])


def test_figures_that_cannot_be_read(measured: Measured, tmp_path: Path) -> None:
    (tmp_path / "half.json").write_text('{"a": 1', encoding="utf-8")
    _, faults = measured.fill("{{ half.a }}")
    assert faults[0].startswith("{{ half.a }}: docs/results/half.json cannot be read: ")
