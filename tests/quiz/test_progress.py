"""Progress is kept, first answers stay first, and no file can stop the quiz."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lightning_remat.quiz import progress as progress_module
from lightning_remat.quiz.bank import Bank, load_bank
from lightning_remat.quiz.progress import Progress, progress_file

BANK = load_bank(Path(__file__).parent / "tiny")
VOWEL, EVEN, SUM = (BANK.question(id) for id in ("a-vowel", "which-are-even", "two-and-two"))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "new" / "quiz.json"


def test_where_it_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert progress_file() == tmp_path / "lightning-remat" / "quiz.json"


def test_answers_are_kept(path: Path) -> None:
    """Across runs, with the first and the last one."""
    progress = Progress(BANK, path)
    assert not path.exists()
    progress.answer(VOWEL, "b")
    progress.answer(EVEN, ("two", "four"))
    progress.answer(VOWEL, "a")
    for again in (progress, Progress(BANK, path)):
        assert again.first(BANK.questions) == {"which-are-even": ("two", "four"), "a-vowel": "b"}
        assert again.right(BANK.questions) == 1
        assert again.missed(BANK.questions) == []
        assert VOWEL in again
        assert SUM not in again
        assert again.damaged is again.problem is None
    progress.answer(SUM, 5)
    assert Progress(BANK, path).missed(BANK.questions) == [SUM]
    assert {entry.name for entry in path.parent.iterdir()} == {"quiz.json", "quiz.lock"}


def test_start_over(path: Path) -> None:
    progress = Progress(BANK, path)
    for question, answer in ((VOWEL, "b"), (SUM, 4)):
        progress.answer(question, answer)
    progress.start_over([VOWEL, EVEN])
    assert progress.first(BANK.questions) == Progress(BANK, path).first(BANK.questions) == {"two-and-two": 4}
    progress.answer(VOWEL, "a")
    assert progress.right([VOWEL]) == 1


def test_two_runs_at_once(path: Path) -> None:
    """Neither loses what the other wrote, and the answer that came first is the first."""
    one, other = Progress(BANK, path), Progress(BANK, path)
    one.answer(VOWEL, "b")
    other.answer(SUM, 4)
    other.answer(VOWEL, "a")
    assert Progress(BANK, path).first(BANK.questions) == {"two-and-two": 4, "a-vowel": "b"}


ANSWERING = """
import sys
from pathlib import Path
from lightning_remat.quiz.bank import load_bank
from lightning_remat.quiz.progress import Progress

bank, path, part = load_bank(), Path(sys.argv[1]), int(sys.argv[2])
progress = Progress(bank, path)
print("ready", flush=True)
input()
for question in bank.questions[part:24:2]:
    progress.answer(question, question.answer)
    if part:
        progress.start_over([question])
        progress.answer(question, question.answer)
"""


def test_two_processes_at_the_same_moment(path: Path) -> None:
    """Both save as fast as they can, and no answer is lost."""
    bank = load_bank()
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", ANSWERING, str(path)]
    both = [
        subprocess.Popen([*command, part], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for part in ("0", "1")
    ]
    for process in both:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in both:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    for process in both:
        process.communicate(timeout=60)
        assert process.returncode == 0
    progress = Progress(bank, path)
    assert progress.first(bank.questions) == {question.id: question.answer for question in bank.questions[:24]}


def test_without_a_lock_it_goes_on(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some network file systems have none, and one that is held for ever must not stop the quiz."""
    path.parent.mkdir()
    monkeypatch.setattr(progress_module, "_PATIENCE", 0.1)
    with FileLock(path.with_suffix(".lock")):
        Progress(BANK, path).answer(SUM, 4)
    assert SUM in Progress(BANK, path)


def edited(**changes: Any) -> Bank:
    """With another question on vowels."""
    topics = [
        replace(topic, questions=tuple(replace(q, **changes) if q == VOWEL else q for q in topic.questions))
        for topic in BANK.topics
    ]
    return replace(BANK, topics=tuple(topics))


