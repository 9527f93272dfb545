"""What is right, and what an exam is graded by."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lightning_remat.quiz.bank import load_bank
from lightning_remat.quiz.grading import Core, grade, is_right

TINY = Path(__file__).parent / "tiny"


@pytest.mark.parametrize(
    ("question", "answer", "right"),
    [
        ("two-and-two", 4, True),
        ("two-and-two", 5, False),
        ("two-and-two", "4", False),
        ("two-and-two", True, False),
        ("a-vowel", "a", True),
        ("a-vowel", "b", False),
        ("a-vowel", ("a",), False),
        ("which-are-even", ("two", "four"), True),
        ("which-are-even", ["four", "two"], True),
        ("which-are-even", {"two"}, False),
        ("which-are-even", ("two", "three", "four"), False),
        ("which-are-even", (), False),
        ("which-are-even", "two", False),
        ("which-are-even", 2, False),
    ],
)
def test_is_right(question: str, answer: Any, right: bool) -> None:
    assert is_right(load_bank(TINY).question(question), answer) is right


def test_the_pass_mark_is_reached_to_the_point() -> None:
    """4 of 5 are 80 percent; what is not answered is not right."""
    exam = load_bank(TINY).exam("all")
    answers = {question.id: question.answer for question in exam.questions if question.answer is not None}
    assert grade(exam, answers).passed
    assert grade(exam, answers).right == tuple(answers)
    del answers["a-vowel"]
    assert grade(exam, answers).passed
    assert (len(grade(exam, answers).right), grade(exam, answers).of) == (4, 5)
    answers["how-long"] = 2
    assert not grade(exam, answers).passed
    assert not grade(exam, {}).passed


def test_words_do_not_count() -> None:
    """A certificate stays valid when a text is changed, and not when an answer is."""
    exam = load_bank(TINY).exam("first")
    first, *others = exam.questions
    digest = Core.of(exam).digest
    for same in ({"prompt": {"en": "x"}}, {"near": ()}, {"check": None}, {"explained": "x.md#y"}):
        assert Core.of(replace(exam, questions=(replace(first, **same), *others))).digest == digest
    for other in ({"answer": 3}, {"range": (0, 11)}, {"id": "x"}):
        assert Core.of(replace(exam, questions=(replace(first, **other), *others))).digest != digest
    assert Core.of(replace(exam, questions=(*others, first))).digest != digest
    assert Core.of(replace(exam, pass_mark=50)).digest != digest


def test_without_answers_nothing_is_graded() -> None:
    exam = load_bank(TINY, answers=False).exam("first")
    with pytest.raises(ValueError, match=r"'what-it-prints' was not loaded: load_bank\(answers=True\)"):
        Core.of(exam)
    with pytest.raises(ValueError, match="'what-it-prints' was not loaded"):
        is_right(exam.questions[1], "doubled")
