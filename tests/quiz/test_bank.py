"""The bank of the course: complete, executed, explained, and with no answer given away.

What is checked while a bank is loaded (languages, Unicode, numbers, ids, reasons) is tested in test_loading.py; that
this bank loads means that it has all of it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from datetime import date
from pathlib import Path

import numpy as np
import pytest

from lightning_remat.quiz.answers import make_answer
from lightning_remat.quiz.bank import LANGUAGES, Exam, Question, Text, load_bank, quiz_folder
from lightning_remat.quiz.certificate import issue, verify
from lightning_remat.quiz.grading import as_json

BANK = load_bank()
ANSWERS = json.loads((quiz_folder() / "answers.json").read_text(encoding="utf-8"))
SITE = Path(__file__).parent.parent.parent / "docs" / "site"
SINGLE = [question for question in BANK.questions if question.kind == "single"]
SEVERAL = [question for question in BANK.questions if question.kind == "several"]
NUMBER = [question for question in BANK.questions if question.kind == "number"]
LIKELY = 0.05
"""A bank that gives nothing away shows a pattern as strong as the one found with at least this probability."""

each_question = pytest.mark.parametrize("question", [pytest.param(one, id=one.id) for one in BANK.questions])


def texts(question: Question) -> Iterable[Text]:
    """All that is written in a question."""
    yield question.prompt
    yield from (text for choice in question.choices for text in (choice.text, choice.why))
    yield from (near.why for near in question.near)
    yield from (text for text in (question.unit, question.why) if text is not None)


def right_ones(question: Question) -> tuple[str, ...]:
    """The right choices' ids."""
    return question.answer if isinstance(question.answer, tuple) else (str(question.answer),)


# ---- what there is


def test_there_is_enough() -> None:
    assert len(BANK.questions) >= 36
    assert [topic.id for topic in BANK.topics] == [
        "recomputation",
        "kept",
        "policies",
        "budget",
        "out-of-memory",
        "offload",
        "devices",
        "projects",
    ]
    assert all(len(topic.questions) >= 4 for topic in BANK.topics)
    assert {question.kind for question in BANK.questions} == {"single", "several", "number"}
    assert {exam.id: len(exam.topics) for exam in BANK.exams} == {"foundations": 1, "course": 8}
    assert sum(question.faq for question in BANK.questions) >= 6


def test_the_six_questions_of_the_guide() -> None:
    ids = ["what-is", "what-it-trades", "why-stored", "extra-compute", "selective", "companion"]
    assert {id: BANK.question(id).topic for id in ids} == dict.fromkeys(ids, "recomputation")
    assert set(ids) <= {question.id for question in BANK.exam("foundations").questions}


# ---- facts


