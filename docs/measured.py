"""Figures in the text: ``{{ tutorial_kept.total_bytes | MiB }}`` is read from docs/results/tutorial_kept.json.

So that no figure is typed by hand: scripts write those files, and a page names what it means. A figure is written the
same way in every language: ASCII digits, a point before decimals, commas between thousands, as the scripts print.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path

MARK = re.compile(r"\{\{(?P<inside>[^{}\n]*)\}\}(?P<unit>[ \u00a0]?(?:[KMG]i?B|bytes|ms|s|%)(?!\w))?")
_INSIDE = re.compile(r"\s*(?P<file>[\w-]+)\.(?P<name>[\w.-]+)\s*(?:\|\s*(?P<format>\w+)\s*)?")
_SPACE = "\u00a0"  # a figure and its unit stay on one line


class UnknownFigure(LookupError):
    """A mark that cannot be filled in; it says which and why."""


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{value!r} is no number")
    return value


def _integer(value: object) -> int:
    number = _number(value)
    if number != int(number):
        raise TypeError(f"{value!r} is no integer")
    return int(number)


def _short(number: float) -> str:
    """Three digits that count, never in powers of ten."""
    size = abs(number)
    decimals = 0 if size >= 100 else 1 if size >= 10 else 2 if size >= 1 or not size else 3
    return f"{number:,.{decimals}f}"


FORMATS: Mapping[str, Callable[[object], str]] = {
    "bytes": lambda value: f"{_integer(value):,}{_SPACE}bytes",
    "MiB": lambda value: f"{_number(value) / 2**20:,.1f}{_SPACE}MiB",
    "GiB": lambda value: f"{_number(value) / 2**30:,.2f}{_SPACE}GiB",
    "MB": lambda value: f"{_number(value) / 1e6:,.1f}{_SPACE}MB",
    "percent": lambda value: f"{_number(value) * 100:.{0 if abs(_number(value)) >= 0.1 else 1}f}{_SPACE}%",
    "ratio": lambda value: f"{_number(value):.2f}",
    "ms": lambda value: f"{_short(_number(value) * 1e3)}{_SPACE}ms",
    "s": lambda value: f"{_short(_number(value))}{_SPACE}s",
    "int": lambda value: f"{_integer(value):,}",
    "text": str,
}
"""By the name after the bar. Bytes come in as bytes, times as seconds, shares as such. Units are included."""


class Measured:
    """The figures of docs/results.

    Args:
        folder: where the ``.json`` files are, each a flat mapping from name to number or text.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[str, Mapping[str, object]] = {}

    def fill(self, text: str) -> tuple[str, list[str]]:
        """Put figures where they are named.

        Returns:
            The text, and what is wrong with it: one message for each mark that was left as it is.
        """
        faults: list[str] = []

        def figure(match: re.Match[str]) -> str:
            try:
                figure = self.figure(match["inside"])
            except UnknownFigure as error:
                faults.append(f"{match[0]}: {error}")
                return match[0]
            if match["unit"] and not figure[-1].isdigit():
                faults.append(f"{match[0]}: the figure has its unit already, {figure!r}")
            return figure + (match["unit"] or "")

        return MARK.sub(figure, text), faults

    def figure(self, mark: str) -> str:
        """What stands between the braces, as text.

        Raises:
            UnknownFigure: no such file, name or format, or a value that cannot be written in it.
        """
        parts = _INSIDE.fullmatch(mark)
        if parts is None:
            raise UnknownFigure("a figure is named like {{ tutorial_kept.total_bytes | MiB }}")
        figures = self._read(parts["file"])
        if parts["name"] not in figures:
            raise UnknownFigure(f"{parts['file']}.json has no {parts['name']!r}; it has {', '.join(sorted(figures))}")
        value, name = figures[parts["name"]], parts["format"] or "text"
        if name not in FORMATS:
            raise UnknownFigure(f"there is no format {name!r}; there are {', '.join(FORMATS)}")
        try:
            return FORMATS[name](value)
        except TypeError as error:
            raise UnknownFigure(f"{error}, as {name!r} needs it") from error

    def _read(self, name: str) -> Mapping[str, object]:
        if name not in self._files:
            path = self._folder / f"{name}.json"
            if not path.is_file():
                raise UnknownFigure(
                    f"there is no {path.name} in docs/results; `python docs/results.py {name}` makes it"
                )
            try:
                self._files[name] = json.loads(path.read_text(encoding="utf-8"))
            except ValueError as error:
                raise UnknownFigure(f"docs/results/{path.name} cannot be read: {error}") from error
        return self._files[name]
