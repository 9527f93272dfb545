"""The words of the interface are complete, and what is filled in is the same in every language."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_remat.quiz.bank import BankError
from lightning_remat.quiz.certificate import _MESSAGES
from lightning_remat.quiz.reading import LANGUAGES
from lightning_remat.quiz.words import SCREENS, load_words, words

GOOD = "".join(f"[{screen}]\n" for screen in SCREENS[:-1]) + (
    '[statistics]\na_word.en = "{n} of {of}"\na_word.es = "{n} de {of}"\na_word.hi = "{of} में से {n}"\n'
)


def test_all_words_are_there() -> None:
    """A text that is the same in two languages is a technical term, or was forgotten."""
    for screen, found in load_words().items():
        for key, text in found.items():
            assert text["en"] == "ID" or len(set(text.values())) == 3, f"{screen}.{key}"
    for code in _MESSAGES:
        assert f"error_{code}" in words("verify", "en")


def test_what_is_filled_in() -> None:
    for language in LANGUAGES:
        said = words("shared", language).say("counts", answered=1, of=2, right="{of}")
        assert "{of}" in said
        assert "1" in said
    with pytest.raises(KeyError, match="answered"):
        words("shared", "en").say("counts")
    assert words("terminal", "es")["right"] == words("shared", "es")["right"]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            'a_word.es = "{n} de {of}"',
            'a_word.es = "{n} de {o}"',
            r"^words.toml, statistics: a_word.es: has the places",
        ),
        ('a_word.es = "{n} de {of}"', 'a_word.es = "{n} de {of} {"', r"a_word.es: has a brace"),
        ('a_word.es = "{n} de {of}"', "", r"a_word.es: is missing"),
        ('a_word.es = "{n} de {of}"', 'a_word.es = "{n} de {of}"\nB.en = "x"', r"B: must be lower-case"),
        ("[quiz]", "", r"quiz: is missing"),
        ("[quiz]", "[quiz]\n[more]", r"^words.toml, more: is not known here"),
    ],
)
def test_what_is_refused(tmp_path: Path, old: str, new: str, message: str) -> None:
    (tmp_path / "words.toml").write_text(GOOD, encoding="utf-8")
    assert words("statistics", "hi", tmp_path).say("a_word", n=1, of=2) == "2 में से 1"
    (tmp_path / "words.toml").write_text(GOOD.replace(old, new, 1), encoding="utf-8")
    with pytest.raises(BankError, match=message):
        load_words(tmp_path)
