"""Item statistics, against a calculation by hand, against the formula, and for what cannot be read."""

from __future__ import annotations

from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scipy.stats import pearsonr

from lightning_remat.quiz.bank import load_bank
from lightning_remat.quiz.certificate import issue
from lightning_remat.quiz.grading import Core
from lightning_remat.quiz.stats import StatisticsError, Unread, analyse, collect, discrimination
from tests.quiz import vectors

BANK = load_bank(Path(__file__).parent / "tiny")
DAY = date(2026, 11, 29)
RIGHT: dict[str, Any] = {question.id: question.answer for question in BANK.questions}
WRONG: dict[str, Any] = {
    "two-and-two": 5,
    "what-it-prints": "doubled",
    "which-are-even": ("two", "three"),
    "how-long": 0,
    "a-vowel": "b",
}


def learner(number: int, right: str, exam: str = "all", **other: Any) -> str:
    """An ID of somebody who was right (1) or wrong (0) in each question, in order."""
    questions = BANK.exam(exam).questions
    answers = {q.id: (RIGHT if one == "1" else WRONG)[q.id] for q, one in zip(questions, right, strict=True)}
    return issue(BANK.exam(exam), answers | other, f"learner {number}", DAY)


def test_by_hand(tmp_path: Path) -> None:
    """Four learners. Question 1 is right for A, B, C; their other scores are 3, 2, 0, and 1 for D.

    Its mean score of others, right: 5/3; wrong: 1. Standard deviation of 3, 2, 0, 1 (population): sqrt(5)/2. Share
    right p = 3/4. Point-biserial: (5/3 - 1) / (sqrt(5)/2) * sqrt(3/4 * 1/4) = (2/3) * (2/sqrt(5)) * (sqrt(3)/4).
    """
    path = tmp_path / "ids.txt"
    rows = ["11101", "11100", "10000", "01000"]
    path.write_text("\n".join(learner(n, row) for n, row in enumerate(rows)))
    found, unread = collect([path], BANK)
    assert unread == []
    (exam,) = analyse(BANK, found)
    assert (exam.exam, exam.learners, exam.passed, exam.mean) == ("all", 4, 1, 9 / 4)
    first, second, third, fourth, fifth = exam.questions
    assert (first.right, first.difficulty) == (3, 0.75)
    assert first.discrimination == pytest.approx((2 / 3) * (2 / 5**0.5) * (3**0.5 / 4))
    assert [one.right for one in exam.questions] == [3, 3, 2, 0, 1]
    assert fourth.discrimination is None  # nobody was right: nobody can be told from anybody
    assert first.chosen == {"4": 3, "5": 1}
    assert second.chosen == {"doubled": 1, "repeated": 3}
    assert third.chosen == {"two": 4, "three": 2, "four": 2}
    assert fifth.chosen == {"a": 1, "b": 3, "c": 0}


tables = st.integers(2, 12).flatmap(
    lambda questions: st.lists(st.lists(st.booleans(), min_size=questions, max_size=questions), min_size=2, max_size=30)
)


@given(tables)
def test_discrimination_is_a_correlation(table: list[list[bool]]) -> None:
    """The point-biserial correlation is Pearson's; where a side does not vary there is none."""
    scores = np.array(table, dtype=float)
    for column in range(scores.shape[1]):
        item = scores[:, column]
        rest = np.delete(scores, column, axis=1).sum(axis=1)
        found = discrimination(table, column)
        if len(set(item)) == 1 or len(set(rest)) == 1:
            assert found is None
        else:
            assert found == pytest.approx(pearsonr(item, rest).statistic, abs=1e-12)


def test_one_learner_says_nothing_of_discrimination(tmp_path: Path) -> None:
    (tmp_path / "ids").write_text(learner(1, "11111"))
    (exam,) = analyse(BANK, collect([tmp_path / "ids"], BANK)[0])
    assert [one.discrimination for one in exam.questions] == [None] * 5
    assert analyse(BANK, []) == []


def test_each_exam_has_its_own(tmp_path: Path) -> None:
    lines = [learner(1, "11111"), learner(2, "110", "first"), learner(3, "111", "first")]
    (tmp_path / "ids").write_text("\n".join(lines))
    exams = analyse(BANK, collect([tmp_path / "ids"], BANK)[0])
    assert [(one.exam, one.learners) for one in exams] == [("first", 2), ("all", 1)]