@each_question
def test_facts_are_executed(question: Question, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All code runs, what is asserted holds, and what is printed is the answer that the file has."""
    monkeypatch.chdir(tmp_path)
    made = make_answer(question)
    assert ANSWERS.get(question.id) == made
    if made is not None:
        assert as_json(question.answer) == made


# ---- where it is explained


def anchors(page: Path) -> set[str]:
    """What can be linked to on a page of the site: ids that are written down."""
    text = page.read_text(encoding="utf-8")
    return set(re.findall(r"\{[^}\n]*#([\w-]+)[^}\n]*\}", text)) | set(re.findall(r'\bid="([\w-]+)"', text))


@pytest.mark.parametrize("language", LANGUAGES)
@each_question
def test_explained(question: Question, language: str) -> None:
    """On a page of the site that exists in this language, under a heading that exists there."""
    page = SITE / language / question.page
    assert page.is_file(), f"{question.explained}: there is no such page"
    assert question.anchor in anchors(page), f"{question.explained}: there is no such heading"


@pytest.mark.parametrize("language", LANGUAGES)
def test_pages_of_topics(language: str) -> None:
    """Each has the page that it is about, and one with its questions."""
    for topic in BANK.topics:
        assert (SITE / language / topic.page).is_file()
        assert (SITE / language / "quiz" / f"{topic.id}.md").is_file()


# ---- languages


@each_question
def test_languages(question: Question) -> None:
    """Hindi is in Devanagari, Spanish is not English, and code is the same everywhere."""
    for text in texts(question):
        spans = {language: sorted(re.findall(r"`+[^`]+`+", text[language])) for language in LANGUAGES}
        assert spans["es"] == spans["hi"] == spans["en"]
        words = re.sub(r"`[^`]*`", "", text["en"])
        if len(re.findall(r"[A-Za-z]{2,}", words)) > 2:  # more than a unit or a name
            assert re.search("[\u0900-\u097f]", text["hi"]), text
            assert text["es"] != text["en"]
        assert not re.search("[\u0900-\u097f]", text["en"] + text["es"])


@each_question
def test_inline_markdown_only(question: Question) -> None:
    """Code and emphasis, which terminal and site both show; no HTML, no links, no blocks."""
    for text in texts(question):
        for language in LANGUAGES:
            words = re.sub(r"`[^`]*`", "", text[language])
            assert not re.search(r"[<>]|\]\(|^(#|- |\* |\d+\. )", words), words
            assert words.count("*") % 2 == 0


@each_question
def test_code_is_narrow(question: Question) -> None:
    """A terminal of 80 columns breaks a line once at most."""
    assert max((len(line) for line in (question.code or "").splitlines()), default=0) <= 100


# ---- nothing is given away
#
# Whoever knows nothing and follows a rule ("the longest", "the second") must not do better than by guessing. For a rule
# that points at one of k choices, guessing has a chance of 1/k in each question; the number of hits is a sum of
# independent trials (Poisson-binomial), and a bank fails where as many hits or more had a probability below LIKELY. The
# length of a text is counted in its characters; a tie is no hit, so the test is a little mild where lengths are equal.


def chance(probabilities: Sequence[float], hits: int) -> float:
    """Of so many hits or more, in independent trials."""
    distribution = np.array([1.0])
    for probability in probabilities:
        distribution = np.convolve(distribution, [1 - probability, probability])
    return float(distribution[hits:].sum())


def test_chance() -> None:
    assert chance([0.5, 0.5], 2) == pytest.approx(0.25)
    assert chance([0.5, 0.25], 1) == pytest.approx(1 - 0.5 * 0.75)
    assert chance([0.1] * 9, 0) == pytest.approx(1)


def outcome(hits: Sequence[str], questions: Sequence[Question]) -> tuple[float, str]:
    """How likely so many are, and what to say of them, question by question."""
    likely = chance([1 / len(question.choices) for question in questions], len(hits))
    expected = sum(1 / len(question.choices) for question in questions)
    return likely, f"{len(hits)} of {len(questions)} hits, {expected:.1f} expected, p = {likely:.3f}: {', '.join(hits)}"


@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.parametrize("rule", ["longest", "shortest"])
def test_no_answer_is_given_away_by_its_length(rule: str, language: str) -> None:
    hits = []
    for question in SINGLE:
        lengths = {choice.id: len(choice.text[language]) for choice in question.choices}
        extreme = (max if rule == "longest" else min)(lengths.values())
        if [id for id, length in lengths.items() if length == extreme] == [question.answer]:
            hits.append(question.id)
    likely, report = outcome(hits, SINGLE)
    assert likely >= LIKELY, report


@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.parametrize("question", [pytest.param(one, id=one.id) for one in SINGLE + SEVERAL])
def test_no_right_choice_stands_out(question: Question, language: str) -> None:
    """Right choices are not all more than twice as long as the longest wrong one, or less than half the shortest."""
    lengths: dict[bool, list[int]] = {True: [], False: []}
    for choice in question.choices:
        lengths[choice.id in right_ones(question)].append(len(choice.text[language]))
    if lengths[False]:
        assert min(lengths[True]) <= 2 * max(lengths[False]) + 5, lengths  # 5: single words differ by more
        assert 2 * max(lengths[True]) + 5 >= min(lengths[False]), lengths


def test_no_answer_is_given_away_by_its_place() -> None:
    places = [[choice.id for choice in question.choices].index(str(question.answer)) for question in SINGLE]
    for place in range(max(len(question.choices) for question in SINGLE)):
        there = [question for question in SINGLE if len(question.choices) > place]
        hits = [question.id for question, found in zip(SINGLE, places, strict=True) if found == place]
        likely, report = outcome(hits, there)
        assert likely >= LIKELY, f"place {place + 1}: {report}"
    same = max(len(run.group()) for run in re.finditer(r"(.)\1*", "".join(map(str, places))))
    assert same <= 3, f"the same place {same} times in a row: {places}"


def test_how_many_are_right_cannot_be_known() -> None:
    """Where several can be chosen: not always as many, not always half, and no place is always right."""
    rows = [[choice.id in right_ones(question) for choice in question.choices] for question in SEVERAL]
    assert len({sum(row) for row in rows}) >= 2, rows
    assert 0.3 <= np.mean([np.mean(row) for row in rows]) <= 0.7, rows
    for place in range(min(map(len, rows))):
        right = [row[place] for row in rows]
        assert 0 < sum(right) < len(right), f"place {place + 1} is right in {sum(right)} of {len(right)}"


def test_numbers_are_not_given_away_by_their_range() -> None:
    """Neither the ends of what can be answered nor its middle are the answer in more than half of the questions."""
    rules = {
        "lowest": [q.id for q in NUMBER if q.range and q.answer == q.range[0]],
        "highest": [q.id for q in NUMBER if q.range and q.answer == q.range[1]],
        "middle": [q.id for q in NUMBER if q.range and q.answer == sum(q.range) / 2],
    }
    for rule, hits in rules.items():
        assert len(hits) * 2 <= len(NUMBER), f"{rule}: {hits}"


# ---- certificates


@pytest.mark.parametrize("exam", [pytest.param(one, id=one.id) for one in BANK.exams])
def test_a_certificate_of_this_bank(exam: Exam) -> None:
    """It can be read out: its ID has at most 100 letters."""
    answers = {question.id: question.answer for question in exam.questions if question.answer is not None}
    text = issue(exam, answers, "आशा शर्मा", date(2026, 11, 29))
    assert len(text.replace("-", "")) <= 100
    verified = verify(BANK, text, "आशा शर्मा")
    assert (verified.exam, verified.right, verified.passed) == (exam.id, len(exam.questions), True)
    for question in exam.questions:
        other = dict(answers)
        del other[question.id]
        with pytest.raises(ValueError, match=question.id):
            issue(exam, other, "x", date(2026, 11, 29))
