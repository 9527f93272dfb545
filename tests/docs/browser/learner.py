"""What a learner does on a page of the quiz, and what the bank knows about it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import cache
from typing import TYPE_CHECKING

from lightning_remat.quiz.bank import Answer, Bank, Question, load_bank
from lightning_remat.quiz.words import Words, words

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

KEY = "lightning-remat.quiz.1"


@cache
def bank() -> Bank:
    """Read when a test runs, so that what is wrong in it fails there and not where tests are collected."""
    return load_bank()


@cache
def say(language: str = "en") -> Words:
    """The words of the pages."""
    return Words({**words("verify", language), **words("quiz", language)})


def of_kind(kind: str) -> Question:
    """The first question of a kind."""
    return next(question for question in bank().questions if question.kind == kind)


def wrong(question: Question) -> Answer:
    """An answer that can be given and is not right."""
    assert question.answer is not None
    if question.kind == "number":
        assert question.range is not None
        known = {near.value for near in question.near} | {question.answer}
        return next(n for n in range(question.range[0], question.range[1] + 1) if n not in known)
    if question.kind == "single":
        return next(choice.id for choice in question.choices if choice.id != question.answer)
    assert isinstance(question.answer, tuple)
    return next((choice.id,) for choice in question.choices if (choice.id,) != question.answer)


def form(page: Page, question: Question) -> Locator:
    """The question on its page."""
    return page.locator(f'[data-question="{question.id}"]')


def choose(page: Page, question: Question, answer: Answer | Iterable[str]) -> None:
    """Put an answer into the controls, with the mouse, and do not check it."""
    here = form(page, question)
    if question.kind == "number":
        here.locator("input").fill(str(answer))
        return
    chosen = {answer} if isinstance(answer, str) else set(answer)  # type: ignore[arg-type]  # no number: see above
    for choice in question.choices:
        control = here.locator(f'input[value="{choice.id}"]')
        if question.kind == "single":
            if choice.id in chosen:
                control.check()
        else:
            control.set_checked(choice.id in chosen)


def check(page: Page, question: Question, answer: Answer | None = None) -> str:
    """Choose and check an answer (None: the right one), and return what is said about it."""
    given = question.answer if answer is None else answer
    assert given is not None
    choose(page, question, given)
    form(page, question).locator('button[type="submit"]').click()
    return feedback(page, question)


def record(page: Page, questions: Iterable[Question]) -> None:
    """Answer them rightly without the mouse, which other tests use: as if another tab had."""
    given = {one.id: list(one.answer) if isinstance(one.answer, tuple) else one.answer for one in questions}
    page.evaluate("given => Object.entries(given).forEach(([id, a]) => rematQuiz.progress.record(id, a))", given)


def feedback(page: Page, question: Question) -> str:
    """What is said about an answer; empty, where nothing is."""
    return form(page, question).locator('[data-rq="feedback"]').inner_text().strip()


def progress(page: Page) -> str:
    """What is said about how far one is."""
    return page.locator('[data-rq="progress-text"]').inner_text()


def stored(page: Page) -> dict[str, dict[str, object]]:
    """What the browser keeps: question -> digest, first and last answer."""
    text = page.evaluate(f"localStorage.getItem({KEY!r})")
    answers: dict[str, dict[str, object]] = json.loads(text)["answers"] if text else {}
    return answers


def plain(markdown: str) -> str:
    """Inline Markdown as it is read."""
    return markdown.replace("`", "").replace("*", "")
