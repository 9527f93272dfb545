"""``lightning-remat quiz`` from end to end: what is asked, said, kept and written, with which exit status."""

from __future__ import annotations

import io
import itertools
import json
import re
from datetime import date
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from click.testing import Result
from rich.console import Console
from rich.text import Text
from typer.testing import CliRunner

from lightning_remat import cli, quiz_command
from lightning_remat.quiz import terminal as terminal_module
from lightning_remat.quiz.bank import BankError, load_bank
from lightning_remat.quiz.certificate import issue, verify
from lightning_remat.quiz.progress import Progress, progress_file
from lightning_remat.quiz.words import words
from tests.quiz import vectors

BANK = load_bank(Path(__file__).parent / "tiny")
SUMS = "4\nb\na c\n"
ALL = SUMS + "3\na\n"
LOCALE = ("LC_ALL", "LC_MESSAGES", "LANG")
ID = re.compile(r"^[A-Z2-7]{6}(-[A-Z2-7]{1,6})+$", re.MULTILINE)


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The tiny bank, a data folder without progress, no locale, no address of a site, 80 columns."""
    monkeypatch.setattr(quiz_command, "load_bank", lambda: BANK)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    for name in (*LOCALE, "LIGHTNING_REMAT_SITE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(quiz_command, "__file__", str(tmp_path / "package" / "quiz_command.py"))
    monkeypatch.chdir(tmp_path)


def folded(text: str) -> str:
    """As a terminal of 80 columns shows it."""
    console = Console(file=io.StringIO(), width=80)
    console.print(Text(text), highlight=False)
    return console.file.getvalue().rstrip("\n")  # type: ignore[attr-defined]  # the one above


def run(*args: str, input: str = "") -> Result:
    return CliRunner().invoke(cli.app, ["quiz", *args], input=input)


def kept() -> dict[str, Any]:
    content = json.loads(progress_file().read_text(encoding="utf-8"))
    return {id: (entry["first"], entry["last"]) for id, entry in content["answers"].items()}


def test_a_topic() -> None:
    """What is asked again does not count; each answer has its reason at once."""
    result = run("--topic", "sums", input="x\n4.5\n5\nc\n\na\na, 2\nn\n")
    assert result.exit_code == 0, result.output
    said = result.output
    assert said.count("Please write a whole number from 0 to 10") == 2
    assert "Wrong\nThat is 2 + 3.\nThe right answer: 4 apples\nOne more than 3.\n" in said
    assert said.count("Please write one letter from a to b") == 2
    assert "A list is not an array.\nThe right answer: b) `[1, 2, 1, 2]`\nA list is repeated.\n" in said
    assert "    x = [1, 2]\n" in said
    assert "  a) Two (chosen)\n     Part of the answer: Two is even.\n" in said
    assert "  b) Three (chosen)\n     Not part of the answer: Three is odd.\n" in said
    assert "  c) Four (missed)\n     Part of the answer: Four is even.\n" in said
    assert "Where this is explained" not in said
    assert said.endswith(f"\n{folded(words('terminal', 'en')['no_site'])}\n"), "once, at the end"
    assert "All questions here are answered. Right at the first try: 0 of 3." in said
    assert "Retry what was missed (3)?" in said
    assert kept() == {
        "two-and-two": (5, 5),
        "what-it-prints": ("doubled", "doubled"),
        "which-are-even": (["two", "three"], ["two", "three"]),
    }


def test_what_was_missed_is_tried_again() -> None:
    """Until nothing is missed; the first answers stay."""
    result = run("--topic", "letters", input="0\nb\nwhat\n\n3\nc\ny\na\n")
    assert result.exit_code == 0
    assert "Retry what was missed (2)?" in result.output
    assert "Please press Enter, or write n." in result.output
    assert "Retry what was missed (1)?" in result.output
    assert result.output.count("Question 2 of 2") == 3
    assert "It is another number.\n" in result.output
    assert kept() == {"how-long": (0, 3), "a-vowel": ("b", "a")}
    again = run("--topic", "letters")
    assert "Answered: 2 of 2. Right at the first try: 0." in again.output
    assert "Question" not in again.output


@pytest.mark.parametrize("end", ["", "q\n", "Q\n"])
def test_it_is_left_and_goes_on(end: str) -> None:
    """At the end of input and at a word, with progress kept, in another language as well."""
    result = run("--topic", "sums", input="4\n" + end)
    assert result.exit_code == 0
    assert "Your answers are kept. The same command goes on from here.\n" in result.output
    result = run("--topic", "sums", "--lang", "hi", input="b\n")
    assert "प्रश्न 2, कुल 3" in result.output
    assert "यह क्या छापता है?" in result.output
    assert "Question 1" not in result.output
    result = run("--topic", "sums", "--lang", "es", input="ac\n")
    assert "Pregunta 3 de 3" in result.output
    assert "Correcto\n" in result.output
    assert result.output.endswith(folded(words("terminal", "es")["no_site"]) + "\n")


def test_control_c(monkeypatch: pytest.MonkeyPatch) -> None:
    """At a question, in the list and between."""

    def interrupted(*args: Any) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr("builtins.input", interrupted)
    for args in (["--topic", "sums"], []):
        result = run(*args)
        assert result.exit_code == 0
        assert "Your answers are kept." in result.output
    monkeypatch.setattr(terminal_module.Terminal, "run", interrupted)
    assert run("--topic", "sums").exit_code == 0


def test_the_list() -> None:
    """Topics and exams with what was answered; a number chooses."""
    run("--topic", "letters", input="0\n")
    result = run(input="\n5\n2\nq\n")
    assert result.exit_code == 0
    assert "  2  Letters\n     Answered: 1 of 2. Right at the first try: 0.\n" in result.output.replace(
        "Words", "Letters"
    )
    assert "Exams, with a certificate\n  3  Sums\n" in result.output
    assert result.output.count("Please write a whole number from 1 to 4.") == 2
    assert "Question 2 of 2" in result.output


def test_an_exam_passed(tmp_path: Path) -> None:
    """A name is asked for, and the ID is one that can be graded again; it says what it does not show."""
    result = run("--exam", "all", "--certificate", "c.svg", "--lang", "es", input=ALL + " \n  आशा   शर्मा \n")
    assert result.exit_code == 0, result.output
    assert "Examen aprobado: 5 de 5 correctas, hacen falta 4." in result.output
    assert "Hace falta un nombre" in result.output
    assert "Certificado de आशा शर्मा\n" in result.output
    said = " ".join(result.output.split())
    assert words("certificate", "es")["shows_not"] in said
    assert "Escrito en c.svg." in result.output
    text = ID.search(result.output)[0]
    found = verify(BANK, text, "आशा शर्मा")
    assert (found.right, found.passed, found.name_matches) == (5, True, True)
    picture = (tmp_path / "c.svg").read_text(encoding="utf-8")
    ElementTree.fromstring(picture)
    assert text in picture
    # Once more, with a name; without a question, as all are answered.
    again = run("--exam", "all", "--name", "Ada")
    assert again.exit_code == 0
    assert verify(BANK, ID.search(again.output)[0], "Ada").passed
    # A name can be q.
    assert "Certificate for q\n" in run("--exam", "first", input="q\n").output


def test_just_passed_and_retried() -> None:
    """First answers count, whatever is answered then: the certificate comes before what was missed."""
    result = run("--exam", "all", "--name", "Ada", input=ALL.replace("3\na\n", "2\na\n") + "\n3\n")
    assert result.exit_code == 0
    assert "Exam passed: 4 of 5 right, 4 are needed." in result.output
    assert result.output.index("Certificate for Ada") < result.output.index("Retry what was missed (1)?")
    found = verify(BANK, ID.search(result.output)[0], "Ada")
    assert found.answers["how-long"] == 2
    assert kept()["how-long"] == (2, 3)
    assert verify(BANK, ID.search(run("--exam", "all", "--name", "Ada").output)[0]).right == 4


def test_an_exam_not_passed(tmp_path: Path) -> None:
    result = run("--exam", "all", "--certificate", "c.svg", input="1\na\nb\n0\na\nn\n")
    assert result.exit_code == 1
    assert "Exam not passed: 1 of 5 right, 4 are needed. --start-over begins a new attempt." in " ".join(
        result.output.split()
    )
    assert "No certificate was written to c.svg." in result.output
    assert not ID.search(result.output)
    assert not (tmp_path / "c.svg").exists()
    result = run("--exam", "all", "--start-over", "--name", "Ada", input=ALL)
    assert result.exit_code == 0
    assert "Your earlier answers are forgotten." in result.output
    assert verify(BANK, ID.search(result.output)[0], "Ada").right == 5


def test_an_exam_that_is_left(tmp_path: Path) -> None:
    result = run("--exam", "all", "--certificate", "c.svg", input=SUMS)
    assert result.exit_code == 1
    assert "Your answers are kept." in result.output
    # Left when the name is asked for: the next run asks again.
    assert run("--exam", "first", input="").exit_code == 0
    assert ID.search(run("--exam", "first", input="Ada\n").output)


def test_start_over_is_for_what_was_chosen() -> None:
    run("--exam", "all", "--name", "x", input=ALL)
    run("--topic", "letters", "--start-over", input="q\n")
    assert kept().keys() == {"two-and-two", "what-it-prints", "which-are-even"}
    run("--start-over", input="q\n")
    assert kept() == {}


def test_a_certificate_that_cannot_be_written() -> None:
    result = run("--exam", "first", "--name", "Ada", "--certificate", "missing/c.svg", input=SUMS)
    assert result.exit_code == 1
    assert "missing/c.svg cannot be written: No such file or directory." in result.output
    assert ID.search(result.output)


def test_progress_that_cannot_be_kept(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("a file where a folder should be")
    result = run("--exam", "first", "--name", "Ada", input=SUMS)
    assert result.exit_code == 0
    assert result.output.count("Your answers cannot be kept (Not a directory).") == 1
    assert verify(BANK, ID.search(result.output)[0], "Ada").right == 3
    assert "Your answers are kept" not in run("--exam", "first", input="q\n").output


def test_damaged_progress(tmp_path: Path) -> None:
    progress_file().parent.mkdir(parents=True)
    progress_file().write_text("{")
    result = run("--topic", "sums", input="4\n")
    assert result.exit_code == 0
    assert "could not be read" in result.output
    assert kept() == {"two-and-two": (4, 4)}


def test_the_locale_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first variable that is set decides; what is not known is English."""
    for value, language in (
        ("es_MX.UTF-8", "es"),
        ("hi_IN", "hi"),
        ("hi", "hi"),
        ("es@euro", "es"),
        ("est_EE", "en"),
        ("de_DE.UTF-8", "en"),
        ("C", "en"),
        ("", "en"),
    ):
        monkeypatch.setenv("LANG", value)
        assert quiz_command.chosen_language(None) == language
    monkeypatch.setenv("LANG", "es_ES")
    monkeypatch.setenv("LC_ALL", "C.UTF-8")
    assert quiz_command.chosen_language(None) == "en"
    assert quiz_command.chosen_language(quiz_command.Language.hi) == "hi"
    monkeypatch.delenv("LC_ALL")
    assert "Pregunta 1 de 3" in run("--topic", "sums").output


