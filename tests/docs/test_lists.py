"""What the how-to pages list is what there is: metrics, lines of the summary, options, policies."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re

import pytest

from lightning_remat import Offload, RematStrategy
from lightning_remat.engine.policies import _NAMES
from lightning_remat.integrations import monitor
from lightning_remat.reporting import summary
from tests.docs.pages import LANGUAGES, SITE

EVERYWHERE = pytest.mark.parametrize("language", LANGUAGES)


def rows(language: str, page: str, anchor: str) -> list[list[str]]:
    """The cells of the tables between a heading and the next of its kind, without heads."""
    text = (SITE / language / "howto" / page).read_text(encoding="utf-8")
    part = re.split("^## ", text.partition(f"{{#{anchor}}}\n")[2], flags=re.MULTILINE)[0]
    tables = re.findall(r"^\|[^\n]*\n\| ---[^\n]*\n((?:\|[^\n]*\n)+)", part, re.MULTILINE)
    return [[cell.strip() for cell in row.strip("|").split("|")] for table in tables for row in table.splitlines()]


def first(cells: list[list[str]]) -> list[str]:
    return [row[0].strip("`") for row in cells]


@EVERYWHERE
def test_metrics(language: str) -> None:
    tree = ast.parse(inspect.getsource(monitor.figures))
    keys = [k.value for d in ast.walk(tree) if isinstance(d, ast.Dict) for k in d.keys if isinstance(k, ast.Constant)]
    assert sorted(first(rows(language, "logging.md", "metrics"))) == sorted(monitor.PREFIX + str(key) for key in keys)


@EVERYWHERE
def test_lines_of_the_summary(language: str) -> None:
    source = inspect.getsource(summary.in_lines) + inspect.getsource(summary._moved)
    listed = first(rows(language, "logging.md", "summary"))
    assert sorted(listed) == sorted({*re.findall(r'"  (\w+(?: \w+)?)  ', source), "memory ran out", "decided"})
    assert all(name in source for name in listed)


@EVERYWHERE
def test_options(language: str) -> None:
    signature = inspect.signature(RematStrategy.__init__).parameters
    own = [n for n, p in signature.items() if n != "self" and not n.startswith("_") and p.kind is not p.VAR_KEYWORD]
    assert first(rows(language, "yaml.md", "options")) == own
    for name, default, *_ in rows(language, "yaml.md", "options"):
        value = signature[name.strip("`")].default
        assert default.strip("`").startswith("null" if value is None else str(value).lower())
    assert first(rows(language, "yaml.md", "offload")) == [f.name for f in dataclasses.fields(Offload) if f.name != "_"]


@EVERYWHERE
def test_policies(language: str) -> None:
    listed = [re.match(r"`([^`]+)`", row[0]) for row in rows(language, "choose.md", "table")]
    assert {m[1] for m in listed if m} == {*_NAMES, '"plan.json"'}
