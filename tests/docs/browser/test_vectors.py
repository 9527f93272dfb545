"""core.js and Python agree on certificates, to the bit: on the vectors, and on exams, answers and names at random."""

from __future__ import annotations

import json
import random
import sys
import unicodedata
from datetime import date, timedelta
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_remat.quiz.bank import Answer, quiz_folder
from lightning_remat.quiz.certificate import EPOCH, CertificateError, issue, name_tag, verify
from lightning_remat.quiz.grading import Core, Item
from lightning_remat.quiz.picture import display_name
from tests.docs.browser.conftest import Visitor

pytestmark = pytest.mark.browser

SCRIPT = """
cases => {
  const exam = ([id, pass_mark, questions]) => ({
    id, pass_mark,
    questions: questions.map(([id, kind, options, answer]) =>
      ({id, kind, answer, [kind === "number" ? "range" : "choices"]: options})),
  });
  const hex = bytes => [...bytes].map(byte => byte.toString(16).padStart(2, "0")).join("");
  const did = action => {
    try { return action(); }
    catch (error) { if (error instanceof rematQuiz.QuizError) return {error: error.code}; throw error; }
  };
  const does = {
    core: c => { const e = exam(c.core); return {digest: hex(rematQuiz.digest(e)), width: rematQuiz.width(e)}; },
    issue: c => did(() => rematQuiz.issue(exam(c.core), c.answers, c.name, c.day)),
    read: c => did(() => rematQuiz.verify(c.cores.map(exam), c.id, c.name)),
    name: c => did(() => hex(rematQuiz.nameTag(c.name))),
    shown: c => did(() => rematQuiz.displayName(c.name)),
    signed: c => did(() => rematQuiz.signed(c.id, c.signature, c.key)),
  };
  return cases.map(c => does[c.does](c));
}
"""


def run(page: Any, cases: list[dict[str, Any]]) -> list[Any]:
    answers: list[Any] = page.evaluate(SCRIPT, cases)
    return answers


@pytest.fixture
def page(visit: Visitor, served: str) -> Any:
    return visit(f"{served}quiz/verify.html")


def as_script_says(found: Any) -> dict[str, Any]:
    """What Python's verify returned, in the words of core.js."""
    return {
        "exam": found.exam,
        "right": found.right,
        "of": found.of,
        "passed": found.passed,
        "day": found.day.isoformat(),
        "name": found.name_matches,
        "answers": {id: list(answer) if isinstance(answer, tuple) else answer for id, answer in found.answers.items()},
        "questions": {id: id in found.right_questions for id in found.answers},
    }


def test_vectors(page: Any) -> None:
    vectors = json.loads((quiz_folder() / "vectors.json").read_text(encoding="utf-8"))
    cores = [exam["core"] for exam in vectors["exams"]]
    by_id = {core[0]: core for core in cores}

    found = run(page, [{"does": "core", "core": core} for core in cores])
    assert found == [{"digest": exam["digest"], "width": exam["width"]} for exam in vectors["exams"]]

    issued = [{"does": "issue", "core": by_id[one["exam"]], **one} for one in vectors["issued"]]
    assert run(page, issued) == [one["id"] for one in vectors["issued"]]

    read = run(page, [{"does": "read", "cores": cores, **one} for one in vectors["read"]])
    for one, said in zip(vectors["read"], read, strict=True):
        if "error" in one:
            assert said == {"error": one["error"]}, one["what"]
            continue
        for key in ("exam", "right", "of", "passed", "day", "answers"):
            assert said[key] == one[key], one["what"]
        assert said["name"] == one["name_matches"], one["what"]
        assert [id for id, right in said["questions"].items() if right] == one["right_questions"], one["what"]

    names = run(page, [{"does": "name", **one} for one in vectors["names"]])
    assert names == [one.get("tag") or {"error": one["error"]} for one in vectors["names"]]

    signed = run(page, [{"does": "signed", **one} for one in vectors["signed"]])
    for one, said in zip(vectors["signed"], signed, strict=True):
        assert said == one["right"] or (one["right"] is False and "error" in said), one["what"]


# ---------------------------------------------------------------------- at random

INVISIBLE = (
    "\u200b\u200c\u200d\u2060\ufeff\u00a0\u3000\u2028\x85\x1c \t\n\u202a\u200e\u00ad\u2800\u3164\ufe0f\U000e0041\x07"
)
# What lower case makes two characters of, or one of three that look alike, and an accent that stands alone.
CASES = "\u0130\u03a3\u03c3\u03c2\u1e9e\u01c5A\u0301"
# Only characters that Python's Unicode knows: a browser may know more, and how to compose or to lower them.
TEXT = st.text(st.one_of(st.characters(exclude_categories=("Cs", "Cn")), st.sampled_from(INVISIBLE + CASES)))
IDS = st.from_regex(r"[a-z0-9]{1,6}(-[a-z0-9]{1,4})?", fullmatch=True)


