"""What a bank is loaded as, and what is refused: with the file, the question, the field, and what is wrong."""

from __future__ import annotations

import pickle
import shutil
import unicodedata
from pathlib import Path

import pytest

from lightning_remat import shipped
from lightning_remat.quiz import bank as bank_module
from lightning_remat.quiz.bank import BankError, load_bank

TINY = Path(__file__).parent / "tiny"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the tiny bank, to be spoiled."""
    return Path(shutil.copytree(TINY, tmp_path / "quiz"))


def test_what_is_loaded() -> None:
    bank = load_bank(TINY)
    assert (bank.id, bank.pass_mark) == ("tiny", 80)
    assert [topic.id for topic in bank.topics] == ["sums", "letters"]
    assert [question.id for question in bank.questions] == [
        "two-and-two",
        "what-it-prints",
        "which-are-even",
        "how-long",
        "a-vowel",
    ]
    assert [exam.id for exam in bank.exams] == ["first", "all"]
    assert len(bank.exam("first").questions) == 3
    assert len(bank.exam("all").questions) == 5
    assert bank.exam("all").pass_mark == 80
    number = bank.question("two-and-two")
    assert (number.answer, number.range, number.faq, number.topic) == (4, (0, 10), True, "sums")
    assert (number.page, number.anchor) == ("tutorials/sums.md", "adding")
    assert number.near[0].why["es"] == "Eso es 2 + 3."
    assert number.unit is not None
    assert number.unit["hi"] == "सेब"
    assert bank.question("which-are-even").answer == ("two", "four")
    made = bank.question("what-it-prints")
    assert made.answer == "repeated"
    assert made.choice("doubled").text["hi"] == "`[2, 4]`"
    assert made.code == "x = [1, 2]\n"
    assert bank.question("how-long").answer == 3
    with pytest.raises(KeyError, match="nothing"):
        bank.question("nothing")


def test_without_the_answers_that_are_made(folder: Path) -> None:
    """As they are loaded to make them."""
    (folder / "answers.json").unlink()
    bank = load_bank(folder, answers=False)
    assert bank.question("what-it-prints").answer is None
    assert bank.question("two-and-two").answer == 4


@pytest.mark.parametrize(
    ("file", "old", "new", "message"),
    [
        # Files
        ("course.toml", "schema = 1", "schema = 2", r"^course.toml, schema: is 2; known here is 1$"),
        ("course.toml", "schema = 1", "schema == 1", r"^course.toml: is not TOML in UTF-8: "),
        ("course.toml", "schema = 1", f"a = {'[' * 100_000}", r"^course.toml: is not TOML in UTF-8: .*recursion"),
        (
            "course.toml",
            'title.es = "Todo"',
            r'title.es = "To\u0007do"',
            r"title.es: has the characters \['\\x07'\], which",
        ),
        (
            "course.toml",
            'title.es = "Todo"',
            r'title.es = "\u202eTodo"',
            r"title.es: has the characters .*, which no page",
        ),
        ("course.toml", "pass_mark = 80", "pass_mark = 0", r"^course.toml, pass_mark: is 0, but"),
        ("course.toml", "pass_mark = 80", "pass_mark = true", r"pass_mark: is True, which is not of the type integer"),
        ("course.toml", "pass_mark = 80", "", r"pass_mark: is missing"),
        ("course.toml", '["sums", "letters"]\n\n', '["sums"]\n\n', r"topics: does not name letters.toml"),
        ("course.toml", '["sums", "letters"]\n\n', '["sums", "sums"]\n\n', r"topics: .* none twice"),
        ("course.toml", '["sums", "letters"]\n\n', '["sums", "letters", "x"]\n\n', r"^x.toml: cannot be read"),
        ("course.toml", 'topics = ["sums"]', 'topics = ["s"]', r"exam 1: topics: names 's', which is not among"),
        ("course.toml", 'id = "all"', 'id = "first"', r"exam: must be there, each with an id of its own"),
        ("course.toml", 'title.es = "Todo"', 'titel.es = "Todo"', r"^course.toml, exam 2: title.es: is missing$"),
        ("course.toml", 'title.hi = "सब"', 'title.hi = "सब"\nx = 1', r"^course.toml, exam 2: x: is not known here$"),
        ("sums.toml", 'id = "sums"', 'id = "sum"', r"^sums.toml, id: is 'sum', but the file's name says 'sums'$"),
        ("sums.toml", 'page = "tutorials/sums.md"', 'page = "sums.html"', r"page: is 'sums.html', which"),
        ("sums.toml", 'title.en = "Sums"', 'title.en = "Sums"\ntitle.de = "x"', r"title.de: is not known; the lang"),
        # Questions
        ("sums.toml", 'id = "two-and-two"\n', "", r"^sums.toml, question 1., id: is missing$"),
        ("sums.toml", 'id = "two-and-two"', 'id = "Two"', r"question 1., id: is 'Two', but must be lower-case"),
        ("letters.toml", 'id = "a-vowel"', 'id = "two-and-two"', r"two-and-two, id: is already in sums.toml"),
        ("sums.toml", 'kind = "number"', 'kind = "text"', r"^sums.toml, question two-and-two, kind: is 'text', but"),
        ("sums.toml", "faq = true", 'faq = "yes"', r"faq: is 'yes', which is not of the type boolean"),
        ("sums.toml", "faq = true", "fax = true", r"question two-and-two, fax: is not known here"),
        ("sums.toml", "#adding", "", r"explained: is 'tutorials/sums.md', which"),
        ("sums.toml", "print(x * 2)", "print(x *", r"question what-it-prints, run: is not Python"),
        ("sums.toml", "answer = 4", "answer = 11", r"answer: is 11, but must be an integer from 0 to 10"),
        ("sums.toml", "answer = 4", "answer = true", r"answer: is True, but must be an integer"),
        ("sums.toml", "answer = 4\n", "", r"answer: must be there if there is no run"),
        ("sums.toml", "answer = 4", "answer = 5", r"near: has 5, which is the answer"),
        ("sums.toml", "range = [0, 10]", "range = [10, 0]", r"range: is \[10, 0\], but"),
        ("sums.toml", "range = [0, 10]", "range = [0, 10.5]", r"range: .* must be 2 integers"),
        ("sums.toml", "value = 5", "value = 50", r"near 1: value: is 50, which is not in range"),
        ("sums.toml", 'answer = ["two", "four"]', 'answer = ["four", "two"]', r"in this order"),
        ("sums.toml", 'answer = ["two", "four"]', 'answer = ["two", "two"]', r"in this order"),
        ("sums.toml", 'answer = ["two", "four"]', "answer = []", r"answer: is \[\], but must be some of two, three"),
        ("sums.toml", 'kind = "several"', 'kind = "single"', r"answer: is \['two', 'four'\], but must be one of"),
        ("letters.toml", 'answer = "a"', 'answer = "d"', r"answer: is 'd', but must be one of a, b, c"),
        ("letters.toml", '  id = "b"', '  id = "a"', r"question a-vowel, choice: has the same id twice"),
        ("letters.toml", "The letter `b`", "The letter `c`", r"question a-vowel, choice: has the same text.en twice"),
        ("letters.toml", '  why.hi = "यह व्यंजन है।"\n', "", r"question a-vowel, choice 2: why.hi: is missing"),
        ("letters.toml", "`b`", "`b", r"choice 2: text.en: has a ` without its partner"),
        ("sums.toml", 'prints = "[2, 4]"', 'prints = "[2, 4] "', r"choice 1: prints: .* without space at its ends"),
        ("sums.toml", 'prints = "[2, 4]"\n', "", r"choice 1: text: must be there if there is no prints"),
        # Texts
        ("sums.toml", "¿Cuánto es 2 + 2?", "¿Cuánto es 2 + 3?", r"prompt.es: has the numbers \['2', '3'\], while"),
        ("sums.toml", "2 + 2 कितना", "२ + २ कितना", r"prompt.hi: has the digits"),
        ("sums.toml", "What is 2 + 2?", "What is 2 + 2? ", r"prompt.en: .* one line, without space at its ends"),
        ("sums.toml", "What is 2 + 2?", "What is\\n2 + 2?", r"prompt.en: .* one line"),
        ("sums.toml", "Uno más", unicodedata.normalize("NFD", "Uno más"), r"why.es: is not in Unicode's normal"),
        # What was made
        ("answers.json", '"repeated"', '"other"', r"^answers.json, question what-it-prints, answer: is 'other', but"),
        (
            "answers.json",
            '"how-long": 3',
            '"short": 3',
            r"^answers.json, question how-long: is missing; run `python -m",
        ),
        ("answers.json", "{", '{"a-vowel": 1,', r"question a-vowel: is not a question with a run; run `python"),
        ("answers.json", "{", "", r"^answers.json: cannot be read .*; run `python"),
        ("answers.json", "{", f'{{"a": {"[" * 100_000}', r"^answers.json: cannot be read .*; run `python"),
    ],
)
def test_what_is_refused(folder: Path, file: str, old: str, new: str, message: str) -> None:
    text = (folder / file).read_text(encoding="utf-8")
    assert old in text
    (folder / file).write_text(text.replace(old, new, 1), encoding="utf-8")
    with pytest.raises(BankError, match=message) as caught:
        load_bank(folder)
    again = pickle.loads(pickle.dumps(caught.value))
    assert (str(again), again.question) == (str(caught.value), caught.value.question)


def test_the_bank_is_found_in_a_wheel_and_in_a_checkout(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The installed copy comes first; where there is neither, both places are named."""
    package = tmp_path / "site" / "lightning_remat"
    monkeypatch.setattr(shipped, "__file__", str(package / "shipped.py"))
    with pytest.raises(FileNotFoundError, match=r"_quiz nor in .*quiz: install"):
        bank_module.quiz_folder()
    for place in (package.parent / "quiz", package / "_quiz"):
        place.mkdir(parents=True)
        (place / "course.toml").touch()
        assert bank_module.quiz_folder() == place