def test_a_question_that_was_changed(path: Path) -> None:
    """Other words: the answer counts. Another answer is right: it does not. The file is for both editions."""
    Progress(BANK, path).answer(VOWEL, "a")
    assert VOWEL in Progress(edited(prompt={"en": "?", "es": "?", "hi": "?"}), path)
    assert VOWEL not in Progress(edited(answer="b"), path)
    assert VOWEL not in Progress(edited(id="another-vowel"), path)
    Progress(edited(id="another-vowel"), path).answer(SUM, 4)
    assert Progress(BANK, path).first(BANK.questions) == {"two-and-two": 4, "a-vowel": "a"}


@pytest.mark.parametrize(
    "content", [b"", b"{", b"\xff\xfe", b"[]", b'{"format": 2, "answers": {}}', b'{"format": 1}', b"[" * 100_000]
)
def test_a_damaged_file_is_put_aside(path: Path, content: bytes) -> None:
    path.parent.mkdir()
    path.write_bytes(content)
    progress = Progress(BANK, path)
    assert progress.damaged == path.with_name("quiz.damaged.json")
    assert progress.damaged.read_bytes() == content
    progress.answer(SUM, 4)
    assert Progress(BANK, path).first(BANK.questions) == {"two-and-two": 4}
    assert progress.problem is None


def test_one_damaged_file_does_not_take_the_place_of_another(path: Path) -> None:
    path.parent.mkdir()
    for content in ("the answers of a year", "{", "["):
        path.write_text(content)
        progress = Progress(BANK, path)
        assert progress.damaged is not None
        assert progress.damaged.read_text() == content
    assert path.with_name("quiz.damaged.json").read_text() == "the answers of a year"


def test_what_an_editor_adds_is_no_damage(path: Path) -> None:
    Progress(BANK, path).answer(SUM, 4)
    path.write_text(path.read_text(), encoding="utf-8-sig")
    assert SUM in Progress(BANK, path)


def test_a_foreign_entry_that_is_no_text(path: Path) -> None:
    """Half a character can be in JSON, and cannot be written as UTF-8."""
    path.parent.mkdir()
    path.write_text('{"format": 1, "answers": {"of-another-edition": {"first": "\\ud800"}}}')
    Progress(BANK, path).answer(SUM, 4)
    assert SUM in Progress(BANK, path)
    assert json.loads(path.read_text())["answers"]["of-another-edition"] == {"first": "\ud800"}


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
entries = st.fixed_dictionaries({}, optional={"of": json_values, "first": json_values, "last": json_values})


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])  # each example writes the whole file anew
@given(st.dictionaries(st.sampled_from([q.id for q in BANK.questions] + ["x"]), json_values | entries), json_values)
def test_any_content_is_lived_with(tmp_path: Path, answers: dict[str, Any], value: Any) -> None:
    path = tmp_path / "quiz.json"
    Progress(BANK, path).answer(VOWEL, "b")
    content = json.loads(path.read_text())
    own = dict(content["answers"]["a-vowel"])
    for first in (value, "c"):
        content["answers"] = answers | {"a-vowel": own | {"first": first}}
        path.write_text(json.dumps(content))
        progress = Progress(BANK, path)
        assert progress.right(BANK.questions) == 0
        progress.answer(SUM, 4)
        assert progress.right(BANK.questions) == 1
        assert (VOWEL in progress) == (first in ("a", "b", "c"))
    path.unlink()


def test_a_file_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    _goes_on_in_memory(tmp_path / "file" / "quiz.json")
    (tmp_path / "quiz.json").mkdir()
    _goes_on_in_memory(tmp_path / "quiz.json")


def _goes_on_in_memory(path: Path) -> None:
    progress = Progress(BANK, path)
    progress.answer(VOWEL, "b")
    progress.answer(VOWEL, "a")
    assert progress.problem
    assert progress.first(BANK.questions) == {"a-vowel": "b"}
    assert progress.missed(BANK.questions) == []
    progress.start_over([VOWEL])
    assert VOWEL not in progress


def test_a_disk_that_is_full(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was kept stays as it was, and no half file is left."""
    progress = Progress(BANK, path)
    progress.answer(SUM, 4)

    def full(source: str, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    progress.answer(VOWEL, "a")
    assert progress.problem == "No space left on device"
    assert {entry.name for entry in path.parent.iterdir()} == {"quiz.json", "quiz.lock"}
    assert Progress(BANK, path).first(BANK.questions) == {"two-and-two": 4}
    assert progress.first(BANK.questions) == {"two-and-two": 4, "a-vowel": "a"}
