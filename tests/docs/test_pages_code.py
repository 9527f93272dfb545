"""The Python on the site's pages is run, and is the same in every language.

- Every ``python`` block of a page in English is run, in order; a page is one program, in an empty folder.
- Prepared are the names of the README's test: ``model``, ``data``, ``batches``, ``f``, ``optimizer``, ``MyLayer``,
  ``Remat``, ``RematCallback``, ``L`` (Lightning, with a quiet trainer of two steps). All else a page imports.
- A block that only includes others (``--8<--``) is left to their tests.
- What cannot run has ``<!-- no-run: REASON -->`` in the line before it (an empty line may stand in between).
- ``yaml`` blocks are read.
- Fenced blocks of all kinds are the same in all languages, character for character.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

import tests.test_readme as readme
from tests.docs.pages import LANGUAGES, SITE, Block, blocks, pages

names = readme.names  # the fixture

ENGLISH = pages("en")
OTHERS = [(language, page) for language in LANGUAGES[1:] for page in pages(language)]


def to_run(page: Path) -> list[Block]:
    text = (SITE / "en" / page).read_text(encoding="utf-8")
    return [b for b in blocks(text) if b.language == "python" and not b.no_run and not b.included]


@pytest.mark.filterwarnings("ignore:.*does not have many workers")  # Lightning's advice on the reader's data
@pytest.mark.parametrize("page", [page for page in ENGLISH if to_run(page)], ids=str)
def test_a_page_runs(page: Path, names: dict[str, Any]) -> None:
    for block in to_run(page):
        code = "\n" * (block.line - 1) + block.content  # so that a traceback has the page's lines
        exec(compile(code, str(SITE / "en" / page), "exec"), names)


@pytest.mark.parametrize("page", ENGLISH, ids=str)
def test_yaml_can_be_read(page: Path) -> None:
    for block in blocks((SITE / "en" / page).read_text(encoding="utf-8")):
        if block.language in ("yaml", "yml") and not block.included:
            yaml.safe_load(block.content)


@pytest.mark.parametrize(("language", "page"), OTHERS, ids=str)
def test_code_is_the_same_in_every_language(language: str, page: Path) -> None:
    def code(folder: str) -> list[tuple[str, str, bool]]:
        return [(b.info, b.content, b.no_run) for b in blocks((SITE / folder / page).read_text(encoding="utf-8"))]

    assert code(language) == code("en")


@pytest.mark.parametrize("language", LANGUAGES)
def test_no_formatter_was_here(language: str) -> None:
    """One that takes the mark of an included file for Python."""
    assert not [page for page in pages(language) if "--8 <" in (SITE / language / page).read_text(encoding="utf-8")]


def test_there_is_something_to_run() -> None:
    assert sum(len(to_run(page)) for page in ENGLISH) >= 10


def test_blocks_are_found() -> None:
    """Marks, indentation, longer fences, included files."""
    text = "a\n```python\nx = 1\n```\n\n<!-- no-run: it takes a GPU -->\n\n    ```python\n    y\n    ```\n"
    text += '````text\n```\n````\n```python\n--8<-- "a.py:b"\n```\n```{ .yaml }\na: b\n```\n'
    found = blocks(text)
    assert [b.language for b in found] == ["python", "python", "text", "python", "yaml"]
    assert [b.no_run for b in found] == [False, True, False, False, False]
    assert [b.content for b in found] == ["x = 1", "y", "```", '--8<-- "a.py:b"', "a: b"]
    assert [b.included for b in found] == [False, False, False, True, False]
    assert [b.line for b in found] == [3, 9, 12, 15, 18]
    with pytest.raises(ValueError, match="does not end"):
        blocks("```python\nx\n")
