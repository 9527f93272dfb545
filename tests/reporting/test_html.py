"""The page: well formed, alone in the world, and safe to open."""

from __future__ import annotations

import re
import sys
from html.parser import HTMLParser

import pytest

from lightning_remat.reporting import wording
from lightning_remat.reporting.html import page
from lightning_remat.reporting.plan_report import PlanReport, plan_report
from tests.helpers.traces import plan_by_hand, transformer_trace

MIB = 2**20
VOID = {"meta"}


class Page(HTMLParser):
    """Checks that every element is closed by its own end; collects attributes, cells and text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str, str | None]] = []
        self.text = ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(tag, name, value) for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(tag, name, value) for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def report(name: str = "layers.{}", **options: object) -> PlanReport:
    trace = transformer_trace(4, tokens=1024, width=256, vocabulary=512, name=name)
    result = plan_by_hand(trace, budget_bytes=45 * MIB, static_bytes=20 * MIB)
    return plan_report(result, [name.format(i) for i in range(4)], **options)


def test_the_page_is_well_formed() -> None:
    """Elements are closed in order, identifiers are unique, references lead somewhere."""
    text = page(report())
    assert text.startswith("<!DOCTYPE html>")
    found = Page(text)
    assert found.tags.count("svg") == 2
    identifiers = [value for _, name, value in found.attributes if name == "id"]
    # A glyph is defined where it is used first; within one drawing nothing is defined twice.
    assert len(identifiers) == len(set(identifiers))
    references = {value for _, name, value in found.attributes if name == "href"}
    references |= set(re.findall(r"url\((#[^)]*)\)", text))
    assert references
    assert references <= {f"#{identifier}" for identifier in identifiers}


def test_the_page_needs_nothing_else() -> None:
    """No address, no script, no other file."""
    text = page(report())
    found = Page(text)
    assert "://" not in text
    assert not {"script", "link", "img", "iframe", "object", "base"} & set(found.tags)
    assert not [name for _, name, _ in found.attributes if name in ("src", "srcset") or name.startswith("on")]
    assert "@import" not in text


def test_names_are_escaped() -> None:
    """A module's name is text, whatever it looks like."""
    text = page(report(name="<script>alert('x')</script>&.{}", static_parts={"<b>weights</b>": 5 * MIB}))
    found = Page(text)
    assert not {"script", "b"} & set(found.tags)
    assert "<script>alert('x')</script>&.*.norm1" in found.text
    assert "<b>weights</b> 5.0 MiB" in found.text


def test_the_page_says_what_the_printed_report_says() -> None:
    """Every figure, every row, every sentence."""
    shown = report(measured_peak_bytes=58 * MIB, measured_extra_seconds=1e-4, step_seconds=0.01)
    found = " ".join(Page(page(shown)).text.split())
    facts = shown.facts
    lines = [*wording.figures(facts), *wording.notes(facts), *(wording.cells(row, facts) for row in facts.rows)]
    for cell in (cell for line in [*lines, wording.totals(facts)] for cell in line):
        assert cell in found
    assert wording.title(facts) in found
    assert wording.explanation(facts) in found
    assert len(facts.rows) == 11


def test_the_page_is_the_same_every_time() -> None:
    assert page(report()) == page(report())


def test_without_matplotlib_the_page_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables are there, and what to install for the plots."""
    for name in ("matplotlib.figure", "matplotlib.backends.backend_agg"):
        monkeypatch.setitem(sys.modules, name, None)
    found = Page(page(report()))
    assert "svg" not in found.tags
    assert 'pip install "lightning-remat[plot]"' in found.text
    assert "layers.*.norm1" in found.text
