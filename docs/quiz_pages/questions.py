"""The pages of the quiz: one for each topic, and the overview."""

from __future__ import annotations

from lightning_remat.quiz.bank import Question

from .text import bank, explained_title, render

OVERVIEW = "index"
"""What stands in the place of a topic for the overview over all of them."""


def quiz_html(topic: str, lang: str) -> str:
    """The questions of a topic, or the overview (``"index"``), for a page in the folder ``quiz/``.

    Raises:
        KeyError: If there is no such topic.
    """
    if topic == OVERVIEW:
        return render("overview.html", lang)
    if topic not in (known := [one.id for one in bank().topics]):
        raise KeyError(f"the quiz has no topic {topic!r}; it has {', '.join(known)}, and {OVERVIEW} for all of them")
    found = bank().topic(topic)
    titles = {question.id: explained_title(question, lang) for question in found.questions}
    return render("topic.html", lang, topic=found, titles=titles, is_right=is_right)


def is_right(question: Question, choice: str) -> bool:
    """Whether a choice is the right one, or one of them."""
    return choice in question.answer if isinstance(question.answer, tuple) else choice == question.answer
