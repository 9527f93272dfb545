"""A certificate from the first answer to its verification: the same as Python makes, and honest about faults."""

from __future__ import annotations

import re
from datetime import date
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlsplit

import pytest

from lightning_remat.quiz.bank import LANGUAGES
from lightning_remat.quiz.certificate import issue, verify
from lightning_remat.quiz.picture import draw
from lightning_remat.quiz.signing import new_key, sign
from tests.docs.browser.conftest import Visitor
from tests.docs.browser.learner import bank, check, record, say, stored, wrong

pytestmark = pytest.mark.browser
HTML = "<img src=x onerror=\"document.title='pwned'\">&amp;{{id}}"
EXAM = "foundations"


def answers() -> dict[str, Any]:
    return {question.id: question.answer for question in bank().exam(EXAM).questions}


def section(page: Any) -> Any:
    return page.locator(f'[data-exam="{EXAM}"]')


def part(page: Any, name: str) -> Any:
    return section(page).locator(f'[data-rq="{name}"]')


def pass_exam(page: Any, root: str) -> None:
    """Without clicking through all questions, which another test does."""
    page.goto(f"{root}quiz/certificate.html")
    record(page, bank().exam(EXAM).questions)


def make(page: Any, name: str) -> str:
    section(page).locator("form input").fill(name)
    section(page).locator("form button").click()
    return str(part(page, "id").input_value())


def result(page: Any) -> str:
    return str(page.locator('[data-rq="result"]').inner_text())


def link_to(base: str, **fields: str) -> str:
    return f"{base}quiz/verify.html#" + "&".join(f"{name}={quote(text)}" for name, text in fields.items())


def today_or(before: date) -> set[date]:
    return {before, date.today()}  # a test may run over midnight


# ---------------------------------------------------------------------- earned


def test_earned_by_answering_and_verified(visit: Visitor, base: str) -> None:
    exam, name, began = bank().exam(EXAM), "आशा  शर्मा", date.today()
    page = visit(f"{base}hi/quiz/certificate.html")
    assert say("hi")["exam_open"] in section(page).inner_text()
    for topic in exam.topics:
        page.goto(f"{base}hi/quiz/{topic}.html")
        for question in bank().topic(topic).questions:
            assert say("hi")["verdict_right"] in check(page, question)
    page.get_by_role("link", name=say("hi")["to_certificate"], exact=True).last.click()
    page.wait_for_url("**/certificate.html")
    assert part(page, "outcome").inner_text() == say("hi")["exam_passed"]
    id = make(page, name)
    assert id in {issue(exam, answers(), name, day) for day in today_or(began)}
    assert "आशा" not in str(stored(page)), "the name is not kept"

    picture = unquote(str(part(page, "image").get_attribute("src")).partition(",")[2])
    assert picture == draw(bank(), id, name, "hi"), "the picture is the one that Python draws"
    assert "आशा शर्मा" in str(part(page, "image").get_attribute("alt"))
    assert part(page, "image").evaluate("image => image === document.activeElement")

    part(page, "open-verify").click()
    page.wait_for_url("**/verify.html#*")
    assert say("hi")["verified"] in result(page)
    assert say("hi")["name_matches"] in result(page)
    of = len(exam.questions)
    assert say("hi").say("score", right=of, of=of, percent=exam.pass_mark) in result(page)
    for question in exam.questions:
        assert page.locator(f'a[href="{question.topic}.html#{question.id}"]').count() == 1


def test_without_enough_right_first_answers_there_is_none(visit: Visitor, served: str) -> None:
    page = visit(f"{served}quiz/{bank().exam(EXAM).topics[0]}.html")
    for question in bank().exam(EXAM).questions:
        check(page, question, wrong(question))
        check(page, question)
    page.goto(f"{served}quiz/certificate.html")
    assert part(page, "outcome").inner_text() == say()["exam_failed"]
    assert not section(page).locator("form").is_visible()