@pytest.mark.parametrize(
    ("args", "input", "said"),
    [
        ([], "x\n5\n-1\n", "No answer in 3 tries: the quiz ends here.\nYour answers are kept."),
        (["--topic", "sums"], "4\nc\n\na b\n", "No answer in 3 tries: the quiz ends here.\nYour answers are kept."),
        (["--topic", "letters"], "3\nb\nwhat\n?\nwell\n", "Taken as no.\n"),
        (["--exam", "first"], SUMS + "\n \n\u200b\n", "No answer in 3 tries: the quiz ends here.\nYour answers"),
    ],
    ids=["list", "question", "retry", "name"],
)
def test_nothing_is_asked_for_ever(args: list[str], input: str, said: str) -> None:
    result = run(*args, input=input + "and\nmore\nof\nthis\n")
    assert result.exit_code == 0, result.output
    assert result.output.count(said) == 1
    assert result.output.count("Retry") == 3 * args.count("letters")
    if args:
        assert kept(), "what was answered before"


def test_links(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """To an address that is given, to the site that was built in this checkout, or to none."""
    monkeypatch.setenv("LIGHTNING_REMAT_SITE", str(tmp_path / "elsewhere"))
    said = run("--topic", "letters", input="0\n").output
    assert "Where this is explained" not in said
    assert said.endswith(folded(words("terminal", "en")["no_site"]) + "\n")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "index.html").touch()
    said = run("--topic", "letters", input="a\n").output
    assert f"{(tmp_path / 'elsewhere').as_uri()}/tutorials/" in said.replace("\n", "")
    assert "--site" not in said
    monkeypatch.delenv("LIGHTNING_REMAT_SITE")
    assert "--site" not in run("--topic", "sums", input="q\n").output, "where nothing was explained"
    built = tmp_path / "build" / "site"
    built.mkdir(parents=True)
    (built / "index.html").touch()
    said = run("--topic", "sums", "--lang", "hi", input="4\n").output
    assert f"{built.as_uri()}/hi/tutorials/sums.html#adding" in said.replace("\n", "")
    monkeypatch.setenv("LIGHTNING_REMAT_SITE", "https://docs.example/x/")
    assert "https://docs.example/x/tutorials/sums.html#printing\n" in run("--topic", "sums", input="b\n").output


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--topic", "summs"], "--topic='summs' is none of sums, letters."),
        (["--exam", "x"], "--exam='x' is none of first, all."),
        (["--topic", "sums", "--exam", "all"], "contradict each other"),
        (["--topic", "sums", "--name", "Ada"], "--name is for the certificate of an exam"),
        (["--certificate", "c.svg"], "--certificate is for the certificate of an exam"),
        (["--lang", "de"], "de"),
        (["verify", "X", "--name", "Ada", "--key", "k"], "--signature and --key belong together"),
        (["stats", "missing.txt"], "missing.txt cannot be read: No such file or directory."),
        (["sign", "AAAA", "--key", "k.pem"], "this is no certificate's ID"),
        (["keygen", "missing/k.pem"], "missing/k.pem cannot be written: No such file"),
    ],
)
def test_what_is_refused(args: list[str], message: str) -> None:
    result = run(*args)
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.split())
    assert not progress_file().exists()