def test_what_cannot_be_read(tmp_path: Path) -> None:
    """Each with its line and the reason; the rest counts."""
    other = issue(Core.from_data(vectors.OTHER), {"a-letter": "a"}, "x", DAY)
    good = learner(1, "11111")
    (tmp_path / "a").write_text(
        f"# collected in November\n\n{good}\n  {good.lower()}  \n{good[:-1]}\nhello\n{other}\n"
        f"{vectors.resealed(good, {0: 9})}\n"
    )
    (tmp_path / "b").write_text(f"{learner(2, '11110')}\n{good}")
    found, unread = collect([tmp_path / "a", tmp_path / "b"], BANK)
    a, b = str(tmp_path / "a"), str(tmp_path / "b")
    assert len(found) == 2
    assert unread == [
        Unread(a, 4, "twice", f"{a}:3"),
        Unread(a, 5, "mistyped"),
        Unread(a, 6, "mistyped"),
        Unread(a, 7, "bank"),
        Unread(a, 8, "version"),
        Unread(b, 2, "twice", f"{a}:3"),
    ]


@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
def test_tables(tmp_path: Path, delimiter: str) -> None:
    """As spreadsheets write them: with a mark at the beginning, quotes, line breaks in fields, columns in any order."""
    rows = [
        ["Group", "Name", " ID "],
        ['"one\nand more"', '"Learner ""1"""', learner(1, "11111")],
        ["x", " Learner   2", learner(2, "11110")],
        ["x", "", learner(3, "11100")],
        ["", "", ""],
        ["x", "\u200d", learner(4, "11100")],
        ["x"],
    ]
    path = tmp_path / "ids.csv"
    path.write_text("\n".join(delimiter.join(row) for row in rows), encoding="utf-8-sig")
    found, unread = collect([path], BANK)
    assert [(one.right, one.name_matches) for one in found] == [(4, True), (3, None)]
    assert unread == [
        Unread(str(path), 3, "other_name", 'Learner "1"'),
        Unread(str(path), 7, "name"),
        Unread(str(path), 8, "mistyped"),
    ]


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(StatisticsError, match="missing cannot be read: No such file"):
        collect([tmp_path / "missing"], BANK)
    (tmp_path / "picture").write_bytes(b"\x89PNG\xff\xfe")
    with pytest.raises(StatisticsError, match="picture is not text in UTF-8"):
        collect([tmp_path / "picture"], BANK)
    (tmp_path / "empty").touch()
    assert collect([tmp_path / "empty"], BANK) == ([], [])


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])  # each example writes the whole file anew
@given(st.text())
def test_any_text_is_got_through(tmp_path: Path, text: str) -> None:
    path = tmp_path / "ids"
    path.write_text(text, encoding="utf-8")
    found, unread = collect([path], BANK)
    assert found == []
    assert all(1 <= one.line <= len(text.splitlines()) for one in unread)


def test_lines_are_those_of_an_editor(tmp_path: Path) -> None:
    """Not what else Unicode breaks lines at: a name may have it, and a header a break inside quotes."""
    path = tmp_path / "ids.csv"
    ids = [learner(n, "11101") for n in range(3)]
    path.write_bytes(
        f'"First\nseen",id,name\r\n,{ids[0]},learner\x0b0\r\n,{ids[1]},learner\u20281\r\n,{ids[2]},x\r\n'.encode()
    )
    found, unread = collect([path], BANK)
    assert len(found) == 2
    assert unread == [Unread(str(path), 5, "other_name", "x")]
    path.write_bytes("\r".join(ids).encode())
    assert len(collect([path], BANK)[0]) == 3


def test_a_field_without_end_is_named(tmp_path: Path) -> None:
    path = tmp_path / "ids.csv"
    path.write_text(f"id,name\n{learner(0, '11101')},{'x' * 200_000}\n")
    with pytest.raises(StatisticsError, match=r"ids\.csv is no CSV that can be read: field larger than"):
        collect([path], BANK)


def test_names_of_others_cannot_steer_a_terminal(tmp_path: Path) -> None:
    path = tmp_path / "ids.csv"
    path.write_text(f"id,name\n{learner(0, '11101')},\x1b]0;pwned\x07x\x9b2J\n", encoding="utf-8")
    (unread,) = collect([path], BANK)[1]
    assert unread.about == " ]0;pwned x 2J"


def test_an_exam_is_digested_once_and_not_for_each_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or a large class takes minutes."""
    made: list[str] = []
    of = Core.of
    monkeypatch.setattr(Core, "of", lambda exam: made.append(exam.id) or of(exam))
    path = tmp_path / "ids.txt"
    path.write_text("\n".join(learner(n, "11101") for n in range(20)))
    made.clear()
    assert len(collect([path], BANK)[0]) == 20
    assert made == [exam.id for exam in BANK.exams]
