"""Certificates: the vectors that Python and JavaScript share, round trips, and what is refused."""

from __future__ import annotations

import base64
import hashlib
import json
import pickle
from datetime import date, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_remat.quiz.certificate import (
    EPOCH,
    CertificateError,
    issue,
    name_tag,
    normal_name,
    to_bytes,
    to_text,
    verify,
)
from lightning_remat.quiz.grading import Core, Item, grade
from tests.quiz import vectors

VECTORS = json.loads(vectors.PATH.read_text(encoding="utf-8"))
CORES = [Core.from_data(exam["core"]) for exam in VECTORS["exams"]]
ALPHABET = "ABCDEFGHIJKLMNOPQRSTUVWXYZ234567"
DAY = date(2026, 11, 29)


def of(rows: str) -> Any:
    """A case for each vector of a part of the file."""
    return pytest.mark.parametrize("vector", [pytest.param(row, id=row["what"]) for row in VECTORS[rows]])


def test_the_file_is_what_its_script_makes() -> None:
    """A change of the format shows as a change of the file."""
    assert vectors.PATH.read_text(encoding="utf-8") == vectors.content()
    assert sum(len(VECTORS[part]) for part in ("issued", "read", "names", "signed")) >= 30
    assert {row.get("error") for row in VECTORS["read"]} == {None, "mistyped", "version", "bank", "name"}
    assert {row["exam"] for row in VECTORS["issued"]} == {core.exam for core in CORES}


def test_exams_of_the_vectors() -> None:
    for core, exam in zip(CORES, VECTORS["exams"], strict=True):
        assert core.data() == exam["core"]
        assert core.digest[:5].hex() == exam["digest"]
        assert core.width == exam["width"]


@of("issued")
def test_issued(vector: dict[str, Any]) -> None:
    core = next(core for core in CORES if core.exam == vector["exam"])
    answers = vectors.frozen(vector["answers"])
    assert issue(core, answers, vector["name"], date.fromisoformat(vector["day"])) == vector["id"]


@of("read")
def test_read(vector: dict[str, Any]) -> None:
    if "error" in vector:
        with pytest.raises(CertificateError) as caught:
            verify(CORES, vector["id"], vector["name"])
        assert caught.value.code == vector["error"]
        assert pickle.loads(pickle.dumps(caught.value)).code == vector["error"]
        return
    found = verify(CORES, vector["id"], vector["name"])
    assert found.day.isoformat() == vector["day"]
    assert list(found.right_questions) == vector["right_questions"]
    assert found.answers == vectors.frozen(vector["answers"])
    for field in ("exam", "right", "of", "passed", "name_matches"):
        assert getattr(found, field) == vector[field]


@of("names")
def test_names(vector: dict[str, Any]) -> None:
    if "error" in vector:
        with pytest.raises(CertificateError) as caught:
            name_tag(vector["name"])
        assert caught.value.code == vector["error"]
    else:
        assert name_tag(vector["name"]).hex() == vector["tag"]


