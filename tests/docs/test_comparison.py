"""The figures of the comparison are those of the developer page that they are from."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parent.parent.parent / "docs"
SECTIONS = {
    "GPT-2": "### GPT-2",
    "Llama": "### Llama",
    "GPT": "### the GPT",
    "ResNet": "### a ResNet",
}


@pytest.mark.parametrize("language", ["en", "es", "hi"])
def test_figures_are_those_of_the_benchmark(language: str) -> None:
    """Each row stands in docs/planning.md, under its model, with the same four figures."""
    planning = (DOCS / "planning.md").read_text(encoding="utf-8")
    page = (DOCS / "site" / language / "comparison.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\S+) \| (.+?) \| ([\d.]+ \| [\d.]+ \| [\d.]+ \| [\d.]+) \|$", page, re.MULTILINE)
    assert len(rows) > 20
    for model, way, figures in rows:
        section = planning.split(SECTIONS[model])[1].split("\n### ")[0]
        assert f"| {way} | {figures} |" in section, (model, way)