def test_a_wrong_answer_is_in_the_certificate(visit: Visitor, served: str) -> None:
    exam = bank().exam(EXAM)
    missed = exam.questions[-1]
    page = visit(f"{served}quiz/{missed.topic}.html")
    check(page, missed, wrong(missed))
    check(page, missed)
    pass_exam(page, served)
    id = make(page, "Ada")
    found = verify(bank(), id)
    assert (found.right, found.passed) == (found.of - 1, True)
    page.goto(link_to(served, id=id, name="Ada"))
    graded = page.locator(".rq-graded details")
    graded.locator("summary").click()
    wrongs = graded.locator("li", has_text=say()["wrong"])
    assert wrongs.count() == 1
    assert wrongs.locator("a").get_attribute("href") == f"{missed.topic}.html#{missed.id}"


@pytest.mark.parametrize("name", ["", "   ", "\u200b\u200d"])
def test_a_name_is_needed(visit: Visitor, served: str, name: str) -> None:
    page = visit(f"{served}quiz/certificate.html")
    pass_exam(page, served)
    make(page, name)
    assert part(page, "trouble").inner_text() == say()["error_name"]
    assert not part(page, "made").is_visible()
    assert section(page).locator("form input").evaluate("input => input === document.activeElement")


def test_an_error_in_the_name_takes_the_certificate_away(visit: Visitor, served: str) -> None:
    """Of the exam that it is about, and of no other."""
    page = visit(f"{served}quiz/certificate.html")
    record(page, bank().questions)
    make(page, "Ada")
    other = page.locator('[data-exam="course"]')
    other.locator("form button").click()
    assert part(page, "made").is_visible()
    assert page.locator(".rq-sheet").count() == 1
    make(page, " ")
    assert part(page, "trouble").inner_text() == say()["error_name"]
    assert not part(page, "made").is_visible()
    assert not page.locator(".rq-sheet").count(), "nor is it printed"
    make(page, "Grace")
    assert part(page, "made").is_visible()
    assert part(page, "trouble").inner_text() == ""


def test_a_name_is_text_and_never_html(visit: Visitor, base: str) -> None:
    page = visit(f"{base}quiz/certificate.html")
    pass_exam(page, base)
    id = make(page, HTML)
    picture = unquote(str(part(page, "image").get_attribute("src")).partition(",")[2])
    assert picture == draw(bank(), id, HTML, "en")
    assert "<img" not in picture
    link = part(page, "link").input_value()
    assert parse_qs(urlsplit(link).fragment, strict_parsing=True)["name"] == [HTML]
    page.goto(link)
    assert say()["name_matches"] in result(page)
    page.goto(link_to(base, id=HTML, name=HTML, signature=HTML, key=HTML))
    assert result(page) == say()["error_mistyped"]
    assert not page.locator('img[src="x"]').count()
    assert page.title() != "pwned"


def test_starting_over_takes_a_certificate_away(visit: Visitor, served: str) -> None:
    page = visit(f"{served}quiz/certificate.html")
    pass_exam(page, served)
    make(page, "Ada")
    page.evaluate("rematQuiz.progress.forget(rematQuiz.progress.all().map(q => q.id))")
    assert not part(page, "made").is_visible()
    assert not page.locator(".rq-sheet").count()


# ---------------------------------------------------------------------- taken away


@pytest.mark.parametrize("language", LANGUAGES)
def test_paper_gets_the_certificate_and_nothing_else(visit: Visitor, base: str, language: str) -> None:
    root = base if language == "en" else f"{base}{language}/"
    page = visit(f"{root}quiz/certificate.html", color_scheme="dark")
    pass_exam(page, root)
    before = page.pdf(prefer_css_page_size=True)
    make(page, "Ada Lovelace")
    page.wait_for_function("document.querySelector('.rq-sheet img').complete")
    paper = page.pdf(prefer_css_page_size=True)
    assert len(re.findall(rb"/Type\s*/Page\b", paper)) == 1
    box = re.search(rb"/MediaBox\s*\[([\d. ]+)\]", paper)
    assert box is not None
    width, height = [float(number) for number in box[1].split()][2:]
    assert abs(width - 297 / 25.4 * 72) < 1
    assert abs(height - 210 / 25.4 * 72) < 1
    assert b"/Type /Page" in before, "the page itself can be printed, too"
    page.emulate_media(media="print")
    shown = page.evaluate("[...document.body.children].filter(one => one.checkVisibility()).map(one => one.className)")
    assert shown == ["rq-sheet"]


