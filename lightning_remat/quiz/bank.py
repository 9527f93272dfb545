"""The bank of questions: what it consists of, and how it is loaded from the TOML files in ``quiz/``.

``course.toml`` names the topics and exams, ``TOPIC.toml`` has the questions of a topic, ``answers.json`` those answers
that running code has made (:mod:`lightning_remat.quiz.answers`). Everything is checked while it is loaded: one bank
serves the site and the terminal in three languages, and what is wrong in it must be found before a learner does.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypeVar, cast

from lightning_remat.quiz.reading import LANGUAGES, BankError, Table, Text, read_toml
from lightning_remat.shipped import shipped_folder

__all__ = ["LANGUAGES", "Bank", "BankError", "Choice", "Exam", "Near", "Question", "Text", "Topic", "load_bank"]

SCHEMA = 1
MAKE_ANSWERS = "run `python -m lightning_remat.quiz.answers`"
MOST_CHOICES = 8
"""They are named by letters in a terminal, and a set of bits in a certificate where several are right."""

Kind: TypeAlias = Literal["single", "several", "number"]
Answer: TypeAlias = str | tuple[str, ...] | int
"""Of a single choice its id; of several their ids, in the order of the choices; of a number the integer."""

_PAGE = r"[a-z0-9-]+(?:/[a-z0-9-]+)*\.md"
_NOT_TOPICS = {"course.toml", "words.toml"}


@dataclass(frozen=True)
class Choice:
    """One of the options of a question.

    Attributes:
        id: unique in its question.
        text: inline Markdown.
        why: what is right, or wrong, about choosing it.
        prints: what the question's ``run`` prints for it; ``text`` is then this, as code.
    """

    id: str
    text: Text
    why: Text
    prints: str | None = None


@dataclass(frozen=True)
class Near:
    """A wrong number that many give, and what is wrong about it."""

    value: int
    why: Text


@dataclass(frozen=True)
class Question:
    """A question.

    Attributes:
        id: unique in the bank; it never changes its meaning.
        topic: id of its topic.
        kind: one right choice, several, or a number.
        prompt: inline Markdown.
        explained: page of the site and anchor in it (``"tutorials/kept.md#print-kept"``).
        answer: the right one; None: not made yet (only where answers were not asked for).
        choices: in the order in which they are shown; none for a number.
        faq: appears among the frequent questions.
        code: Python, shown under the prompt.
        run: Python that prints the answer, after ``code``.
        check: Python, assertions of the fact.
        range: for a number: what can be answered, both ends included.
        unit: for a number, if it has one.
        why: for a number: the explanation of the right answer.
        near: for a number.
    """

    id: str
    topic: str
    kind: Kind
    prompt: Text
    explained: str
    answer: Answer | None
    choices: tuple[Choice, ...] = ()
    faq: bool = False
    code: str | None = None
    run: str | None = None
    check: str | None = None
    range: tuple[int, int] | None = None
    unit: Text | None = None
    why: Text | None = None
    near: tuple[Near, ...] = ()

    def choice(self, id: str) -> Choice:
        """The choice of this id; a ``KeyError`` where there is none."""
        return _by_id(self.choices, id)

    @property
    def page(self) -> str:
        """The page that explains it, without the anchor."""
        return self.explained.partition("#")[0]

    @property
    def anchor(self) -> str:
        """The anchor on that page."""
        return self.explained.partition("#")[2]


@dataclass(frozen=True)
class Topic:
    """The questions about one page."""

    id: str
    title: Text
    page: str
    questions: tuple[Question, ...]


@dataclass(frozen=True)
class Exam:
    """The questions that a certificate is about: all of those of its topics, in order.

    Attributes:
        pass_mark: what must be right at least, in percent.
    """

    id: str
    title: Text
    topics: tuple[str, ...]
    questions: tuple[Question, ...]
    pass_mark: int


@dataclass(frozen=True)
class Bank:
    """All of it."""

    id: str
    pass_mark: int
    topics: tuple[Topic, ...]
    exams: tuple[Exam, ...]

    @property
    def questions(self) -> tuple[Question, ...]:
        """Of all topics, in order."""
        return tuple(question for topic in self.topics for question in topic.questions)

    def topic(self, id: str) -> Topic:
        """The topic of this id; a ``KeyError`` where there is none."""
        return _by_id(self.topics, id)

    def exam(self, id: str) -> Exam:
        """The exam of this id; a ``KeyError`` where there is none."""
        return _by_id(self.exams, id)

    def question(self, id: str) -> Question:
        """The question of this id; a ``KeyError`` where there is none."""
        return _by_id(self.questions, id)


_HasId = TypeVar("_HasId", Question, Choice, Topic, Exam)


def quiz_folder() -> Path:
    """Where the bank is; see :func:`~lightning_remat.shipped.shipped_folder`."""
    return shipped_folder("quiz", holds="course.toml")


def load_bank(folder: Path | str | None = None, *, answers: bool = True) -> Bank:
    """Load the bank and check all of it.

    Args:
        folder: where the files are; None: the bank that comes with the package.
        answers: put in the answers that running code has made. Without, they are None.

    Raises:
        BankError: about the first thing that is wrong, with its file, question and field.
        FileNotFoundError: as :func:`quiz_folder` does.
    """
    place = quiz_folder() if folder is None else Path(folder)
    course = read_toml(place / "course.toml")
    _check_schema(course)
    id, names = course.identifier("id"), course.identifiers("topics")
    pass_mark = course.take("pass_mark", int)
    if not 1 <= pass_mark <= 100:
        raise course.error("pass_mark", f"is {pass_mark}, but must be from 1 to 100 percent")
    if strays := {path.name for path in place.glob("*.toml")} - _NOT_TOPICS - {f"{name}.toml" for name in names}:
        raise course.error("topics", f"does not name {', '.join(sorted(strays))}, which lies beside it")
    topics = [_topic(read_toml(place / f"{name}.toml"), name) for name in names]
    _check_unique(topics)
    if answers:
        topics = _with_answers(topics, place / "answers.json")
    exams = [_exam(table, topics, pass_mark) for table in course.tables("exam")]
    if not exams or len({exam.id for exam in exams}) < len(exams):
        raise course.error("exam", "must be there, each with an id of its own")
    course.done()
    return Bank(id, pass_mark, tuple(topics), tuple(exams))


def _check_schema(table: Table) -> None:
    if (schema := table.take("schema", int)) != SCHEMA:
        raise table.error("schema", f"is {schema}; known here is {SCHEMA}")


def _exam(table: Table, topics: list[Topic], pass_mark: int) -> Exam:
    id, title, names = table.identifier("id"), table.text("title"), table.identifiers("topics")
    table.done()
    known = {topic.id: topic for topic in topics}
    for name in names:
        if name not in known:
            raise table.error("topics", f"names {name!r}, which is not among the course's")
    questions = tuple(question for name in names for question in known[name].questions)
    return Exam(id, title, tuple(names), questions, pass_mark)


def _topic(table: Table, name: str) -> Topic:
    _check_schema(table)
    if (id := table.identifier("id")) != name:
        raise table.error("id", f"is {id!r}, but the file's name says {name!r}")
    title, page = table.text("title"), _page(table, "page", _PAGE)
    questions = [_question(one, id, number) for number, one in enumerate(table.tables("question"), 1)]
    if not questions:
        raise table.error("question", "is missing: a topic has one at least")
    table.done()
    return Topic(id, title, page, tuple(questions))


def _page(table: Table, key: str, pattern: str) -> str:
    page = table.take(key, str)
    if not re.fullmatch(pattern, page):
        raise table.error(key, f"is {page!r}, which does not have the form {pattern}")
    return page


def _question(table: Table, topic: str, number: int) -> Question:
    table.question, table.inside = f"{number}.", ""
    id = table.question = table.identifier("id")
    kind = table.take("kind", str)
    if kind not in ("single", "several", "number"):
        raise table.error("kind", f"is {kind!r}, but must be 'single', 'several' or 'number'")
    question = Question(
        id=id,
        topic=topic,
        kind=cast(Kind, kind),
        prompt=table.text("prompt"),
        explained=_page(table, "explained", f"{_PAGE}#[a-z0-9-]+"),
        answer=None,
        faq=bool(table.take_or_none("faq", bool)),
        code=table.python("code"),
        run=table.python("run"),
        check=table.python("check"),
    )
    question = _number_parts(table, question) if kind == "number" else _choice_parts(table, question)
    if ("answer" in table) == (question.run is not None):
        raise table.error("answer", "must be there if there is no run, and must not if there is")
    if "answer" in table:
        given = table.take("answer", object)
        question = replace(question, answer=_answer(question, given, table))
    table.done()
    return question


def _number_parts(table: Table, question: Question) -> Question:
    lowest, highest = table.integers("range", 2)
    if not lowest < highest or max(abs(lowest), abs(highest)) > 2**53:
        raise table.error("range", f"is {[lowest, highest]}, but must be two integers, the smaller one first")
    near = []
    for one in table.tables("near"):
        one.question = question.id
        near.append(Near(one.take("value", int), one.text("why")))
        one.done()
        if not lowest <= near[-1].value <= highest:
            raise one.error("value", f"is {near[-1].value}, which is not in range")
    if len({one.value for one in near}) < len(near):
        raise table.error("near", "has a value twice")
    unit = table.text("unit") if "unit" in table else None
    return replace(question, range=(lowest, highest), unit=unit, why=table.text("why"), near=tuple(near))


def _choice_parts(table: Table, question: Question) -> Question:
    choices = []
    for one in table.tables("choice"):
        one.question = question.id
        id, prints = one.identifier("id"), one.take_or_none("prints", str)
        if (prints is None) == ("text" not in one):
            raise one.error("text", "must be there if there is no prints, and must not if there is")
        if prints is not None and (not prints or prints != prints.strip() or "`" in prints or "\n" in prints):
            raise one.error("prints", f"is {prints!r}, but must be one line without ` and without space at its ends")
        text = one.text("text") if prints is None else dict.fromkeys(LANGUAGES, f"`{prints}`")
        choices.append(Choice(id, text, one.text("why"), prints))
        one.done()
    if not 2 <= len(choices) <= MOST_CHOICES:
        raise table.error("choice", f"is there {len(choices)} times, but must be from 2 to {MOST_CHOICES} times")
    seen = {"id": [choice.id for choice in choices]}
    seen |= {f"text.{language}": [choice.text[language] for choice in choices] for language in LANGUAGES}
    for what, values in seen.items():
        if len(set(values)) < len(values):
            raise table.error("choice", f"has the same {what} twice")
    return replace(question, choices=tuple(choices))


def _answer(question: Question, given: Any, table: Table) -> Answer:
    """What was given as the answer, if it can be one."""
    ids = [choice.id for choice in question.choices]
    if question.kind == "number":
        lowest, highest = question.range or (0, 0)
        if type(given) is not int or not lowest <= given <= highest:
            raise table.error("answer", f"is {given!r}, but must be an integer from {lowest} to {highest}")
        for near in question.near:
            if near.value == given:
                raise table.error("near", f"has {given}, which is the answer")
        return given
    if question.kind == "single":
        if given not in ids:
            raise table.error("answer", f"is {given!r}, but must be one of {', '.join(ids)}")
        return str(given)
    if not isinstance(given, list) or not given or given != [id for id in ids if id in given]:
        raise table.error("answer", f"is {given!r}, but must be some of {', '.join(ids)}, in this order")
    return tuple(given)


def _check_unique(topics: list[Topic]) -> None:
    seen: dict[str, str] = {}
    for topic in topics:
        for question in topic.questions:
            if question.id in seen:
                raise BankError(f"{topic.id}.toml", question.id, "id", f"is already in {seen[question.id]}")
            seen[question.id] = f"{topic.id}.toml"


def _with_answers(topics: list[Topic], path: Path) -> list[Topic]:
    """With what is in the file of answers, which must have those that code has made, and no others."""
    wanted = {question.id for topic in topics for question in topic.questions if question.run is not None}
    content: Any = {}
    if wanted or path.exists():
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise BankError(path.name, None, "", f"cannot be read ({error}); {MAKE_ANSWERS}") from error
    if not isinstance(content, dict):
        raise BankError(path.name, None, "", f"must be answers by the questions' ids; {MAKE_ANSWERS}")
    for id in sorted(wanted ^ content.keys()):
        problem = "is missing" if id in wanted else "is not a question with a run"
        raise BankError(path.name, id, "", f"{problem}; {MAKE_ANSWERS}")
    place = Table({}, path.name)
    found = []
    for topic in topics:
        questions = []
        for question in topic.questions:
            if question.run is not None:
                place.question = question.id
                question = replace(question, answer=_answer(question, content[question.id], place))
            questions.append(question)
        found.append(replace(topic, questions=tuple(questions)))
    return found


def _by_id(things: Iterable[_HasId], id: str) -> _HasId:
    for thing in things:
        if thing.id == id:
            return thing
    raise KeyError(id)
