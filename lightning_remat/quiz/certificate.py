"""Certificates: an ID that holds the answers themselves, so that anyone with the bank can grade them again.

The ID shows that these answers earn this score, and that it was made for this name. It does not show who answered,
whether unaided, at which attempt, or that the day is true: it is made without any secret, and so by whoever likes to.
What an organiser vouches for can be signed (:mod:`lightning_remat.quiz.signing`).

Version 1, in bytes::

    version 1 | digest of the exam 5 | day 2 | name tag 5 | answers, fixed width for the exam | check 3

The day counts from 2025-01-01. The answers are one number in mixed radix, the first question the most significant. The
check is the start of the SHA-256 of all before it: against typing errors, not against forgery. The text is base32
(RFC 4648) without padding, in groups of six. The verify page of the site reads the same (``quiz/vectors.json``).
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
import unicodedata
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import date, timedelta
from typing import Literal, TypeAlias

from lightning_remat.errors import RematError
from lightning_remat.quiz.bank import Answer, Bank, Exam
from lightning_remat.quiz.grading import Core, grade

VERSION = 1
EPOCH = date(2025, 1, 1)
_DIGEST, _DAY, _NAME, _CHECK = 5, 2, 5, 3
_HEAD = 1 + _DIGEST + _DAY + _NAME
_GROUP = 6
# What cannot be seen: controls that are no spaces, what Unicode calls default ignorable (joiners, marks of direction,
# fillers), the blank of Braille, and what is no character. Written out, since each language knows another Unicode.
UNSEEN = (
    "\x00-\x08\x0e-\x1b\x7f-\x84\x86-\x9f\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u202a-\u202e"
    "\u2060-\u206f\u2800\u3164\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufff8\ufffe\uffff\ud800-\udfff"
    "\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e0fff"
)
_SPACES = "\t\n\v\f\r \u00a0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000\u0085\u001c-\u001f"

Code: TypeAlias = Literal["mistyped", "version", "bank", "name"]
_MESSAGES: dict[Code, str] = {
    "mistyped": "this is no certificate's ID: a character is wrong, missing or too many",
    "version": "this ID is of a version that is not known here: a newer lightning-remat may know it",
    "bank": "this ID is about an exam that is not in this bank of questions: another release may have it",
    "name": "a certificate needs a name with at least one visible character",
}


class CertificateError(RematError, ValueError):
    """An ID that cannot be graded, or a name that cannot be put into one.

    Attributes:
        code: ``"mistyped"``, ``"version"``, ``"bank"`` or ``"name"``.
    """

    def __init__(self, code: Code) -> None:
        super().__init__(_MESSAGES[code])
        self.code: Code = code

    def __reduce__(self) -> tuple[type[CertificateError], tuple[Code]]:
        """By its code: errors travel between processes."""
        return type(self), (self.code,)


@dataclass(frozen=True)
class Verified:
    """What an ID says, graded again.

    Attributes:
        exam: id of the exam.
        right: how many answers are right.
        of: how many questions there are.
        passed: whether that reaches the pass mark.
        day: when it says that it was made.
        name_matches: whether it was made for this name; None: no name was given.
        right_questions: ids of the questions that were answered rightly.
        answers: all answers, by the ids of their questions.
    """

    exam: str
    right: int
    of: int
    passed: bool
    day: date
    name_matches: bool | None
    right_questions: tuple[str, ...]
    answers: Mapping[str, Answer]


def issue(exam: Exam | Core, answers: Mapping[str, Answer], name: str, day: date) -> str:
    """Make an ID.

    Args:
        exam: what was answered.
        answers: one to each of its questions, by the questions' ids. Whether they pass is not looked at.
        name: whom for.
        day: from 2025-01-01 to 2204-06-07.

    Raises:
        CertificateError: If the name is empty (``name``).
        ValueError: If an answer is missing or is none to its question, or the day cannot be written.
    """
    core = exam if isinstance(exam, Core) else Core.of(exam)
    days = (day - EPOCH).days
    if not 0 <= days < 256**_DAY:
        raise ValueError(f"{day} cannot be written into a certificate: days from {EPOCH} on can, for {256**_DAY} days")
    number = 0
    for item in core.items:
        if item.id not in answers:
            raise ValueError(f"there is no answer to the question {item.id!r}: a certificate needs all of them")
        number = number * item.size + item.index(answers[item.id])
    body = b"".join(
        (
            bytes([VERSION]),
            core.digest[:_DIGEST],
            days.to_bytes(_DAY, "big"),
            name_tag(name),
            number.to_bytes(core.width, "big"),
        )
    )
    return to_text(body + _check(body))


def verify(bank: Bank | Iterable[Exam | Core], text: str, name: str | None = None) -> Verified:
    """Grade an ID again.

    Args:
        bank: where its exam is looked for.
        text: the ID; case, spaces and ``-`` do not matter.
        name: compared with the one it was made for.

    Raises:
        CertificateError: If it cannot be graded, or the name is empty.
    """
    raw = to_bytes(text)
    if raw[0] != VERSION:
        raise CertificateError("version")
    digest, rest = raw[1 : 1 + _DIGEST], raw[1 + _DIGEST : -_CHECK]
    day, tag, packed = rest[:_DAY], rest[_DAY : _DAY + _NAME], rest[_DAY + _NAME :]
    for exam in bank.exams if isinstance(bank, Bank) else bank:
        core = exam if isinstance(exam, Core) else Core.of(exam)
        if core.digest[:_DIGEST] == digest and core.width == len(packed):
            break
    else:
        raise CertificateError("bank")
    answers: dict[str, Answer] = {}
    number = int.from_bytes(packed, "big")
    for item in reversed(core.items):
        number, index = divmod(number, item.size)
        answers[item.id] = item.value(index)
    if number:
        raise CertificateError("mistyped")
    answers = dict(reversed(answers.items()))
    score = grade(core, answers)
    return Verified(
        exam=core.exam,
        right=len(score.right),
        of=score.of,
        passed=score.passed,
        day=EPOCH + timedelta(int.from_bytes(day, "big")),
        name_matches=None if name is None else name_tag(name) == tag,
        right_questions=score.right,
        answers=answers,
    )


def normal_name(name: str) -> str:
    """A name as it is compared: without regard to case, to spaces, and to how its characters are composed.

    Characters that cannot be seen are left out, too: keyboards put a zero width joiner into Devanagari, or do not, and
    what is copied brings marks of direction along.

    Raises:
        CertificateError: If nothing is left (``name``).
    """
    name = unicodedata.normalize("NFC", re.sub(f"[{UNSEEN}]", "", name))
    name = unicodedata.normalize("NFC", name.lower())
    words = [word for word in re.split(f"[{_SPACES}]+", name) if word]
    if not words:
        raise CertificateError("name")
    return " ".join(words)


def name_tag(name: str) -> bytes:
    """What an ID holds of a name: enough to compare it, too little to tell it."""
    return hashlib.sha256(normal_name(name).encode()).digest()[:_NAME]


def to_text(raw: bytes) -> str:
    """Bytes, with their check, as they are shown."""
    text = base64.b32encode(raw).decode().rstrip("=")
    return "-".join(text[i : i + _GROUP] for i in range(0, len(text), _GROUP))


def to_bytes(text: str) -> bytes:
    """The bytes of an ID, its check included, which is right.

    Raises:
        CertificateError: ``mistyped``.
    """
    plain = re.sub(f"[{_SPACES}-]", "", text)
    try:
        # Only ASCII: str.upper would make an S of the long s, and two of the sharp one.
        raw = base64.b32decode(plain.encode("ascii").upper() + b"=" * (-len(plain) % 8))
    except (UnicodeEncodeError, binascii.Error) as error:
        raise CertificateError("mistyped") from error
    # What base32 leaves unused in the last character must be zero, or one ID would have several spellings.
    if len(raw) <= _HEAD + _CHECK or to_text(raw).replace("-", "") != plain.upper():
        raise CertificateError("mistyped")
    if _check(raw[:-_CHECK]) != raw[-_CHECK:]:
        raise CertificateError("mistyped")
    return raw


def _check(body: bytes) -> bytes:
    return hashlib.sha256(body).digest()[:_CHECK]
