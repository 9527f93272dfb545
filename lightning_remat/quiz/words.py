"""The words of the quiz's interface, ``words.toml``: one table for each screen, in three languages."""

from __future__ import annotations

import re
from pathlib import Path

from lightning_remat.quiz.bank import quiz_folder
from lightning_remat.quiz.reading import LANGUAGES, Table, Text, read_toml

SCREENS = ("shared", "terminal", "quiz", "certificate", "verify", "statistics")
_KEY = re.compile(r"[a-z][a-z0-9_]*")
_PLACE = re.compile(r"\{([a-z_]+)\}")


class Words(dict[str, str]):
    """The words of a screen in one language, those that all screens share included."""

    def say(self, key: str, /, **values: object) -> str:
        """With what stands in braces filled in; a ``KeyError`` where a value is missing.

        >>> Words({"counts": "{right} of {of}"}).say("counts", right=3, of="{4}")
        '3 of {4}'
        """
        return _PLACE.sub(lambda place: str(values[place[1]]), self[key])


def load_words(folder: Path | str | None = None) -> dict[str, dict[str, Text]]:
    """All words: screen -> key -> text by language.

    Args:
        folder: where ``words.toml`` is; None: the one that comes with the package.

    Raises:
        BankError: about the first thing that is wrong, with its screen and key.
        FileNotFoundError: as :func:`lightning_remat.quiz.bank.quiz_folder` does.
    """
    path = (quiz_folder() if folder is None else Path(folder)) / "words.toml"
    file = read_toml(path)
    found = {}
    for screen in SCREENS:
        table = Table(file.take(screen, dict), path.name, inside=screen)
        found[screen] = {key: _text(table, key) for key in table.left()}
    file.done()
    return found


def words(screen: str, language: str, folder: Path | str | None = None) -> Words:
    """The words of one screen in one language."""
    loaded = load_words(folder)
    return Words({key: text[language] for name in ("shared", screen) for key, text in loaded[name].items()})


def _text(table: Table, key: str) -> Text:
    if not _KEY.fullmatch(key):
        raise table.error(key, "must be lower-case ASCII letters, digits and _")
    text = table.text(key)
    places = {language: set(_PLACE.findall(text[language])) for language in LANGUAGES}
    for language in LANGUAGES:
        if places[language] != places["en"]:
            raise table.error(f"{key}.{language}", f"has the places {sorted(places[language])}, while en has others")
        if set("{}") & set(_PLACE.sub("", text[language])):
            raise table.error(f"{key}.{language}", "has a brace that is not that of a place")
    return text
