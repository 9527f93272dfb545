"""How far a learner is: first and last answers, kept across runs in one file, the same for all languages.

A certificate is about first answers, so a later one never takes the place of a first. An answer that is remembered
with a question in which something else is asked or right by now does not count.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import platformdirs
from filelock import FileLock

from lightning_remat.quiz.bank import Answer, Bank, Question
from lightning_remat.quiz.grading import Item, as_json, is_right

_FORMAT = 1
_PATIENCE = 10.0  # seconds to wait for another run that is saving, which takes it a few milliseconds


@dataclass(frozen=True)
class Answers:
    """The answers to one question.

    Attributes:
        first: what counts.
        last: what was answered when it was tried again.
    """

    first: Answer
    last: Answer


def progress_file() -> Path:
    """Where it is kept: in the data folder of whoever runs this."""
    return Path(platformdirs.user_data_dir("lightning-remat")) / "quiz.json"


class Progress:
    """The answers to a bank's questions, written down at once with each new one.

    Args:
        bank: whose questions.
        path: the file. Another run may write to it meanwhile.

    Attributes:
        damaged: where a file that could not be understood was put; None: there was none.
        problem: why answers cannot be kept; None: they can.
    """

    def __init__(self, bank: Bank, path: Path) -> None:
        self.path = path
        self.damaged: Path | None = None
        self.problem: str | None = None
        self._items = {question.id: Item.of(question) for question in bank.questions}
        self._entries: dict[str, Any] = {}  # as the file has them, those of other editions of the bank included
        self._answers: dict[str, Answers] = {}
        # To look at the quiz leaves nothing behind, so there is no lock for a file that is not there.
        with self._alone() if os.path.exists(path) else contextlib.nullcontext():
            self._read()

    def __contains__(self, question: Question) -> bool:
        return question.id in self._answers

    def first(self, questions: Iterable[Question]) -> dict[str, Answer]:
        """The first answers to those of the questions that were answered, by id."""
        return {one.id: self._answers[one.id].first for one in questions if one in self}

    def right(self, questions: Iterable[Question]) -> int:
        """How many were answered rightly at first."""
        return sum(is_right(one, self._answers[one.id].first) for one in questions if one in self)

    def missed(self, questions: Iterable[Question]) -> list[Question]:
        """Those whose last answer was wrong."""
        return [one for one in questions if one in self and not is_right(one, self._answers[one.id].last)]

    def answer(self, question: Question, answer: Answer) -> None:
        """Remember an answer, as the first one if there was none yet."""
        with self._alone():
            self._read()
            known = self._answers.get(question.id)
            self._answers[question.id] = both = Answers(known.first if known else answer, answer)
            self._entries[question.id] = {
                "of": _digest(self._items[question.id]),
                "first": as_json(both.first),
                "last": as_json(both.last),
            }
            self._write()

    def start_over(self, questions: Iterable[Question]) -> None:
        """Forget the answers to some questions."""
        with self._alone():
            self._read()
            for question in questions:
                self._answers.pop(question.id, None)
                self._entries.pop(question.id, None)
            self._write()

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Between reading and writing no other run does either. Where there are no locks, it goes on without one."""
        with contextlib.ExitStack() as stack:
            if self.problem is None:
                with contextlib.suppress(OSError, NotImplementedError):  # what is wrong will show in writing
                    self.path.parent.mkdir(parents=True, exist_ok=True)
                    stack.enter_context(FileLock(self.path.with_suffix(".lock"), timeout=_PATIENCE))
            yield

    def _read(self) -> None:
        """Take over what the file has; if it cannot be read or written, what is known here stays."""
        if self.problem is not None:
            return
        try:
            content = json.loads(self.path.read_text(encoding="utf-8-sig"))
        except FileNotFoundError:
            content = {"format": _FORMAT, "answers": {}}
        except OSError as error:
            self.problem = error.strerror or str(error)
            return
        except (ValueError, RecursionError):  # not UTF-8, or not JSON
            content = None
        entries = content.get("answers") if isinstance(content, dict) and content.get("format") == _FORMAT else None
        if not isinstance(entries, dict):
            self._put_aside()
            entries = {}
        self._entries = entries
        found = {id: _understood(item, entries.get(id)) for id, item in self._items.items()}
        self._answers = {id: answers for id, answers in found.items() if answers is not None}

    def _put_aside(self) -> None:
        aside, number = self.path.with_name("quiz.damaged.json"), 1
        while aside.exists():  # what was put there before may be all that is left of a long course
            number += 1
            aside = self.path.with_name(f"quiz.damaged.{number}.json")
        try:
            os.replace(self.path, aside)
        except OSError as error:
            self.problem = error.strerror or str(error)
        else:
            self.damaged = aside

    def _write(self) -> None:
        if self.problem is not None:
            return
        text = json.dumps({"format": _FORMAT, "answers": self._entries}, indent=1)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            # Beside it and then in its place, so that there is a whole file at any time.
            handle, name = tempfile.mkstemp(dir=self.path.parent, prefix="quiz.", suffix=".tmp")
            try:
                with os.fdopen(handle, "w", encoding="utf-8") as file:
                    file.write(text)
                os.replace(name, self.path)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(name)
                raise
        except OSError as error:
            self.problem = error.strerror or str(error)


def _digest(item: Item) -> str:
    """Changes when an answer that is remembered would no longer mean the same."""
    return hashlib.sha256(json.dumps(item.data()).encode()).hexdigest()[:8]


def _understood(item: Item, entry: Any) -> Answers | None:
    """What is remembered about a question, if it still is about this one."""
    if not isinstance(entry, dict) or entry.get("of") != _digest(item):
        return None
    found = []
    for key in ("first", "last"):
        answer: Any = entry.get(key)
        answer = tuple(answer) if isinstance(answer, list) else answer
        try:
            found.append(item.value(item.index(answer)))
        except (ValueError, TypeError):
            return None
    return Answers(*found)