def test_copied_and_downloaded(visit: Visitor, base: str, tmp_path: Path) -> None:
    page = visit(f"{base}quiz/certificate.html")
    pass_exam(page, base)
    id = make(page, "Ada")
    part(page, "copy-id").click()
    page.wait_for_function("document.activeElement.matches('[data-rq=copy-id], [data-rq=id]')")
    said = part(page, "said")
    said.get_by_text(say()["copied"]).wait_for()
    section(page).locator("form input").fill("")
    section(page).locator("form input").press("Control+v")
    assert section(page).locator("form input").input_value() == id
    with page.expect_download() as download:
        part(page, "download").click()
    file = tmp_path / "certificate.svg"
    download.value.save_as(file)
    assert download.value.suggested_filename == f"lightning-remat-{EXAM}.svg"
    assert file.read_text(encoding="utf-8") == draw(bank(), id, "Ada", "en")


# ---------------------------------------------------------------------- verified


def an_id(name: str = "Ada Lovelace") -> str:
    return issue(bank().exam(EXAM), answers(), name, date(2026, 11, 29))


def test_verified_by_hand(visit: Visitor, base: str) -> None:
    page = visit(f"{base}quiz/verify.html")
    page.get_by_label(say()["id_label"]).fill(an_id().lower().replace("-", " "))
    page.keyboard.press("Enter")
    assert say()["verified"] in result(page)
    assert say()["name_not_given"] in result(page)
    assert "2026-11-29" in result(page)
    page.get_by_label(say()["verify_name_label"]).fill("  ADA lovelace ")
    assert result(page) == "", "what was said is about what stood there before"
    page.get_by_role("button", name=say()["verify"], exact=True).click()
    assert say()["name_matches"] in result(page)


@pytest.mark.parametrize("language", LANGUAGES)
def test_faults_are_named(visit: Visitor, served: str, language: str) -> None:
    root = served if language == "en" else f"{served}{language}/"
    words, id = say(language), an_id()
    page = visit(link_to(root, id=id, name="Grace Hopper"))
    assert words["name_differs"] in result(page)
    assert words["not_verified"] in result(page)
    changed = id[:20] + ("A" if id[20] != "A" else "B") + id[21:]
    page.goto(link_to(root, id=changed, name="Ada Lovelace"))
    assert result(page) == words["error_mistyped"]
    page.goto(link_to(root, id=id, name="\u200b"))
    assert result(page) == words["error_name"]
    page.goto(link_to(root, id="AEYETT-XN5QBL-SF37QX-PVOAPX-INDQ", name="Ada Lovelace"))  # the vectors' exam "one"
    assert result(page) == words["error_bank"]
    page.goto(link_to(root, id=id, signature="c2hvcnQ"))
    assert result(page) == words["error_key"]
    page.goto(link_to(root, id=id, signature="c2hvcnQ", key="A" * 43))
    assert result(page) == words["error_signature"]
    page.goto(link_to(root, id=id, key="A" * 43))
    assert result(page) == words["error_signature"]


def test_signatures(visit: Visitor, base: str, tmp_path: Path) -> None:
    key = new_key(tmp_path / "key.pem")
    other = new_key(tmp_path / "other.pem")
    id = an_id()
    signature = sign(tmp_path / "key.pem", id)
    page = visit(link_to(base, id=id, name="Ada Lovelace", signature=signature, key=key))
    assert say()["signature_right"] in result(page)
    assert say()["verified"] in result(page)
    for wrong_one in (
        link_to(base, id=id, name="Ada Lovelace", signature=signature, key=other),
        link_to(base, id=an_id("Grace Hopper"), name="Grace Hopper", signature=signature, key=key),
        link_to(base, id=id, name="Ada Lovelace", signature=sign(tmp_path / "other.pem", id), key=key),
    ):
        page.goto(wrong_one)
        assert say()["signature_wrong"] in result(page)
        assert say()["not_verified"] in result(page)