def test_the_layout_by_hand() -> None:
    """Byte for byte, written out once without the code that makes it."""
    core = Core("tiny", 80, (Item("q", "single", ("a", "b", "c"), "b"), Item("n", "number", (-1, 1), 0)))
    text = '["tiny",80,[["q","single",["a","b","c"],"b"],["n","number",[-1,1],0]]]'
    body = b"\x01" + hashlib.sha256(text.encode()).digest()[:5]
    body += (2 * 256 + 189 - 1 - 511).to_bytes(2, "big")  # 189 days from the first
    body += hashlib.sha256(b"ada").digest()[:5]
    body += bytes([1 * 3 + 2])  # b, then 1
    raw = body + hashlib.sha256(body).digest()[:3]
    made = issue(core, {"q": "b", "n": 1}, "Ada", EPOCH + timedelta(189))
    assert made.replace("-", "") == base64.b32encode(raw).decode().rstrip("=")
    assert [len(group) for group in made.split("-")[:-1]] == [6] * (len(made) // 7)


items = st.one_of(
    st.builds(
        lambda n, i: Item("", "single", tuple(f"c{k}" for k in range(n)), f"c{i % n}"),
        st.integers(2, 26),
        st.integers(0, 25),
    ),
    st.builds(
        lambda n, bits: Item(
            "", "several", tuple(f"c{k}" for k in range(n)), tuple(f"c{k}" for k in range(n) if bits >> k & 1)
        ),
        st.integers(2, 8),
        st.integers(1, 255),
    ),
    st.builds(
        lambda low, size, at: Item("", "number", (low, low + size), low + at % (size + 1)),
        st.integers(-(2**40), 2**40),
        st.integers(1, 2**40),
        st.integers(0),
    ),
)


@st.composite
def exams(draw: st.DrawFn) -> tuple[Core, dict[str, Any]]:
    """Any exam, with any answers to it."""
    found = [
        Item(f"q{n}", one.kind, one.options, one.answer)
        for n, one in enumerate(draw(st.lists(items, min_size=1, max_size=50)))
    ]
    answers = {one.id: one.value(draw(st.integers(0, one.size - 1))) for one in found}
    return Core("exam", draw(st.integers(1, 100)), tuple(found)), answers


@given(exams(), st.text(min_size=1), st.integers(0, 2**16 - 1))
def test_round_trip(made: tuple[Core, dict[str, Any]], name: str, days: int) -> None:
    """What is graded again is what was answered, with the score that it has."""
    core, answers = made
    day = EPOCH + timedelta(days)
    try:
        normal_name(name)
    except CertificateError:
        name = "Ada"
    text = issue(core, answers, name, day)
    assert len(to_bytes(text)) == 16 + core.width
    found = verify([CORES[0], core], text, name)
    score = grade(core, answers)
    assert (found.answers, found.day, found.exam) == (answers, day, "exam")
    assert list(found.answers) == list(answers)
    assert (found.right_questions, found.of, found.passed) == (score.right, score.of, score.passed)
    assert found.name_matches is True
    assert verify([core], text).name_matches is None
    assert verify([core], text, name + " x").name_matches is False
    assert Core.from_data(json.loads(json.dumps(core.data()))) == core
    with pytest.raises(CertificateError) as caught:
        verify(CORES, text)
    assert caught.value.code == "bank"


@given(st.sampled_from(VECTORS["issued"]), st.integers(0), st.sampled_from(ALPHABET + "0189=*\u0130\u00df\u0664"))
def test_a_changed_character_is_refused(vector: dict[str, Any], place: int, other: str) -> None:
    plain = vector["id"].replace("-", "")
    place %= len(plain)
    changed = plain[:place] + other + plain[place + 1 :]
    if changed == plain:
        return
    with pytest.raises(CertificateError) as caught:
        verify(CORES, changed)
    assert caught.value.code == "mistyped"


def test_every_changed_letter_of_one_id_is_refused() -> None:
    """All of them, the last one with its unused bits included."""
    for vector in VECTORS["issued"][:4]:
        plain = vector["id"].replace("-", "")
        for place, letter in enumerate(plain):
            for other in set(ALPHABET) - {letter}:
                with pytest.raises(CertificateError):
                    verify(CORES, plain[:place] + other + plain[place + 1 :])


@given(st.text())
def test_any_text_is_read_or_refused(text: str) -> None:
    with pytest.raises(CertificateError):
        verify(CORES, text)


@given(st.binary(min_size=14, max_size=60))
def test_bytes_have_one_spelling(body: bytes) -> None:
    raw = body + hashlib.sha256(body).digest()[:3]
    assert to_bytes(to_text(raw)) == raw
    assert to_bytes(to_text(raw).lower().replace("-", " ")) == raw


@given(st.text())
def test_a_normal_name_is_normal(name: str) -> None:
    """To normalise again changes nothing, nor does case or the way to compose."""
    try:
        once = normal_name(name)
    except CertificateError:
        return
    assert normal_name(once) == once
    assert normal_name(f"\u3000{name}\u200b ") == once


def test_half_a_character_in_a_name() -> None:
    """As a broken terminal passes it on: no picture can show it, so it is no part of the name; JavaScript agrees."""
    assert name_tag("Ada \udce9") == name_tag("ada")


def test_what_cannot_be_issued() -> None:
    core = CORES[0]
    for day in (date(2024, 12, 31), EPOCH + timedelta(2**16)):
        with pytest.raises(ValueError, match=f"{day} cannot be written"):
            issue(core, {"a-letter": "a"}, "Ada", day)
    with pytest.raises(ValueError, match="no answer to the question 'a-letter'"):
        issue(core, {}, "Ada", DAY)
    for wrong in ("d", 1, ("a",)):
        with pytest.raises(ValueError, match="is no answer to the question 'a-letter'"):
            issue(core, {"a-letter": wrong}, "Ada", DAY)
    with pytest.raises(CertificateError, match="at least one visible character"):
        issue(core, {"a-letter": "a"}, "\u200d", DAY)