@st.composite
def items(draw: st.DrawFn, id: str) -> tuple[Item, Answer]:
    """A question and an answer to it."""
    kind = draw(st.sampled_from(["single", "several", "number"]))
    if kind == "number":
        low = draw(st.integers(-(2**53), 2**53 - 1))
        high = draw(st.integers(low + 1, min(low + 10 ** draw(st.integers(1, 16)), 2**53)))
        numbers = st.integers(low, high)
        return Item(id, kind, (low, high), draw(numbers)), draw(numbers)
    options = draw(st.lists(IDS, min_size=2, max_size=8, unique=True))
    if kind == "single":
        return Item(id, kind, tuple(options), draw(st.sampled_from(options))), draw(st.sampled_from(options))
    right, given = (draw(st.sets(st.sampled_from(options), min_size=least)) for least in (1, 0))
    in_order = [tuple(option for option in options if option in chosen) for chosen in (right, given)]
    return Item(id, kind, tuple(options), in_order[0]), in_order[1]


@st.composite
def cases(draw: st.DrawFn) -> tuple[Core, dict[str, Answer], str, date]:
    found = [draw(items(id)) for id in draw(st.lists(IDS, min_size=1, max_size=12, unique=True))]
    core = Core(draw(IDS), draw(st.integers(1, 100)), tuple(item for item, _ in found))
    day = EPOCH + timedelta(draw(st.integers(0, 65535)))
    return core, {item.id: answer for item, answer in found}, draw(TEXT), day


def told(action: Any) -> Any:
    """What came of it, or the code of the error."""
    try:
        return action()
    except CertificateError as error:
        return {"error": error.code}


def test_random_certificates(page: Any) -> None:
    """Each example is a batch: asking the browser costs more than the answers."""

    @settings(max_examples=20)
    @given(st.lists(cases(), min_size=1, max_size=15), st.integers(0, 2**32))
    def batch(made: list[tuple[Core, dict[str, Answer], str, date]], seed: int) -> None:
        asked: list[dict[str, Any]] = []
        expected: list[Any] = []
        for core, answers, name, day in made:
            asked.append({"does": "core", "core": core.data()})
            expected.append({"digest": core.digest[:5].hex(), "width": core.width})
            asked.append({"does": "shown", "name": name})
            expected.append(told(lambda name=name: display_name(name)))
            asked.append(
                {"does": "issue", "core": core.data(), "answers": answers, "name": name, "day": day.isoformat()}
            )
            expected.append(
                told(lambda core=core, answers=answers, name=name, day=day: issue(core, answers, name, day))
            )
            if isinstance(expected[-1], str):
                id = expected[-1]
                for text in (id, id.lower().replace("-", " "), spoilt(id, random.Random(seed))):
                    for whose in (name, "somebody else", None):
                        asked.append({"does": "read", "cores": [core.data()], "id": text, "name": whose})
                        expected.append(
                            told(lambda core=core, text=text, whose=whose: as_script_says(verify([core], text, whose)))
                        )
        assert run(page, asked) == expected

    batch()


def spoilt(id: str, choice: random.Random) -> str:
    """With one character changed, left out, doubled, or put in."""
    at = choice.randrange(len(id))
    strange = choice.choice("ABCDEFGHIJKLMNOPQRSTUVWXYZ234567-01=ßſı é")
    return id[:at] + choice.choice([strange, "", id[at] * 2, id[at] + strange]) + id[at + 1 :]


def test_every_character(page: Any) -> None:
    """Lower case, composition, and what cannot be seen: of all that Python's Unicode knows."""
    known = [char for char in map(chr, range(sys.maxunicode + 1)) if unicodedata.category(char) not in ("Cs", "Cn")]
    words = [f"x{char}\u0301" for char in known]  # spaces between keep them apart: a name of many asks about each
    names = [" ".join(words[start : start + 32]) for start in range(0, len(words), 32)]
    for does, expected in (("name", lambda name: name_tag(name).hex()), ("shown", display_name)):
        found = run(page, [{"does": does, "name": name} for name in names])
        differ = [name for name, said in zip(names, found, strict=True) if said != expected(name)]
        alone = [word for name in differ for word in name.split(" ")]
        said = run(page, [{"does": does, "name": word} for word in alone])
        wrong = [ascii(word) for word, one in zip(alone, said, strict=True) if one != expected(word)]
        assert not differ, f"{does}: {wrong}"


def test_random_names(page: Any) -> None:
    @settings(max_examples=20)
    @given(st.lists(TEXT, min_size=1, max_size=60))
    def batch(names: list[str]) -> None:
        asked = [{"does": does, "name": name} for name in names for does in ("name", "shown")]
        actions = {"name": lambda name: name_tag(name).hex(), "shown": display_name}
        expected = [told(lambda one=one: actions[one["does"]](one["name"])) for one in asked]
        assert run(page, asked) == expected

    batch()
