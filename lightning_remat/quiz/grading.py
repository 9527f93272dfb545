"""What is right, and what grading depends on: an exam without its words.

A certificate names the exam that it is about by a digest of that :class:`Core`, so translations and explanations may
change, and what was asked and what is right may not.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

from lightning_remat.quiz.bank import Answer, Exam, Question


class HasAnswer(Protocol):
    """What an answer can be compared with: a :class:`Question`, or an :class:`Item`."""

    @property
    def id(self) -> str:
        """Unique among them."""

    @property
    def answer(self) -> Answer | None:
        """The right one."""


def is_right(question: HasAnswer, answer: Answer | Iterable[str]) -> bool:
    """Whether an answer is the right one; of several, all have to be there and no other, in any order."""
    right = question.answer
    if right is None:
        raise ValueError(f"the answer to {question.id!r} was not loaded: load_bank(answers=True) does")
    if isinstance(right, tuple):
        return not isinstance(answer, (str, int)) and set(answer) == set(right)
    return type(answer) is type(right) and answer == right


@dataclass(frozen=True)
class Score:
    """How an exam went.

    Attributes:
        right: ids of the questions that were answered rightly, in the exam's order.
        of: how many there are.
        passed: whether that reaches the pass mark.
    """

    right: tuple[str, ...]
    of: int
    passed: bool


@dataclass(frozen=True)
class Item:
    """A question without words.

    Attributes:
        id: of the question.
        kind: single, several or number.
        options: the choices' ids; of a number, the lowest and the highest.
        answer: the right one.
    """

    id: str
    kind: str
    options: tuple[str, ...] | tuple[int, int]
    answer: Answer

    @classmethod
    def of(cls, question: Question) -> Item:
        """Of a question of the bank; a ``ValueError`` where its answer was not loaded."""
        if question.answer is None:
            raise ValueError(f"the answer to {question.id!r} was not loaded: load_bank(answers=True) does")
        options = question.range or tuple(choice.id for choice in question.choices)
        return cls(question.id, question.kind, options, question.answer)

    @classmethod
    def from_data(cls, data: Any) -> Item:
        """Of what :meth:`data` returned, or JSON made of it."""
        id, kind, options, answer = data
        return cls(id, kind, tuple(options), tuple(answer) if isinstance(answer, list) else answer)

    def data(self) -> list[Any]:
        """As a list, to be written as JSON."""
        return [self.id, self.kind, list(self.options), as_json(self.answer)]

    @property
    def size(self) -> int:
        """How many different answers there are."""
        if self.kind == "several":
            return int(2 ** len(self.options))
        if self.kind == "number":
            lowest, highest = self._range
            return highest - lowest + 1
        return len(self.options)

    def index(self, answer: Answer | Iterable[str]) -> int:
        """The number of an answer, from 0; of several, bit i is the i-th choice.

        Raises:
            ValueError: If it is no answer to this question.
        """
        if self.kind == "number":
            lowest, highest = self._range
            if type(answer) is int and lowest <= answer <= highest:
                return answer - lowest
        elif self.kind == "single":
            if answer in self.options:
                return self.options.index(answer)
        elif not isinstance(answer, (str, int)):
            chosen = set(answer)
            if chosen <= set(self.options):
                return sum(2**i for i, option in enumerate(self.options) if option in chosen)
        raise ValueError(f"{answer!r} is no answer to the question {self.id!r}")

    def value(self, index: int) -> Answer:
        """The answer of this number, which must be less than :attr:`size`."""
        if self.kind == "number":
            return self._range[0] + index
        if self.kind == "single":
            return self.options[index]
        return tuple(str(option) for i, option in enumerate(self.options) if index >> i & 1)

    @property
    def _range(self) -> tuple[int, int]:
        lowest, highest = self.options
        assert isinstance(lowest, int)
        assert isinstance(highest, int)
        return lowest, highest


@dataclass(frozen=True)
class Core:
    """An exam without words.

    Attributes:
        exam: id of the exam.
        pass_mark: in percent.
        items: its questions, in order.
    """

    exam: str
    pass_mark: int
    items: tuple[Item, ...]

    @classmethod
    def of(cls, exam: Exam) -> Core:
        """Of an exam of the bank."""
        return cls(exam.id, exam.pass_mark, tuple(Item.of(question) for question in exam.questions))

    @classmethod
    def from_data(cls, data: Any) -> Core:
        """Of what :meth:`data` returned, or JSON made of it."""
        exam, pass_mark, items = data
        return cls(exam, pass_mark, tuple(Item.from_data(item) for item in items))

    def data(self) -> list[Any]:
        """As lists, to be written as JSON: exam, pass mark, and of each item id, kind, options, answer."""
        return [self.exam, self.pass_mark, [item.data() for item in self.items]]

    @cached_property
    def digest(self) -> bytes:
        """SHA-256 of the JSON text, which has no spaces."""
        text = json.dumps(self.data(), ensure_ascii=False, separators=(",", ":"))
        return hashlib.sha256(text.encode()).digest()

    @cached_property
    def width(self) -> int:
        """How many bytes the answers of a learner need."""
        return max(1, -(-(math.prod(item.size for item in self.items) - 1).bit_length() // 8))


def grade(exam: Exam | Core, answers: Mapping[str, Answer]) -> Score:
    """Grade answers by the ids of their questions; a question without one was not answered rightly."""
    core = exam if isinstance(exam, Core) else Core.of(exam)
    right = tuple(item.id for item in core.items if item.id in answers and is_right(item, answers[item.id]))
    return Score(right, len(core.items), len(right) * 100 >= core.pass_mark * len(core.items))


def as_json(answer: Answer) -> Any:
    """An answer as JSON has it."""
    return list(answer) if isinstance(answer, tuple) else answer
