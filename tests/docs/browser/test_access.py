"""The site for everybody: axe finds nothing serious; the quiz's pages work on phones and with zoom, too."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_remat.quiz.bank import LANGUAGES
from tests.docs.browser.conftest import Visitor
from tests.docs.browser.learner import bank, check, of_kind, record, say, wrong

pytestmark = pytest.mark.browser


# One page of each kind: start, tutorial, plots, how-to with a table, errors as headings, guide, diagrams, comparison.
KINDS = (
    "index",
    "tutorials/kept",
    "tutorials/policies",
    "howto/choose",
    "howto/troubleshooting",
    "guide",
    "how/tape",
    "comparison",
)
MODERATE = (
    "heading-order",
    "landmark-banner-is-top-level",
    "landmark-complementary-is-top-level",
    "landmark-contentinfo-is-top-level",
    "landmark-main-is-top-level",
    "landmark-no-duplicate-banner",
    "landmark-no-duplicate-contentinfo",
    "landmark-no-duplicate-main",
    "landmark-one-main",
    "landmark-unique",
    "page-has-heading-one",
    "region",
)
REFERENCE = ("api/index", "api/remat", "api/command-line", "api/search", "api/dev/index", "api/dev/planning")


def serious(page: Any, where: str) -> list[str]:
    """What axe finds on a page."""
    from axe_playwright_python.sync_playwright import Axe

    found = []
    # What is no fault is not described in full, and rules that never find more than something moderate are left out.
    options = {"resultTypes": ["violations"], "rules": {rule: {"enabled": False} for rule in MODERATE}}
    for fault in Axe().run(page, options=options).response["violations"]:
        if fault["impact"] in ("serious", "critical"):
            nodes = "; ".join(node["html"] for node in fault["nodes"][:3])
            found.append(f"{where}: {fault['id']}: {fault['help']}: {nodes}")
    return found


def test_axe_finds_what_is_wrong(visit: Visitor, served: str) -> None:
    """Else the other tests would say nothing."""
    page = visit(f"{served}quiz/{of_kind('number').topic}.html")
    assert not serious(page, "as it is")
    page.evaluate("""() => {
        document.querySelector("main h1").style.color = "#eee";
        document.querySelector("main p").append(document.createElement("button"), document.createElement("input"));
        document.documentElement.lang = "klingon";
    }""")
    found = "\n".join(serious(page, "spoilt"))
    for rule in ("label", "color-contrast", "button-name", "html-lang-valid"):
        assert f": {rule}: " in found


def learn(page: Any, root: str) -> str:
    """Answer everything rightly, make a certificate, and return the link to verify it."""
    page.goto(f"{root}quiz/certificate.html")
    record(page, bank().questions)
    course = page.locator('[data-exam="course"]')
    course.locator("form input").fill("आशा शर्मा")
    course.locator("form button").click()
    return str(course.locator('[data-rq="link"]').input_value())


# Each language and each scheme; a fault that is only in one language in one scheme would be a strange one.
@pytest.mark.parametrize(("language", "scheme"), [("en", "light"), ("es", "dark"), ("hi", "dark")])
def test_axe_finds_nothing_serious_in_the_quiz(visit: Visitor, served: str, language: str, scheme: str) -> None:
    root = served if language == "en" else f"{served}{language}/"
    page = visit.context(color_scheme=scheme, reduced_motion="reduce").new_page()
    found: list[str] = []

    def look(where: str) -> None:
        found.extend(serious(page, where))

    for kind in ("single", "several", "number"):
        question = of_kind(kind)
        page.goto(f"{root}quiz/{question.topic}.html")
        check(page, question, wrong(question))
        page.locator(f'[data-question="{question.id}"] .rq-more').click()
        others = [other for other in bank().topic(question.topic).questions if other is not question]
        # One is left as it is found, but for the last kind: there the end of a topic is seen.
        record(page, others if kind == "number" else others[1:])
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
def test_nothing_is_wider_than_the_screen(visit: Visitor, served: str, language: str) -> None:
    """A small phone, a phone, and 1280 pixels at 200 %."""
    root = served if language == "en" else f"{served}{language}/"
    page = visit.context(viewport={"width": 320, "height": 720}).new_page()
    link = learn(page, root)
    wide = []
    pages = [f"{root}quiz/{topic.id}.html" for topic in bank().topics]
    for address in [f"{root}quiz/index.html", *pages, f"{root}quiz/certificate.html", link, f"{root}faq.html"]:
        page.goto(address)
        page.evaluate("document.querySelectorAll('main details').forEach((one) => (one.open = true))")
        for width in (640, 390, 320):
            page.set_viewport_size({"width": width, "height": 720})
            if page.evaluate("document.documentElement.scrollWidth > document.documentElement.clientWidth"):
                wide.append(f"{address} at {width}")
    assert not wide


@pytest.mark.parametrize(
    ("part", "scheme", "width"),
    [("en", "light", 1280), ("es", "light", 360), ("hi", "dark", 360), ("api", "light", 1280), ("api", "dark", 360)],
)
def test_axe_finds_nothing_serious_on_a_page_of_each_kind(
    visit: Visitor, served: str, part: str, scheme: str, width: int
) -> None:
    viewport = {"width": width, "height": 740}
    page = visit.context(color_scheme=scheme, reduced_motion="reduce", viewport=viewport).new_page()
    found = []
    for path in REFERENCE if part == "api" else KINDS:
        page.goto(f"{served}{'' if part in ('en', 'api') else f'{part}/'}{path}.html")
        found += serious(page, path)
    assert not found, "\n".join(found)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_serious_in_what_opens(visit: Visitor, served: str, scheme: str) -> None:
    page = visit.context(search=True, color_scheme=scheme, reduced_motion="reduce").new_page()
    page.goto(f"{served}hi/guide.html")
    page.locator(".md-select button").hover()
    found = serious(page, "languages")
    page.locator("[data-md-component=search-query]").click()
    page.locator("[data-md-component=search-query]").press_sequentially("offload")
    page.locator(".md-search-result__item").first.wait_for()
    found += serious(page, "search")
    page.set_viewport_size({"width": 360, "height": 740})
    page.goto(f"{served}hi/howto/choose.html")
    page.locator("label.md-header__button[for=__drawer]").click()
    found += serious(page, "menu")
    assert not found, "\n".join(found)
