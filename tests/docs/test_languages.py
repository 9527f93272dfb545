"""The guide says the same in each language: the same pages, anchors in the same order, as many tables and pictures.

That every page of docs/nav.toml is there is checked by the build.
"""

import re
import unicodedata
from pathlib import Path

import pytest

SITE = Path(__file__).parents[2] / "docs/site"
LANGUAGES = ("en", "es", "hi")
PAGES = sorted({path.relative_to(SITE / lang).as_posix() for lang in LANGUAGES for path in (SITE / lang).rglob("*.md")})

FENCE = re.compile(r"^( *)(`{3,}|~{3,})[^\n]*\n.*?^ *\2[`~]* *$", re.MULTILINE | re.DOTALL)
HEADING = re.compile(r"^(#{1,6}) .*?(?:\{[^}\n]*#([\w-]+)[^}\n]*\})?\s*$", re.MULTILINE)
TABLE = re.compile(r"^ *\|?[ :|-]*-{3,}[ :|-]*\|[ :|-]*$", re.MULTILINE)  # the line below a table's head
IMAGE = re.compile(r"!\[[^\]]*\]\(([^)\s]+)")
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)")
MARK = re.compile(r"<!-- (?:quiz: [\w-]+|faq|certificate|verify) -->")
FIGURE = re.compile(r"\{\{[^}\n]*\}\}")


def text(language: str, page: str) -> str:
    path = SITE / language / page
    assert path.is_file(), f"{page} is not there in {language!r}"
    return path.read_text(encoding="utf-8")


def prose(markdown: str) -> str:
    """Without code, in which a # is no heading."""
    return FENCE.sub("", markdown)


def headings(markdown: str) -> list[tuple[int, str]]:
    """Level and explicit id of each."""
    return [(len(level), name) for level, name in HEADING.findall(prose(markdown))]


def shape(markdown: str) -> dict[str, object]:
    """What must be the same in every language."""
    bare = prose(markdown)
    return {
        "headings and their ids, in order": headings(markdown),
        "blocks of code": len(FENCE.findall(markdown)),
        "tables": len(TABLE.findall(bare)),
        "pictures, in order": IMAGE.findall(bare),
        "marks of the quiz, in order": MARK.findall(bare),
        "links": sorted(LINK.findall(bare)),  # sentences may be in another order
        "figures": sorted(FIGURE.findall(bare)),
    }


@pytest.mark.parametrize("language", LANGUAGES[1:])
@pytest.mark.parametrize("page", PAGES)
def test_a_page_has_the_same_shape_in_each_language(page: str, language: str) -> None:
    english, other = shape(text("en", page)), shape(text(language, page))
    for what, expected in english.items():
        assert other[what] == expected, f"{page}, {language}: {what} differ"


@pytest.mark.parametrize("page", PAGES)
def test_a_page_is_written_in_one_way(page: str) -> None:
    """Composed characters (NFC), and digits that are the same in every language."""
    for language in LANGUAGES:
        markdown = text(language, page)
        assert unicodedata.is_normalized("NFC", markdown), f"{language}/{page}"
        others = {c for c in markdown if unicodedata.category(c) == "Nd" and not c.isascii()}
        assert not others, f"{language}/{page}: {others}"


@pytest.mark.parametrize("page", PAGES)
def test_a_page_has_one_title_and_each_anchor_once(page: str) -> None:
    for language in LANGUAGES:
        found = headings(text(language, page))
        assert [level for level, _ in found].count(1) == 1, f"{language}/{page}"
        assert found[0][0] == 1, f"{language}/{page}: the title comes first"
        names = [name for _, name in found if name]
        assert len(names) == len(set(names)), f"{language}/{page}: {names}"


def test_what_is_counted() -> None:
    """The patterns themselves, on a small page."""
    page = """# Title

## First {#first}

| a | b |
| --- | ---: |
| 1 | {{ run.x | MiB }} |

![A tape](figure:tape) and [a link](other.md#x).

```python
# no heading {#no}
```

### Second { #second .wide }

!!! note
    ```text
    | --- | --- |
    ```

<!-- quiz: kept -->
"""
    assert shape(page) == {
        "headings and their ids, in order": [(1, ""), (2, "first"), (3, "second")],
        "blocks of code": 2,
        "tables": 1,
        "pictures, in order": ["figure:tape"],
        "marks of the quiz, in order": ["<!-- quiz: kept -->"],
        "links": ["other.md#x"],
        "figures": ["{{ run.x | MiB }}"],
    }
