"""Answers are made by running code, and what the code says is what the file has."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_remat.quiz import answers
from lightning_remat.quiz.answers import AnswerError, make_answer, make_answers
from lightning_remat.quiz.bank import load_bank

TINY = Path(__file__).parent / "tiny"
BANK = load_bank(TINY, answers=False)
SINGLE, SEVERAL, NUMBER = (BANK.question(id) for id in ("what-it-prints", "which-are-even", "two-and-two"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(TINY, tmp_path / "quiz"))


def test_the_command(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = folder / "answers.json"
    before = path.read_text()
    assert answers.main(["--check", "--folder", str(folder)]) == 0
    path.unlink()
    assert answers.main(["--check", "--folder", str(folder)]) == 1
    assert not path.exists()
    assert answers.main(["--folder", str(folder)]) == 0
    assert path.read_text() == before
    path.write_text(before.replace("repeated", "doubled"))
    assert answers.main(["--check", "--folder", str(folder)]) == 1
    assert capsys.readouterr().out.count("is not what the code says") == 2
    (folder / "sums.toml").write_text((folder / "sums.toml").read_text().replace("print(x * 2)", "print(y)"))
    assert answers.main(["--folder", str(folder)]) == 1
    said = capsys.readouterr().err
    assert "sums.toml, question what-it-prints: its run failed" in said
    assert "print(y)" in said


def test_all_are_made_in_the_order_of_ids() -> None:
    assert make_answers(BANK) == json.loads((TINY / "answers.json").read_text())
    assert list(make_answers(BANK)) == ["how-long", "what-it-prints"]


@pytest.mark.parametrize(
    ("question", "run", "answer"),
    [
        (SINGLE, "print('doubled')", "doubled"),
        (SINGLE, "print([2, 4])", "doubled"),
        (SINGLE, "print('\\n  [2, 4]  \\n')", "doubled"),
        (SEVERAL, "print('four')\nprint('two')", ["two", "four"]),
        (NUMBER, "print(-3)", -3),
        (NUMBER, "def f(n): return 1 if n == 0 else n * f(n - 1)\nprint(f(3))", 6),
        (NUMBER, "import torch\nprint(torch.get_num_threads())", 1),
    ],
)
def test_what_is_printed_is_the_answer(question: Any, run: str, answer: Any) -> None:
    assert make_answer(replace(question, run=run)) == answer


@pytest.mark.parametrize(
    ("question", "run", "message"),
    [
        (SINGLE, "print('other')", r"printed 'other\\n'; 'other' is none of its choices \(doubled, \[2, 4\], rep"),
        (SINGLE, "pass", r"printed '', but must print one line"),
        (SINGLE, "print('doubled')\nprint('repeated')", r"but must print one line"),
        (SEVERAL, "print('two')\nprint('two')", r"one line for each right choice"),
        (SEVERAL, "pass", r"one line for each right choice"),
        (NUMBER, "print(4.0)", r"question two-and-two: its run printed '4.0\\n', which is no integer"),
        (NUMBER, "print(4)\nprint(4)", r"which is no integer"),
    ],
)
def test_what_is_no_answer(question: Any, run: str, message: str) -> None:
    with pytest.raises(AnswerError, match=message):
        make_answer(replace(question, run=run))


def test_facts_are_executed() -> None:
    assert make_answer(NUMBER) is None
    with pytest.raises(AnswerError, match=r"question two-and-two: its check failed\n(.|\n)*assert 2 \+ 2 == 5"):
        make_answer(replace(NUMBER, check="assert 2 + 2 == 5\n"))
    # Code that is only shown must run, too.
    with pytest.raises(AnswerError, match="its code failed"):
        make_answer(replace(SEVERAL, code="1 / 0\n"))


def test_nothing_is_carried_over(allow_threads: int) -> None:
    """Neither names, nor random numbers, nor threads, from one question to the next or to whoever asked."""
    draw = replace(NUMBER, run="import torch\nassert 'x' not in dir()\nx = 1\nprint(torch.randint(1000, ()).item())")
    torch.manual_seed(3)
    before = torch.get_rng_state()
    assert make_answer(draw) == make_answer(draw)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.get_num_threads() == allow_threads
    # What the code itself prints is no answer.
    assert make_answer(replace(NUMBER, code="print('x')\n", run="print(4)\n")) == 4


@pytest.fixture
def allow_threads() -> Any:
    torch.set_num_threads(2)
    yield 2
    torch.set_num_threads(1)
