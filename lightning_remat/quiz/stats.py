"""Item analysis: how an exam's questions fared with many learners, from their certificates' IDs.

Classical test theory. *Difficulty* is the share of learners who answered a question rightly. *Discrimination* is the
corrected item-total correlation: the point-biserial correlation of being right in the question with the number of
right answers in all *other* questions, so that the question is not compared with itself (Henrysson, "Correction of
item-total correlations in item analysis", Psychometrika 28, 1963; the formula is SciPy's ``pointbiserialr``). Near or
below zero, those who know more do not answer it better: its text, or its answer, may be at fault.

Weaknesses: an ID is made only where an exam was passed, unless an organiser collects others, and this restricts the
range of scores, which lowers correlations. With few learners all of these figures are coarse.
"""

from __future__ import annotations

import csv
import io
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lightning_remat.errors import RematError
from lightning_remat.quiz.bank import Bank, Exam
from lightning_remat.quiz.certificate import CertificateError, Verified, to_bytes, verify
from lightning_remat.quiz.grading import Core

if TYPE_CHECKING:
    import _csv

_CONTROLS = "[\x00-\x1f\x7f-\x9f]"  # which a terminal would obey


class StatisticsError(RematError, ValueError):
    """A file of IDs that cannot be read at all."""


@dataclass(frozen=True)
class Unread:
    """A line that does not count.

    Attributes:
        file: as it was named.
        line: its number, from 1.
        problem: ``"mistyped"``, ``"version"``, ``"bank"`` or ``"name"`` as in :class:`CertificateError`;
            ``"other_name"``: made for another name than the line has; ``"twice"``: the ID was there before.
        about: that name, or where it was there before.
    """

    file: str
    line: int
    problem: str
    about: str = ""


@dataclass(frozen=True)
class QuestionStatistics:
    """One question.

    Attributes:
        id: of the question.
        right: how many answered it rightly.
        difficulty: their share.
        discrimination: None where it is undefined: all were right or none, or all had the same in the others.
        chosen: how many gave which answer, the most frequent numbers first. Where several choices can be chosen, how
            many chose each of them.
    """

    id: str
    right: int
    difficulty: float
    discrimination: float | None
    chosen: dict[str, int]


@dataclass(frozen=True)
class ExamStatistics:
    """One exam.

    Attributes:
        exam: its id.
        learners: how many IDs count.
        passed: how many of them passed.
        mean: of right answers.
        questions: in the exam's order.
    """

    exam: str
    learners: int
    passed: int
    mean: float
    questions: tuple[QuestionStatistics, ...]


def collect(files: Iterable[Path], bank: Bank) -> tuple[list[Verified], list[Unread]]:
    """Grade the IDs of some files: one a line, or CSV with a column ``id`` and perhaps one ``name``.

    Empty lines, and those that begin with ``#``, do not count where it is one a line.

    Raises:
        StatisticsError: If a file cannot be read.
    """
    found: list[Verified] = []
    unread: list[Unread] = []
    seen: dict[bytes, str] = {}
    cores = [Core.of(exam) for exam in bank.exams]  # whose digests are made once, not for each ID
    for path in files:
        for line, text, name in _lines(path):
            try:
                verified = verify(cores, text, name)
                raw = to_bytes(text)
            except CertificateError as error:
                unread.append(Unread(str(path), line, error.code))
                continue
            if verified.name_matches is False:
                unread.append(Unread(str(path), line, "other_name", re.sub(_CONTROLS, " ", name or "")))
            elif raw in seen:
                unread.append(Unread(str(path), line, "twice", seen[raw]))
            else:
                seen[raw] = f"{path}:{line}"
                found.append(verified)
    return found, unread


def analyse(bank: Bank, collected: Iterable[Verified]) -> list[ExamStatistics]:
    """The statistics of every exam that there are IDs of, in the bank's order."""
    by_exam: dict[str, list[Verified]] = {}
    for one in collected:
        by_exam.setdefault(one.exam, []).append(one)
    return [_of_exam(exam, by_exam[exam.id]) for exam in bank.exams if exam.id in by_exam]


def discrimination(right: Sequence[Sequence[bool]] | np.ndarray[Any, Any], question: int) -> float | None:
    """The corrected item-total correlation of a question.

    Args:
        right: one row a learner, one column a question.
        question: which column.

    Returns:
        From -1 to 1; None where it is undefined.
    """
    from scipy.stats import pointbiserialr  # here, because it takes long to import and every command imports this file

    scores = np.asarray(right, dtype=float)
    item = scores[:, question]
    rest = scores.sum(axis=1) - item
    if len(item) < 2 or np.ptp(item) == 0 or np.ptp(rest) == 0:
        return None
    return float(pointbiserialr(item, rest).statistic)


def _of_exam(exam: Exam, learners: list[Verified]) -> ExamStatistics:
    right = np.array([[question.id in one.right_questions for question in exam.questions] for one in learners])
    questions = []
    for column, question in enumerate(exam.questions):
        count = int(right[:, column].sum())
        chosen: Counter[str] = Counter({choice.id: 0 for choice in question.choices})
        for one in learners:
            answer = one.answers[question.id]
            chosen.update(answer if isinstance(answer, tuple) else [str(answer)])
        if question.kind == "number":
            chosen = Counter(dict(sorted(chosen.items(), key=lambda pair: (-pair[1], int(pair[0])))))
        questions.append(
            QuestionStatistics(question.id, count, count / len(learners), discrimination(right, column), dict(chosen))
        )
    passed = sum(one.passed for one in learners)
    return ExamStatistics(exam.id, len(learners), passed, float(right.sum(axis=1).mean()), tuple(questions))


def _lines(path: Path) -> Iterator[tuple[int, str, str | None]]:
    """Number, ID and name of each line that has an ID."""
    try:
        text = path.read_text(encoding="utf-8-sig")  # spreadsheets begin a file with a mark
    except OSError as error:
        raise StatisticsError(f"{path} cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise StatisticsError(f"{path} is not text in UTF-8") from error
    try:
        for delimiter in ",;\t":
            reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter)
            columns = [column.strip().lower() for column in next(reader, [])]
            if "id" in columns:
                yield from _table(reader, columns)
                return
    except csv.Error as error:
        raise StatisticsError(f"{path} is no CSV that can be read: {error}") from error
    for number, row in enumerate(re.split("\r\n|\r|\n", text), 1):
        if row.strip() and not row.strip().startswith("#"):
            yield number, row, None


def _table(reader: _csv.Reader, columns: list[str]) -> Iterator[tuple[int, str, str | None]]:
    for row in reader:
        fields = dict(zip(columns, row, strict=False))
        if any(field.strip() for field in row):
            # A column of names that is empty for one is as none: it says nothing about whom the ID was made for.
            yield reader.line_num, fields.get("id", ""), (fields.get("name") or "").strip() or None