def test_an_empty_name_is_refused() -> None:
    """Before anything is asked."""
    result = run("--exam", "first", "--name", " ", input=SUMS)
    assert result.exit_code == 2
    assert "--name=' ': a certificate needs a name" in result.stderr
    assert not progress_file().exists()


def test_a_bank_that_is_damaged(monkeypatch: pytest.MonkeyPatch) -> None:
    def damaged() -> None:
        raise BankError("sums.toml", "two-and-two", "why.es", "is missing")

    monkeypatch.setattr(quiz_command, "load_bank", damaged)
    result = run()
    assert result.exit_code == 2
    assert "cannot be loaded: sums.toml, question two-and-two, why.es: is missing" in result.stderr


def test_verify_sign_and_keys() -> None:
    text = ID.search(run("--exam", "first", "--name", "José", input=SUMS).output)[0]
    result = run("verify", text.lower(), "--name", "JOSE\u0301")
    assert result.exit_code == 0
    assert "Passed: 3 of 3 right. Exam: Sums.\nThe ID was made for this name.\nDay as stated: 20" in result.output
    assert words("certificate", "en")["shows_not"] in " ".join(result.output.split())
    result = run("verify", text, "--name", "Ada", "--lang", "es")
    assert result.exit_code == 1
    assert "El ID se creó para otro nombre." in result.output
    assert words("certificate", "es")["shows"] not in " ".join(result.output.split()), "it was not made for this name"
    result = run("verify", text[1:], "--name", "José", "--lang", "hi")
    assert result.exit_code == 1
    assert words("verify", "hi")["error_mistyped"] in result.output

    public = run("keygen", "k.pem").output.strip()
    result = run("sign", text, "--key", "k.pem")
    assert result.exit_code == 0
    signature = re.search(r"^signature (\S+)$", result.output, re.MULTILINE)[1]
    assert f"key       {public}\n" in result.output
    result = run("verify", text, "--name", "José", "--signature", signature, "--key", public)
    assert result.exit_code == 0
    assert "The signature is right" in result.output
    other = run("keygen", "other.pem").output.strip()
    result = run("verify", text, "--name", "José", "--signature", signature, "--key", other)
    assert result.exit_code == 1
    assert "The signature is wrong" in result.output
    result = run("verify", text, "--name", "José", "--signature", signature[1:], "--key", other)
    assert result.exit_code == 2
    assert "this is not a signature" in result.stderr
    assert run("keygen", "k.pem").exit_code == 2


