"""The site's Markdown as tests see it: pages, and the fenced blocks in them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
SITE = ROOT / "docs" / "site"
LANGUAGES = ("en", "es", "hi")

_FENCE = re.compile(r"^(?P<indent> *)(?P<fence>`{3,}|~{3,}) *(?P<info>.*)$")
_MARK = re.compile(r"^<!-- no-run: \S.* -->$")


@dataclass(frozen=True)
class Block:
    """A fenced block.

    Attributes:
        line: of its first line of content, counted from 1.
        info: what stands behind the fence: ``"python"``, ``"text"``, ``"yaml title=..."``.
        content: its lines, without the indentation of the fence.
        no_run: ``<!-- no-run: REASON -->`` stands before it.
    """

    line: int
    info: str
    content: str
    no_run: bool

    @property
    def language(self) -> str:
        """The word that names the language; ``""`` if there is none."""
        found = re.match(r"\{? *\.?([\w+-]+)", self.info)
        return found[1] if found else ""

    @property
    def included(self) -> bool:
        """Whether it only includes other files, which have tests of their own."""
        return all(not line or line.startswith("--8<--") for line in self.content.split("\n"))


def pages(language: str) -> list[Path]:
    """All pages of a language, relative to its folder."""
    folder = SITE / language
    return sorted(path.relative_to(folder) for path in folder.rglob("*.md"))


def blocks(text: str) -> list[Block]:
    """The fenced blocks of a page, in order.

    Raises:
        ValueError: a block that does not end.
    """
    found: list[Block] = []
    lines = text.split("\n")
    position, before = 0, ""
    while position < len(lines):
        start = _FENCE.match(lines[position])
        if start is None:
            before = lines[position].strip() or before
            position += 1
            continue
        begin = position = position + 1
        end = re.compile(rf"^ *{re.escape(start['fence'][0])}{{{len(start['fence'])},}} *$")
        while position < len(lines) and not end.match(lines[position]):
            position += 1
        if position == len(lines):
            raise ValueError(f"the block that begins in line {begin} does not end")
        content = "\n".join(line.removeprefix(start["indent"]) for line in lines[begin:position])
        found.append(Block(begin + 1, start["info"].strip(), content, bool(_MARK.match(before))))
        position += 1
        before = ""
    return found
