"""The quiz's pages for everybody: axe finds nothing serious, phones need not scroll sideways, zoom works."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_remat.quiz.bank import LANGUAGES
from tests.docs.browser.conftest import Visitor
from tests.docs.browser.learner import bank, check, of_kind, say, wrong

pytestmark = pytest.mark.browser


def learn(page: Any, root: str) -> str:
    """Answer everything rightly, make a certificate, and return the link to verify it."""
    page.goto(f"{root}quiz/certificate.html")
    page.evaluate("rematQuiz.progress.all().forEach(q => rematQuiz.progress.record(q.id, q.answer))")
    course = page.locator('[data-exam="course"]')
    course.locator("form input").fill("आशा शर्मा")
    course.locator("form button").click()
    return str(course.locator('[data-rq="link"]').input_value())


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("language", LANGUAGES)
def test_axe_finds_nothing_serious(visit: Visitor, served: str, language: str, scheme: str) -> None:
    from axe_playwright_python.sync_playwright import Axe

    root = served if language == "en" else f"{served}{language}/"
    page = visit.context(color_scheme=scheme, reduced_motion="reduce").new_page()
    found: list[str] = []

    def look(where: str) -> None:
        for fault in Axe().run(page).response["violations"]:
            if fault["impact"] in ("serious", "critical"):
                nodes = "; ".join(node["html"] for node in fault["nodes"][:3])
                found.append(f"{where}: {fault['id']}: {fault['help']}: {nodes}")

    for kind in ("single", "several", "number"):
        question = of_kind(kind)
        page.goto(f"{root}quiz/{question.topic}.html")
        look(f"{question.topic}, new")
        check(page, question, wrong(question))
        page.locator(f'[data-question="{question.id}"] .rq-more').click()
        for other in bank().topic(question.topic).questions:
            if other is not question:
                check(page, other)
        look(f"{question.topic}, answered")
    page.get_by_role("button", name=say(language)["start_over"]).click()
    look("dialog")
    for path in ("quiz/index", "faq"):
        page.goto(f"{root}{path}.html")
        look(path)
    page.goto(f"{root}quiz/certificate.html")
    look("certificate, open")
    link = learn(page, root)
    look("certificate, made")
    page.goto(link)
    for summary in page.locator(".rq-graded summary").all():
        summary.click()
    look("verified")
    page.goto(f"{root}quiz/verify.html#id=A&signature=b&key=c")
    look("not verified")
    assert not found, "\n".join(found)


@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.parametrize("width", [320, 390, 640], ids=["small phone", "phone", "1280 at 200 %"])
def test_nothing_is_wider_than_the_screen(visit: Visitor, served: str, width: int, language: str) -> None:
    root = served if language == "en" else f"{served}{language}/"
    page = visit.context(viewport={"width": width, "height": 720}).new_page()
    link = learn(page, root)
    wide = []
    pages = [f"{root}quiz/{topic.id}.html" for topic in bank().topics]
    for address in [f"{root}quiz/index.html", *pages, f"{root}quiz/certificate.html", link, f"{root}faq.html"]:
        page.goto(address)
        for summary in page.locator("main details > summary").all():
            if summary.is_visible():
                summary.click()
        if page.evaluate("document.documentElement.scrollWidth > document.documentElement.clientWidth"):
            wide.append(address)
    assert not wide