def test_what_does_not_pass_is_signed_with_a_note() -> None:
    answers = {"two-and-two": 1, "what-it-prints": "doubled", "which-are-even": ()}
    text = issue(BANK.exam("first"), answers, "Ada", date(2026, 11, 29))
    run("keygen", "k.pem")
    result = run("sign", text, "--key", "k.pem")
    assert result.exit_code == 0
    assert "Note: this ID's answers do not pass." in result.stderr
    result = run("sign", json.loads(vectors.PATH.read_text())["read"][0]["id"], "--key", "k.pem")
    assert result.exit_code == 0
    assert "Note: this ID is about an exam that is not in this bank" in result.stderr
    result = run("verify", text, "--name", "Ada")
    assert result.exit_code == 1
    assert "Not passed: 0 of 3 right. Exam: Sums." in result.output


def test_statistics(tmp_path: Path) -> None:
    ids = []
    for name, input in (("A", SUMS), ("B", SUMS.replace("4", "5")), ("C", "4\na\na c\n")):
        # Passed or not: an organiser can collect every ID.
        run("--exam", "first", "--start-over", "--name", name, input=input)
        answers = Progress(BANK, progress_file()).first(BANK.exam("first").questions)
        ids.append(issue(BANK.exam("first"), answers, name, date(2026, 11, 29)))
    (tmp_path / "ids.txt").write_text("\n".join([*ids, "hello", ids[0]]))
    result = run("stats", "ids.txt")
    assert result.exit_code == 0, result.output
    said = " ".join(result.output.split())
    assert "Sums. Learners: 3" in said
    assert re.search(r"two-and-two \S 0\.67 \S -0\.50 \S 4\* 2, 5 1", said)
    assert re.search(r"which-are-even \S 1\.00 \S - \S two\* 3, three 0, four\* 3", said)
    assert "Mean score: 2.3 of 3. Passed: 1 of 3." in said
    assert "Not read, ids.txt line 4: This is no certificate's ID" in said
    assert "Not read, ids.txt line 5: the same ID as in ids.txt:1" in said
    data = json.loads(run("stats", "--json", "ids.txt").stdout)
    assert data["exams"][0]["questions"][2]["discrimination"] is None
    assert data["exams"][0]["learners"] == 3
    assert [one["line"] for one in data["unread"]] == [4, 5]
    assert "Participantes: 3" in run("stats", "--lang", "es", "ids.txt").output
    (tmp_path / "none.txt").write_text("hello")
    assert run("stats", "none.txt").exit_code == 1


@pytest.mark.parametrize("command", [[], ["verify"], ["keygen"], ["sign"], ["stats"]])
def test_help_breaks_lines_where_they_are_full(command: list[str]) -> None:
    """At 80 columns a line of text is short only at the end of a paragraph."""
    lines = [line.rstrip() for line in run(*command, "--help").output.splitlines()]
    text = lines[: next(number for number, line in enumerate(lines) if line.startswith("╭"))]
    for line, following in itertools.pairwise(text):
        if line and following:
            assert len(line) + 1 + len(following.split()[0]) > 79, line


def test_help() -> None:
    text = " ".join(run("--help").output.split())
    for word in ("--lang", "--topic", "--exam", "--name", "--certificate", "--start-over", "verify", "keygen", "stats"):
        assert word in text
    assert "quiz" in CliRunner().invoke(cli.app, ["--help"]).output
