"""Search finds what a reader of each language types, from a server and from a disk, and gives no answer away."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from lightning_remat.quiz.bank import LANGUAGES
from tests.docs.browser.conftest import Visitor
from tests.docs.browser.learner import bank
from tests.docs.browser.test_site import start

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = pytest.mark.browser

# What is typed, and a page that is to be among the first three: names, terms in the singular, the beginning of a word,
# Spanish with and without accents, Devanagari.
TERMS = {
    "en": {
        "offload": "tutorials/offload.html",
        "polic": "tutorials/policies.html",
        "recomputation": "guide.html",
        "budgets": "tutorials/budget.html",
        "print_kept": "tutorials/kept.html",
        "lightningcli": "howto/yaml.html",
        "out of memory": "tutorials/out-of-memory.html",
        "OOM": "tutorials/out-of-memory.html",
        "CUDA out of memory": "tutorials/out-of-memory.html",
    },
    "es": {
        "recálculo": "guide.html",
        "recalculo": "guide.html",
        "política": "tutorials/policies.html",
        "politica": "tutorials/policies.html",
        "políticas": "tutorials/policies.html",
        "politicas": "tutorials/policies.html",
        "presupuesto": "tutorials/budget.html",
        "presupuestos": "tutorials/budget.html",
        "descarga": "tutorials/offload.html",
        "print_kept": "tutorials/kept.html",
        "OOM": "tutorials/out-of-memory.html",
        "CUDA out of memory": "tutorials/out-of-memory.html",
    },
    "hi": {
        "पुनर्गणना": "guide.html",
        "मेमोरी": "tutorials/out-of-memory.html",
        "बजट": "tutorials/budget.html",
        "पॉलिसी": "tutorials/policies.html",
        "ऑफलोड": "tutorials/offload.html",
        "print_kept": "tutorials/kept.html",
        "OOM": "tutorials/out-of-memory.html",
        "CUDA out of memory": "tutorials/out-of-memory.html",
    },
}
RESULTS = ".md-search-result__item > .md-search-result__link"


def search(page: Page, root: str, words: str) -> list[str]:
    """The pages that are found, best first."""
    query = page.locator("[data-md-component=search-query]")
    query.click()
    query.fill("")
    query.press("Backspace")  # the search listens to keys
    page.wait_for_function("selector => !document.querySelector(selector)", arg=RESULTS)
    query.fill(words)
    query.press("End")
    page.locator(RESULTS).first.wait_for()
    links: list[str] = page.locator(RESULTS).evaluate_all("links => links.map((link) => link.href)")
    return list(dict.fromkeys(link.removeprefix(root).split("?")[0].split("#")[0] for link in links))


@pytest.mark.parametrize("language", LANGUAGES)
def test_what_is_typed_is_found(visit: Visitor, base: str, language: str) -> None:
    root = start(base, language)
    page = visit(f"{root}howto/slow.html", search=True)
    quizzes = {f"quiz/{topic.id}.html" for topic in bank().topics}
    wrong = []
    for words, expected in TERMS[language].items():
        found = search(page, root, words)
        if expected not in found[:3]:
            wrong.append(f"{words}: {expected} is not among {found[:3]}")
        if given_away := quizzes & set(found):
            wrong.append(f"{words}: {given_away}")
    assert not wrong, "\n".join(wrong)


PLURALS = {
    "en": {"policies": "policy", "budgets": "budget", "tapes": "tape", "steps": "step", "batches": "batch"},
    "es": {"pasos": "paso", "políticas": "política", "veces": "vez", "opciones": "opción", "redes": "red"},
}


def index(site: Path, language: str) -> list[dict[str, str]]:
    """What is searched."""
    text = (Path(start(f"{site}/", language)) / "search/search_index.js").read_text(encoding="utf-8")
    documents: list[dict[str, str]] = json.loads(text[text.index("{") :].rstrip(";\n"))["docs"]
    return documents


@pytest.mark.parametrize("language", PLURALS)
def test_a_plural_finds_the_singular(visit: Visitor, base: str, site: Path, language: str) -> None:
    """Every page that has one of the two, of which some have the singular alone."""
    root = start(base, language)
    page = visit(f"{root}howto/slow.html", search=True)
    words: dict[str, set[str]] = {}
    for document in index(site, language):
        for word in re.findall(
            r"[\w'\u2019]+", re.sub(r"<[^>]*>", " ", f"{document['title']} {document['text']}").lower()
        ):
            words.setdefault(word, set()).add(document["location"].split("#")[0])
    for several, one in PLURALS[language].items():
        assert words[one] - words.get(several, set()), f"{one} never stands alone: take another word"
        search(page, root, several)
        number = re.search(r"\d+", page.locator(".md-search-result__meta").inner_text())
        assert number is not None
        assert int(number[0]) >= len(words[one] | words.get(several, set())), several


@pytest.mark.parametrize("language", LANGUAGES)
def test_a_result_is_opened_by_keyboard(visit: Visitor, base: str, language: str) -> None:
    root = start(base, language)
    words, expected = next(iter(TERMS[language].items()))
    page = visit(f"{root}index.html", search=True)
    assert search(page, root, words)[0] == expected
    page.keyboard.press("Enter")
    page.wait_for_url(f"{root}{expected}*")


@pytest.mark.parametrize("language", LANGUAGES)
def test_the_index_has_no_question_of_the_quiz(site: Path, language: str) -> None:
    pages = {document["location"].split("#")[0] for document in index(site, language)}
    assert "guide.html" in pages
    assert not pages & {f"quiz/{topic.id}.html" for topic in bank().topics}


def test_the_reference_has_a_search_of_its_own(visit: Visitor, base: str) -> None:
    page = visit(f"{base}api/index.html")
    page.locator("input.sidebar-search").fill("print_kept")
    page.keyboard.press("Enter")
    page.wait_for_url(f"{base}api/search.html?q=print_kept*")
    page.locator('#search-results a[href*="kept.html#lightning_remat.print_kept"]').click()
    page.wait_for_url(f"{base}api/kept.html*")
