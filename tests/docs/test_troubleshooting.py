"""The headings of the page on errors are texts that the package really has.

A heading of the third level is one message, in backticks, with ``...`` for what differs from case to case. It has to be
found in one string of the package: the rest of it in that order, ``...`` standing for anything. Strings are taken from
the syntax tree, so that neither comments nor docstrings count, and what an f-string fills in counts as a gap.
"""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

import lightning_remat
from tests.docs.pages import LANGUAGES, SITE

HEADING = re.compile(r"^### `(?P<text>[^`]+)` \{#(?P<id>[a-z0-9-]+)\}$", re.MULTILINE)
GAP = "\0"
PAGE = Path("howto") / "troubleshooting.md"


def text_of(node: ast.expr) -> str:
    """A string as it stands in the source, with a gap for each part that is filled in."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else GAP
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(part) for part in node.values)
    return GAP


@cache
def strings() -> tuple[str, ...]:
    found = []
    for path in Path(lightning_remat.__file__).parent.rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        said = {id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Expr)}  # docstrings
        found += [
            text_of(n) for n in ast.walk(tree) if isinstance(n, (ast.Constant, ast.JoinedStr)) and id(n) not in said
        ]
    return tuple(found)


def is_there(heading: str) -> bool:
    pieces = [re.escape(piece) for piece in heading.split("...")]
    return any(re.search(".*".join(pieces), text, re.DOTALL) for text in strings())


def page(language: str) -> str:
    return (SITE / language / PAGE).read_text(encoding="utf-8")


HEADINGS = [(m["text"], m["id"]) for m in HEADING.finditer(page("en"))]


@pytest.mark.parametrize("heading", [text for text, _ in HEADINGS])
def test_the_package_says_so(heading: str) -> None:
    assert max(map(len, heading.split("..."))) >= 12, "too short to tell one message from another"
    assert is_there(heading)


def test_every_heading_is_a_message() -> None:
    """None is overlooked for being written otherwise."""
    assert len(HEADINGS) == len(re.findall("^### ", page("en"), re.MULTILINE)) > 40
    assert len({id_ for _, id_ in HEADINGS}) == len(HEADINGS)


@pytest.mark.parametrize("language", LANGUAGES[1:])
def test_messages_are_in_english_everywhere(language: str) -> None:
    assert [(m["text"], m["id"]) for m in HEADING.finditer(page(language))] == HEADINGS


def test_what_nobody_says_is_not_found() -> None:
    assert not is_there("budget=... is feasible")
    assert not is_there("the smallest peak of any plan found is ... is not feasible")
