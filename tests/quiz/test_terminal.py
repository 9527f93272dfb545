"""What is typed is understood or asked for again, and what is shown needs no colours."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from lightning_remat.quiz.bank import load_bank
from lightning_remat.quiz.terminal import Terminal, understood
from lightning_remat.quiz.words import words

BANK = load_bank(Path(__file__).parent / "tiny")


@pytest.mark.parametrize(
    ("question", "text", "answer"),
    [
        ("a-vowel", "a", "a"),
        ("a-vowel", " B) ", "b"),
        ("a-vowel", "3", "c"),
        ("a-vowel", "४", None),
        ("a-vowel", "d", None),
        ("a-vowel", "ab", None),
        ("a-vowel", "a b", None),
        ("a-vowel", "", None),
        ("which-are-even", "a c", ("two", "four")),
        ("which-are-even", "c,a", ("two", "four")),
        ("which-are-even", "CA", ("two", "four")),
        ("which-are-even", "1 3", ("two", "four")),
        ("which-are-even", "a a", ("two",)),
        ("which-are-even", "a d", None),
        ("which-are-even", " , ", None),
        ("two-and-two", " 4 ", 4),
        ("two-and-two", "+4", 4),
        ("two-and-two", "४", 4),
        ("two-and-two", "4.0", None),
        ("two-and-two", "1_0", None),
        ("two-and-two", "11", None),
        ("two-and-two", "-1", None),
        ("two-and-two", "9" * 5000, None),
        ("how-long", "-4", -4),
        ("how-long", "\N{MINUS SIGN}4", -4),
    ],
)
def test_what_is_typed(question: str, text: str, answer: Any) -> None:
    assert understood(BANK.question(question), text) == answer


def test_colours_add_and_mean_nothing() -> None:
    """With colours, at any width, the words are the same; without, no control characters are written at all."""
    shown = []
    for options in (
        {"force_terminal": True, "color_system": "truecolor", "width": 80},
        {"force_terminal": False, "width": 80},
        {"force_terminal": False, "width": 40},
    ):
        file = io.StringIO()
        console = Console(file=file, legacy_windows=False, **options)
        answers = iter(["b", "b", "a", "4"])
        shell = Terminal(console, words("terminal", "en"), "en", str, lambda prompt, answers=answers: next(answers))
        for question in (BANK.question("a-vowel"), BANK.question("what-it-prints")):
            shell.marked(question.prompt["en"])
            shell.feedback(question, shell.answer(question))
        shell._code("x = [1, 2]\n\ny = 'a longer line, which does not fit into 40 columns'\n")
        shell.marked("**Strong**, *weak*, a * b * c, `x*y*z` and ``a`b``")
        shown.append(file.getvalue())
    assert "\x1b[" in shown[0]
    bare = re.sub(r"\x1b\[[0-9;]*m", "", shown[0])
    assert "\x1b" not in shown[1] + shown[2]
    assert bare.replace("`", "").split() == shown[1].replace("`", "").split() == shown[2].replace("`", "").split()
    assert "Strong, weak, a * b * c, `x*y*z` and ``a`b``\n" in shown[1]
    # Code can be copied: its lines are broken by the terminal and by nobody else.
    assert "    y = 'a longer line, which does not fit into 40 columns'\n" in shown[2]
    assert max(len(line) for line in shown[1].splitlines()) <= 80
