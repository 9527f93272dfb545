"""Pictures by name: ``figure:NAME`` is a plot of docs/results/figures or a diagram of docs/diagrams."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from html import escape
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_WORD = re.compile(r"\{\{\s*([\w.-]+)\s*\}\}")


class UnknownPicture(LookupError):
    """A picture that is not there, or has no words in a language; it says which."""


class Pictures:
    """Plots and diagrams.

    Args:
        plots: folder of ``NAME.LANGUAGE.svg``.
        diagrams: folder of ``NAME.svg``, with ``{{word}}`` where text stands, and of ``words.toml`` with those words:
            a table for each diagram, and ``all`` for what they share, from word to text by language.
    """

    def __init__(self, plots: Path, diagrams: Path) -> None:
        self._plots = plots
        self._diagrams = diagrams
        self._words: Mapping[str, Mapping[str, Mapping[str, str]]] | None = None

    def svg(self, name: str, language: str) -> bytes:
        """The picture as a file.

        Raises:
            UnknownPicture: there is none, or it lacks a word.
        """
        plot, diagram = self._plots / f"{name}.{language}.svg", self._diagrams / f"{name}.svg"
        if plot.is_file():
            return plot.read_bytes()
        if not diagram.is_file():
            raise UnknownPicture(f"neither {plot.name} in docs/results/figures nor {diagram.name} in docs/diagrams")
        return self._with_words(name, diagram.read_text(encoding="utf-8"), language).encode()

    def _with_words(self, name: str, svg: str, language: str) -> str:
        if self._words is None:
            path = self._diagrams / "words.toml"
            try:
                self._words = tomllib.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
            except ValueError as error:
                raise UnknownPicture(f"docs/diagrams/words.toml cannot be read: {error}") from error
        words = {**self._words.get("all", {}), **self._words.get(name, {})}

        def text(match: re.Match[str]) -> str:
            try:
                return escape(words[match[1]][language])
            except KeyError as error:
                raise UnknownPicture(
                    f"docs/diagrams/words.toml has no {language!r} for the word {match[1]!r} of the diagram {name!r}"
                ) from error

        return _WORD.sub(text, svg)
