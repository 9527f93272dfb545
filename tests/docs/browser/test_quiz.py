"""The quiz as a learner meets it: by mouse, by keyboard alone, without scripts, over several visits and tabs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lightning_remat.quiz.bank import LANGUAGES
from tests.docs.browser.conftest import Visitor
from tests.docs.browser.learner import (
    KEY,
    bank,
    check,
    choose,
    feedback,
    form,
    of_kind,
    plain,
    progress,
    say,
    stored,
    wrong,
)

pytestmark = pytest.mark.browser
FOLDERS = {language: "" if language == "en" else f"{language}/" for language in LANGUAGES}
KINDS = ("single", "several", "number")


def page_of(kind: str) -> str:
    return f"quiz/{of_kind(kind).topic}.html"


# ---------------------------------------------------------------------- by mouse


def test_single(visit: Visitor, base: str) -> None:
    question = of_kind("single")
    page = visit(base + page_of("single"))
    bad = question.choice(str(wrong(question)))
    choose(page, question, bad.id)
    assert feedback(page, question) == "", "choosing alone says nothing"
    assert stored(page) == {}, "and is no answer"

    said = check(page, question, bad.id)
    assert say()["verdict_wrong"] in said
    assert plain(bad.why["en"]) in said
    right = question.choice(str(question.answer))
    assert plain(right.why["en"]) not in said, "the right answer is not given away"
    link = form(page, question).locator('[data-rq="feedback"] a')
    assert link.get_attribute("href") == f"../{question.page.removesuffix('.md')}.html#{question.anchor}"

    others = form(page, question).locator('[data-rq="others"]')
    assert not others.is_visible()
    form(page, question).get_by_role("button", name=say()["show_others"]).click()
    for choice in question.choices:
        assert (plain(choice.why["en"]) in others.inner_text()) == (choice is not bad)

    said = check(page, question)
    assert say()["verdict_right"] in said
    assert plain(right.why["en"]) in said
    assert say()["first_counts"] in said
    assert not others.is_visible()
    assert stored(page)[question.id].items() >= {"first": bad.id, "last": right.id}.items()
    assert ": 0." in progress(page), "what was right at the second try does not count"


def test_several(visit: Visitor, base: str) -> None:
    question = of_kind("several")
    page = visit(base + page_of("several"))
    form(page, question).get_by_role("button", name=say()["check"]).click()
    assert feedback(page, question) == say()["choose_first"]
    assert stored(page) == {}

    assert isinstance(question.answer, tuple)
    said = check(page, question, wrong(question))
    assert say()["verdict_wrong"] in said
    assert say()["missing"] in said

    everything = tuple(choice.id for choice in question.choices)
    if everything != question.answer:
        said = check(page, question, everything)
        assert say()["verdict_wrong"] in said
        assert say()["missing"] not in said
        assert say()["belongs_not"] in said

    said = check(page, question)
    assert say()["verdict_right"] in said
    for id in question.answer:
        assert plain(question.choice(id).why["en"]) in said
    assert stored(page)[question.id]["last"] == list(question.answer)


def test_nonsense_is_no_number(visit: Visitor, served: str) -> None:
    question = of_kind("number")
    assert question.range is not None
    page = visit(served + page_of("number"))
    low, high = question.range
    for nonsense in ("", "many", "1.5", "1e3", "0x10", "--3", "4 0", "9" * 24, "<b>4</b>"):
        choose(page, question, "what was there before")
        assert feedback(page, question) == ""
        choose(page, question, nonsense)
        form(page, question).get_by_role("button", name=say()["check"]).click()
        assert feedback(page, question) == say().say("number_first", low=low, high=high), nonsense
        assert form(page, question).locator("input").get_attribute("aria-invalid") == "true", nonsense
        assert stored(page) == {}, nonsense


def test_number(visit: Visitor, base: str) -> None:
    question = of_kind("number")
    assert question.range is not None
    page = visit(base + page_of("number"))
    assert say()["verdict_wrong"] not in check(page, question, question.range[1] + 1)
    assert stored(page) == {}
    said = check(page, question, wrong(question))
    assert say()["verdict_wrong"] in said
    assert say()["other_number"] in said
    for near in question.near:
        assert plain(near.why["en"]) in check(page, question, near.value)
    form(page, question).get_by_role("button", name=say()["show_answer"]).click()
    assert str(question.answer) in form(page, question).locator('[data-rq="others"]').inner_text()
    devanagari = str(question.answer).translate({ord("0") + n: 0x966 + n for n in range(10)})
    choose(page, question, f" {devanagari} ")
    form(page, question).locator('button[type="submit"]').click()
    assert say()["verdict_right"] in feedback(page, question)
    assert stored(page)[question.id]["last"] == question.answer


def test_another_choice_takes_back_what_was_said(visit: Visitor, served: str) -> None:
    question = of_kind("single")
    page = visit(served + page_of("single"))
    check(page, question)
    choose(page, question, wrong(question))
    assert feedback(page, question) == ""
    assert stored(page)[question.id]["last"] == question.answer


# ---------------------------------------------------------------------- by keyboard


def test_keyboard_alone(visit: Visitor, base: str) -> None:
    """Tab reaches every control of a question, arrows choose, Space marks, Enter answers; focus stays and is seen."""
    for kind in KINDS:
        question = of_kind(kind)
        page = visit(base + page_of(kind))
        here = form(page, question)
        press = page.keyboard.press
        if kind != "single":  # the way from the top of a page was gone once
            here.evaluate("""form => {
                const found = [...document.querySelectorAll("a[href], button, input")];
                const all = found.filter((it) => it.checkVisibility());
                all[all.findIndex((it) => form.contains(it)) - 1].focus();
            }""")
        for _ in range(300):
            press("Tab")
            if here.evaluate(
                "form => form.contains(document.activeElement) && document.activeElement.matches('input')"
            ):
                break
        else:
            pytest.fail("Tab does not lead to the question")
        seen = "document.activeElement.closest('label') ?? document.activeElement"
        assert page.evaluate(f"parseFloat(getComputedStyle({seen}).outlineWidth)") >= 2, "focus can be seen"
        if kind == "single":
            assert not here.locator("input:checked").count()
            press("Space")
            index = [choice.id for choice in question.choices].index(str(question.answer))
            for _ in range(index):
                press("ArrowDown")
            assert here.locator("input:checked").get_attribute("value") == question.answer
        elif kind == "several":
            assert isinstance(question.answer, tuple)
            for i, choice in enumerate(question.choices):
                if i:
                    press("Tab")
                if choice.id in question.answer:
                    press("Space")
        else:
            page.keyboard.type(str(question.answer))
        assert feedback(page, question) == ""
        focused = page.evaluate_handle("document.activeElement")
        press("Enter")
        assert say()["verdict_right"] in feedback(page, question)
        assert page.evaluate("focused => focused === document.activeElement", focused), "focus stays"

        while page.evaluate("document.activeElement.type") != "submit":
            press("Tab")
        press("Tab")
        assert page.evaluate("document.activeElement.closest('[data-rq=feedback]') !== null"), "the explanation's link"
        if kind != "number":
            press("Tab")
            press("Space")
            assert here.locator('[data-rq="others"]').is_visible()
            press("Enter")
            assert not here.locator('[data-rq="others"]').is_visible()


def test_what_screen_readers_say(visit: Visitor, served: str) -> None:
    page = visit(served + page_of("single"))
    for number, question in enumerate(bank().topic(of_kind("single").topic).questions, 1):
        name = f"{number}. {plain(question.prompt['en'])}"
        group = page.get_by_role("group", name=name, exact=True)
        assert group.count() == 1, "the options belong to a question"
        for choice in question.choices:
            role = "checkbox" if question.kind == "several" else "radio"
            assert group.get_by_role(role, name=plain(choice.text["en"]), exact=True).count() == 1
    regions = page.locator('[data-rq="feedback"]')
    assert {regions.nth(i).get_attribute("role") for i in range(regions.count())} == {"status"}


# ---------------------------------------------------------------------- without scripts


# Of each question: buttons that can be seen, whether the answers cannot, its text, and what the answers say when open.
WITHOUT = """Object.fromEntries([...document.querySelectorAll("[data-question]")].map((form) => {
  const answers = form.querySelector("details");
  const buttons = [...form.querySelectorAll("button")].filter((it) => it.checkVisibility()).length;
  const folded = ![...answers.querySelectorAll("li")].some((it) => it.checkVisibility());
  const prompt = form.innerText;
  answers.open = true;
  return [form.dataset.question, [buttons, folded, prompt, answers.innerText]];
}))"""


@pytest.mark.parametrize("language", LANGUAGES)
def test_without_javascript(visit: Visitor, base: str, language: str) -> None:
    page = visit.context(java_script_enabled=False).new_page()
    for topic in bank().topics:
        page.goto(f"{base}{FOLDERS[language]}quiz/{topic.id}.html")
        answers = form(page, topic.questions[0]).locator("details")
        answers.locator("summary").click()
        assert answers.locator("li").first.is_visible(), "a click opens them"
        answers.locator("summary").click()
        seen = page.evaluate(WITHOUT)
        for question in topic.questions:
            buttons, folded, prompt, text = seen[question.id]
            assert (buttons, folded) == (0, True)
            assert plain(question.prompt[language]) in prompt
            for choice in question.choices:
                assert plain(choice.why[language]) in text
            if question.why:
                assert str(question.answer) in text
                assert plain(question.why[language]) in text


def test_with_javascript_answers_are_folded_away(visit: Visitor, served: str) -> None:
    page = visit(served + page_of("single"))
    assert not any(details.is_visible() for details in page.locator("details[data-rq=answer]").all())


# ---------------------------------------------------------------------- over several visits


def test_reload_and_another_language(visit: Visitor, base: str) -> None:
    question = of_kind("single")
    page = visit(base + page_of("single"))
    check(page, question)
    page.reload()
    assert form(page, question).locator("input:checked").get_attribute("value") == question.answer
    assert say()["verdict_right"] in feedback(page, question)
    page.get_by_role("button", name="Select language").hover()
    page.get_by_role("link", name="हिन्दी").click()
    page.wait_for_url("**/hi/quiz/**")
    assert say("hi")["verdict_right"] in feedback(page, question)
    assert plain(question.choice(str(question.answer)).why["hi"]) in feedback(page, question)
    assert progress(page) == say("hi").say(
        "counts", answered=1, of=len(bank().topic(question.topic).questions), right=1
    )


def test_overview(visit: Visitor, base: str) -> None:
    question = of_kind("number")
    page = visit(base + page_of("number"))
    check(page, question, wrong(question))
    page.get_by_role("link", name=say()["all_topics"]).click()
    page.wait_for_url("**/quiz/index.html")  # and for its scripts
    item = page.locator(f'[data-topic="{question.topic}"]')
    of = len(bank().topic(question.topic).questions)
    assert say().say("counts", answered=1, of=of, right=0) in item.inner_text()
    assert item.locator("progress").evaluate("bar => [bar.value, bar.max]") == [1, of]
    assert progress(page) == say().say("counts", answered=1, of=len(bank().questions), right=0)
    page.get_by_role("button", name=say()["start_over"]).click()
    page.get_by_role("button", name=say()["keep_answers"]).click()
    assert set(stored(page)) == {question.id}
    page.get_by_role("button", name=say()["start_over"]).click()
    page.get_by_role("button", name=say()["forget_answers"]).click()
    page.wait_for_function(f"!Object.keys(JSON.parse(localStorage.getItem({KEY!r})).answers).length")
    assert say()["started_over"] in progress(page)


def test_retry_what_was_missed(visit: Visitor, base: str) -> None:
    topic = bank().topics[0]
    page = visit(f"{base}quiz/{topic.id}.html")
    missed = topic.questions[1]
    assert not page.get_by_role("button", name=say()["retry"]).count()
    for question in topic.questions:
        check(page, question, wrong(question) if question is missed else None)
    of = len(topic.questions)
    assert page.locator('[data-rq="result"]').inner_text() == say().say("all_answered", right=of - 1, of=of)
    page.get_by_role("button", name=say()["retry"]).click()
    for question in topic.questions:
        assert form(page, question).is_visible() == (question is missed)
    assert feedback(page, missed) == ""
    assert form(page, missed).evaluate("form => form.contains(document.activeElement)")
    check(page, missed)
    assert say()["first_counts"] in feedback(page, missed)
    page.get_by_role("button", name=say()["show_all"]).click()
    for question in topic.questions:
        assert form(page, question).is_visible()
        assert say()["verdict_right"] in feedback(page, question)
    assert not page.get_by_role("button", name=say()["retry"]).is_visible()
    assert stored(page)[missed.id]["first"] != stored(page)[missed.id]["last"]


def test_starting_over_asks_first(visit: Visitor, base: str) -> None:
    one, other = bank().topics[:2]
    page = visit(f"{base}quiz/{other.id}.html")
    check(page, other.questions[0])
    page.goto(f"{base}quiz/{one.id}.html")
    check(page, one.questions[0])
    page.get_by_role("button", name=say()["start_over"]).click()
    dialog = page.locator("dialog")
    assert dialog.evaluate("dialog => dialog.querySelector('[value=no]') === document.activeElement")
    page.keyboard.press("Escape")
    assert set(stored(page)) == {one.questions[0].id, other.questions[0].id}
    page.get_by_role("button", name=say()["start_over"]).click()
    dialog.get_by_role("button", name=say()["forget_answers"]).click()
    page.wait_for_function("document.querySelector('[data-rq=result]').textContent !== ''")
    assert set(stored(page)) == {other.questions[0].id}, "the other topic is another matter"
    assert feedback(page, one.questions[0]) == ""
    assert not form(page, one.questions[0]).locator("input:checked").count()


def test_another_tab(visit: Visitor, base: str) -> None:
    question = of_kind("single")
    context = visit.context()
    one, other = context.new_page(), context.new_page()
    for page in (one, other):
        page.goto(base + page_of("single"))
    one.bring_to_front()
    check(one, question)
    other.bring_to_front()  # what is behind is drawn seldom, and waited for long
    other.wait_for_function(f"document.querySelector('[data-question={question.id}] .rq-verdict') !== null")
    assert say()["verdict_right"] in feedback(other, question)
    another = next(q for q in bank().topic(question.topic).questions if q is not question)
    check(other, another)
    one.bring_to_front()
    check(one, question, wrong(question))
    assert set(stored(one)) == {question.id, another.id}, "neither tab forgets what the other one wrote"


# ---------------------------------------------------------------------- what is stored is damaged, or cannot be


def test_damaged_progress_is_dropped(visit: Visitor, served: str) -> None:
    question = of_kind("single")
    page = visit(served + page_of("single"))
    for damage in ("", "null", "{", "[]", "42", '{"answers": 3}', f'{{"answers": {{"{question.id}": 1}}}}'):
        page.evaluate("([key, text]) => localStorage.setItem(key, text)", [KEY, damage])
        page.reload()
        assert feedback(page, question) == "", damage
        check(page, question)
        page.reload()
        assert say()["verdict_right"] in feedback(page, question), damage


def test_answers_to_what_has_changed_are_dropped(visit: Visitor, served: str) -> None:
    one, other = bank().topics[0].questions[:2]
    page = visit(f"{served}quiz/{one.topic}.html")
    check(page, one)
    check(page, other)
    answers = stored(page)
    digest = answers[one.id]["digest"]
    damaged = {
        one.id: {**answers[one.id], "digest": "00000000"},
        other.id: {**answers[other.id], "first": "no-such-choice"},
        "no-such-question": {"digest": digest, "first": "a", "last": "a"},
        "__proto__": {"digest": digest, "first": "a", "last": "a"},
    }
    text = json.dumps({"answers": damaged})
    page.evaluate("([key, text]) => localStorage.setItem(key, text)", [KEY, text])
    page.reload()
    assert feedback(page, one) == feedback(page, other) == ""
    assert progress(page) == say().say("counts", answered=0, of=len(bank().topics[0].questions), right=0)


FORBIDDEN = "Object.defineProperty(window, 'localStorage', {get() { throw new DOMException('no', 'SecurityError'); }});"
FULL = "Storage.prototype.setItem = () => { throw new DOMException('full', 'QuotaExceededError'); };"


@pytest.mark.parametrize("script", [FORBIDDEN, FULL], ids=["forbidden", "full"])
def test_without_storage_the_quiz_works_and_says_so(visit: Visitor, served: str, script: str) -> None:
    question = of_kind("single")
    context = visit.context()
    context.add_init_script(script)
    page = context.new_page()
    page.goto(served + page_of("single"))
    assert page.get_by_text(say()["no_storage"]).is_visible()
    check(page, question)
    assert say()["verdict_right"] in feedback(page, question)
    assert ": 1." in progress(page)
    # The theme keeps the choice of colours there and does not expect to be refused: that is not the quiz's fault.
    visit.faults = [fault for fault in visit.faults if fault != "script: no"]


def test_what_the_site_is_built_from(site: Path) -> None:
    """A site built from another bank would make the other tests say strange things."""
    script = (site / "assets/quiz/data.js").read_text(encoding="utf-8").removeprefix("rematQuiz.data = ").rstrip(";\n")
    ids = [question["id"] for topic in json.loads(script)["topics"] for question in topic["questions"]]
    assert ids == [question.id for question in bank().questions], "run `python docs/build.py` again"
