"""Reading the bank's TOML files strictly: what is missing, unknown or of the wrong kind is named with its place."""

from __future__ import annotations

import re
import sys
import unicodedata
from collections import Counter
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from lightning_remat.errors import RematError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

LANGUAGES = ("en", "es", "hi")

Text: TypeAlias = dict[str, str]
"""A text by language: one entry for each of :data:`LANGUAGES`."""

ID = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")
_TURNS = "\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"  # the direction of writing
_NUMBER = re.compile(r"[0-9]+(?:[.,][0-9]+)*")
_T = TypeVar("_T")


class BankError(RematError, ValueError):
    """The bank of questions is not as it must be; nothing was loaded.

    Attributes:
        file: name of the file.
        question: id of the question, or its place (``"2."``) where it has none; None: not in a question.
        field: the key, with those it lies in (``"choice 2: why.hi"``).
        problem: what is wrong with it.
    """

    def __init__(self, file: str, question: str | None, field: str, problem: str) -> None:
        places = [f"{file}", f"question {question}" if question else "", field]
        super().__init__(f"{', '.join(place for place in places if place)}: {problem}")
        self.file, self.question, self.field, self.problem = file, question, field, problem

    def __reduce__(self) -> tuple[type[BankError], tuple[str, str | None, str, str]]:
        """By its parts: errors travel between processes."""
        return type(self), (self.file, self.question, self.field, self.problem)


def read_toml(path: Path) -> Table:
    """Read a file whose every key has to be asked for.

    Raises:
        BankError: If it is not there, or is not TOML in UTF-8.
    """
    try:
        return Table(tomllib.loads(path.read_text(encoding="utf-8")), path.name)
    except OSError as error:
        raise BankError(path.name, None, "", f"cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:  # TOMLDecodeError and UnicodeDecodeError are the first
        raise BankError(path.name, None, "", f"is not TOML in UTF-8: {error}") from error


class Table:
    """A table of a TOML file. What is not taken out of it by name is refused by :meth:`done`.

    Args:
        content: what was read.
        file: name of the file.
        question: the question that it is, or lies in.
        inside: where in the file or question the table lies.
    """

    def __init__(self, content: dict[str, Any], file: str, question: str | None = None, inside: str = "") -> None:
        self.file, self.question, self.inside = file, question, inside
        self._content = dict(content)

    def error(self, field: str, problem: str) -> BankError:
        """What to raise about a key of this table."""
        return BankError(self.file, self.question, ": ".join(part for part in (self.inside, field) if part), problem)

    def __contains__(self, key: str) -> bool:
        return key in self._content

    def left(self) -> list[str]:
        """What has not been taken yet."""
        return list(self._content)

    def take(self, key: str, kind: type[_T]) -> _T:
        """The value of a key that must be there."""
        if key not in self._content:
            raise self.error(key, "is missing")
        value = self._content.pop(key)
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is int):
            raise self.error(key, f"is {value!r}, which is not of the type {_type_name(kind)}")
        return value

    def take_or_none(self, key: str, kind: type[_T]) -> _T | None:
        """The value of a key that need not be there."""
        return self.take(key, kind) if key in self._content else None

    def identifier(self, key: str) -> str:
        """Lower-case ASCII words joined by ``-``."""
        return self._identifier(key, self.take(key, str))

    def identifiers(self, key: str) -> list[str]:
        """Some, each of them once, at least one."""
        found = [self._identifier(key, value) for value in self.take(key, list)]
        if not found or len(set(found)) < len(found):
            raise self.error(key, f"is {found!r}, but must name one at least, and none twice")
        return found

    def integers(self, key: str, length: int) -> list[int]:
        """So many integers."""
        found = self.take(key, list)
        if len(found) != length or not all(type(value) is int for value in found):
            raise self.error(key, f"is {found!r}, but must be {length} integers")
        return found

    def python(self, key: str) -> str | None:
        """Python code that compiles, if it is there, with one line break at its end."""
        code = self.take_or_none(key, str)
        if code is None:
            return None
        try:
            compile(code, f"<{self.question} {key}>", "exec")
        except (SyntaxError, ValueError) as error:
            raise self.error(key, f"is not Python: {error}") from error
        return code.strip("\n") + "\n"

    def text(self, key: str) -> Text:
        """One line in every language, with the same numbers in each."""
        value = self._content.pop(key, None)
        if value is None:
            raise self.error(key, "is missing")
        if not isinstance(value, dict):
            raise self.error(key, f"is {value!r}, but must be a text for each of {', '.join(LANGUAGES)}")
        for language in value.keys() - set(LANGUAGES):
            raise self.error(f"{key}.{language}", f"is not known; the languages are {', '.join(LANGUAGES)}")
        for language in LANGUAGES:
            if language not in value:
                raise self.error(f"{key}.{language}", "is missing")
            self._check_line(f"{key}.{language}", value[language])
        first, *others = LANGUAGES
        for language in others:
            here, there = (sorted(Counter(_NUMBER.findall(value[one])).elements()) for one in (first, language))
            if here != there:
                raise self.error(f"{key}.{language}", f"has the numbers {there}, while {key}.{first} has {here}")
        return {language: value[language] for language in LANGUAGES}

    def tables(self, key: str) -> list[Table]:
        """An array of tables; empty, where the key is not there."""
        found = self.take_or_none(key, list) or []
        for number, value in enumerate(found, 1):
            if not isinstance(value, dict):
                raise self.error(f"{key} {number}", f"is {value!r}, which is no table")
        return [
            Table(value, self.file, self.question, ": ".join(part for part in (self.inside, f"{key} {number}") if part))
            for number, value in enumerate(found, 1)
        ]

    def done(self) -> None:
        """Refuse what was not taken."""
        for key in self._content:
            raise self.error(key, "is not known here")

    def _identifier(self, key: str, value: Any) -> str:
        if not isinstance(value, str) or not ID.fullmatch(value):
            raise self.error(key, f"is {value!r}, but must be lower-case ASCII letters and digits in words joined by -")
        return value

    def _check_line(self, field: str, line: Any) -> None:
        if not isinstance(line, str):
            raise self.error(field, f"is {line!r}, which is no text")
        if not line or line != line.strip() or len(line.splitlines()) > 1:
            raise self.error(field, f"is {line!r}, but must be one line, without space at its ends")
        if not unicodedata.is_normalized("NFC", line):
            raise self.error(field, "is not in Unicode's normal form NFC")
        if hidden := [char for char in line if unicodedata.category(char) in ("Cc", "Cn", "Co") or char in _TURNS]:
            raise self.error(field, f"has the characters {hidden}, which no page can show")
        if strange := [char for char in line if char.isdigit() and not char.isascii()]:
            raise self.error(field, f"has the digits {strange}; numbers are written with 0 to 9")
        if line.count("`") % 2:
            raise self.error(field, "has a ` without its partner")


def _type_name(kind: type) -> str:
    return {str: "string", int: "integer", list: "array", bool: "boolean", dict: "table"}.get(kind, kind.__name__)
