"""``lightning-remat quiz``: learning in a terminal, certificates, and what an organiser does with them."""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict
from datetime import date
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lightning_remat.errors import RematError
from lightning_remat.quiz import signing, stats
from lightning_remat.quiz.bank import LANGUAGES, Bank, Exam, Topic, load_bank
from lightning_remat.quiz.certificate import CertificateError, issue, verify
from lightning_remat.quiz.picture import display_name, draw
from lightning_remat.quiz.progress import Progress, progress_file
from lightning_remat.quiz.terminal import Left, Terminal
from lightning_remat.quiz.words import Words, words

EPILOG = "Examples: lightning-remat quiz --lang es --topic kept; lightning-remat quiz --exam foundations."

app = typer.Typer(add_completion=False, invoke_without_command=True)


class Language(str, Enum):
    """What the quiz is written in."""

    en = "en"
    es = "es"
    hi = "hi"


LanguageOption = Annotated[
    Language | None, typer.Option("--lang", help="English, Spanish or Hindi; else as the locale (LANG) says, or en.")
]


@app.callback(epilog=EPILOG)
def quiz(
    context: typer.Context,
    lang: LanguageOption = None,
    topic: Annotated[
        str | None, typer.Option(help="The questions of one topic, by its id; else there is a list.")
    ] = None,
    exam: Annotated[
        str | None, typer.Option(help="foundations or course: all questions of the exam, and a certificate if passed.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="The name on the certificate; else it is asked for.")] = None,
    certificate: Annotated[
        Path | None, typer.Option(metavar="FILE.svg", help="Write the certificate of --exam to this file, too.")
    ] = None,
    start_over: Annotated[
        bool, typer.Option("--start-over", help="Forget your answers (of --topic or --exam, else all) and begin anew.")
    ] = False,
    site: Annotated[
        str,
        typer.Option(envvar="LIGHTNING_REMAT_SITE", help="The documentation's address or folder, for links."),
    ] = "",
) -> None:
    """Questions on recomputation and on this package, with the reason for each answer, in English, Spanish or Hindi.

    Your answers are kept, and the first one to each question counts for the certificate.

    Of the commands below, verify is for anyone; keygen, sign and stats are for organisers.
    """
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # what a terminal cannot show or say is a "?", and no reason to stop
    if context.invoked_subcommand is not None:
        return
    language = chosen_language(lang)
    bank = _loaded()
    what = _wanted(bank, topic, exam)
    _refuse_without_exam(what, name, certificate)
    if name is not None:
        try:
            name = display_name(name)
        except CertificateError as error:
            raise _refused(f"--name={name!r}: {error}.") from error
    link = _linker(site, language)
    progress = Progress(bank, progress_file())
    say = words("terminal", language)
    terminal = Terminal(Console(), say, language, link)
    if progress.damaged is not None:
        terminal.line(say.say("damaged", file=progress.damaged))
    if start_over:
        progress.start_over(bank.questions if what is None else what.questions)
        terminal.line(say["started_over"])
    if progress.problem is not None:
        terminal.line(say.say("not_kept", problem=progress.problem))
    written = False
    try:
        while what is None:
            what = terminal.pick(bank, progress)
        terminal.run(what, progress)
        if isinstance(what, Exam) and terminal.outcome(what, progress):
            written = _certify(terminal, bank, what, progress, name, certificate)
        terminal.retry(what, progress)
    except (Left, KeyboardInterrupt):
        if progress.problem is None:
            terminal.line(say["left"])
    if terminal.unlinked:
        terminal.line()
        terminal.line(say["no_site"], "dim")
    if certificate is not None and not written:
        terminal.line(say.say("no_certificate", file=certificate))
        raise typer.Exit(1)


def _refuse_without_exam(what: Topic | Exam | None, name: str | None, certificate: Path | None) -> None:
    for option, value in (("--name", name), ("--certificate", certificate)):
        if value is not None and not isinstance(what, Exam):
            raise _refused(f"{option} is for the certificate of an exam: say which one with --exam.")


def _wanted(bank: Bank, topic: str | None, exam: str | None) -> Topic | Exam | None:
    if topic is not None and exam is not None:
        raise _refused("--topic and --exam contradict each other: leave one of them out.")
    for option, id, known in (("--topic", topic, bank.topics), ("--exam", exam, bank.exams)):
        if id is None:
            continue
        for one in known:
            if one.id == id:
                return one
        raise _refused(f"{option}={id!r} is none of {', '.join(one.id for one in known)}.")
    return None


def _certify(
    terminal: Terminal, bank: Bank, exam: Exam, progress: Progress, name: str | None, file: Path | None
) -> bool:
    """Make a certificate, say what it shows and what it does not, and write it; returns whether it was written."""
    if name is None:
        again = words("verify", terminal.language)["error_name"]
        name = terminal.until(terminal.say["ask_name"], display_name, again, leave="")
    text = issue(exam, progress.first(exam.questions), name, date.today())
    say = words("certificate", terminal.language)
    terminal.line()
    terminal.line(terminal.say.say("certificate", name=name), "bold")
    terminal.console.print(Text(text), soft_wrap=True, highlight=False)  # in one line, to be copied
    terminal.line()
    for key in ("shows", "shows_not", "check"):
        terminal.line(say[key])
    if file is None:
        return False
    try:
        file.write_text(draw(bank, text, name, terminal.language), encoding="utf-8")
    except OSError as error:
        terminal.line(terminal.say.say("not_written", file=file, problem=error.strerror or error))
        return False
    terminal.line(terminal.say.say("written", file=file))
    return True


@app.command(name="verify")
def verify_command(
    id: Annotated[str, typer.Argument(metavar="ID", help="The certificate's ID; case, spaces and - do not matter.")],
    name: Annotated[str, typer.Option(help="The name on the certificate.")],
    lang: LanguageOption = None,
    signature: Annotated[str | None, typer.Option(help="An organiser's signature under the ID.")] = None,
    key: Annotated[str | None, typer.Option(help="The organiser's public key, from a place that you trust.")] = None,
) -> None:
    """Grade a certificate again, without asking anyone.

    Exit status 0: passed, made for this name, and the signature is right if there is one; 1: not.
    """
    if (signature is None) != (key is None):
        raise _refused("--signature and --key belong together: give both or none.")
    language = chosen_language(lang)
    say, bank = words("verify", language), _loaded()
    console = Console()
    try:
        found = verify(bank, id, name)
        signed = None if key is None or signature is None else _checked(key, id, signature)
    except CertificateError as error:
        console.print(Text(say[f"error_{error.code}"]))
        raise typer.Exit(1) from error
    lines = [
        say["graded"],
        say.say(
            "passed" if found.passed else "failed",
            right=found.right,
            of=found.of,
            exam=bank.exam(found.exam).title[language],
        ),
        say["name_matches" if found.name_matches else "name_differs"],
        say.say("day", day=found.day.isoformat()),
    ]
    if signed is not None:
        lines.append(say["signature_right" if signed else "signature_wrong"])
    about = words("certificate", language)
    shown = [about["shows"]] if found.name_matches else []
    for line in [*lines, "", *shown, about["shows_not"]]:
        console.print(Text(line), highlight=False)
    if not (found.passed and found.name_matches and signed is not False):
        raise typer.Exit(1)


def _checked(key: str, id: str, signature: str) -> bool:
    try:
        return signing.check(key, id, signature)
    except signing.SigningError as error:
        raise _refused(f"{error}.") from error


@app.command()
def keygen(file: Annotated[Path, typer.Argument(help="The new file of the private key; never give it away.")]) -> None:
    """Make a key to sign certificates with; prints its public half, which those who verify need from you."""
    try:
        typer.echo(signing.new_key(file))
    except signing.SigningError as error:
        raise _refused(str(error)) from error


@app.command()
def sign(
    id: Annotated[str, typer.Argument(metavar="ID", help="A certificate's ID that you vouch for.")],
    key: Annotated[Path, typer.Option(help="The file of your private key, from quiz keygen.")],
) -> None:
    """Sign a certificate's ID; prints the signature, and your public key beside it."""
    bank = _loaded()
    try:
        signature, public = signing.sign(key, id), signing.public_key(key)
    except (signing.SigningError, CertificateError) as error:
        raise _refused(str(error)) from error
    try:
        if not verify(bank, id).passed:
            typer.echo("Note: this ID's answers do not pass.", err=True)
    except CertificateError as error:
        typer.echo(f"Note: {error}.", err=True)
    typer.echo(f"signature {signature}\nkey       {public}")


@app.command(name="stats")
def stats_command(
    files: Annotated[
        list[Path], typer.Argument(help="Files of IDs: one a line, or CSV with a column id and perhaps one name.")
    ],
    lang: LanguageOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
) -> None:
    """Show for each question how many were right, how well it tells learners apart, and what was answered.

    The share right, and the corrected item-total correlation ("-" where it is undefined).

    Where only those who passed have an ID, the figures are theirs.

    Exit status 1: no ID could be read.
    """
    bank = _loaded()
    try:
        found, unread = stats.collect(files, bank)
    except stats.StatisticsError as error:
        raise _refused(f"{error}.") from error
    exams = stats.analyse(bank, found)
    if as_json:
        data = {"exams": [asdict(one) for one in exams], "unread": [asdict(one) for one in unread]}
        typer.echo(json.dumps(data, indent=1))
    else:
        _print_statistics(Console(), bank, exams, unread, chosen_language(lang))
    if not found:
        raise typer.Exit(1)


def _print_statistics(
    console: Console, bank: Bank, exams: list[stats.ExamStatistics], unread: list[stats.Unread], language: str
) -> None:
    say = words("statistics", language)
    for one in exams:
        exam = bank.exam(one.exam)
        title = say.say("title", exam=exam.title[language], learners=one.learners)
        table = Table(title=Text(title), title_justify="left")
        table.add_column(say["question"], overflow="fold")
        table.add_column(say["right"], justify="right")
        table.add_column(say["discrimination"], justify="right")
        table.add_column(say["chosen"], overflow="fold")
        for question, figures in zip(exam.questions, one.questions, strict=True):
            right = question.answer if isinstance(question.answer, tuple) else (str(question.answer),)
            chosen = [f"{key}{'*' if key in right else ''} {count}" for key, count in figures.chosen.items()]
            more = ["..."] if len(chosen) > 8 else []
            undefined = figures.discrimination is None
            table.add_row(
                figures.id,
                f"{figures.difficulty:.2f}",
                "-" if undefined else f"{figures.discrimination:.2f}",
                Text(", ".join(chosen[:8] + more)),
            )
        console.print(table)
        console.print(
            Text(
                say.say(
                    "mean", mean=f"{one.mean:.1f}", of=len(exam.questions), passed=one.passed, learners=one.learners
                )
            )
        )
    for line in unread:
        console.print(Text(say.say("unread", file=line.file, line=line.line, problem=_problem(line, say, language))))


def _problem(line: stats.Unread, say: Words, language: str) -> str:
    if line.problem == "twice":
        return say.say("twice", place=line.about)
    if line.problem == "other_name":
        return say.say("other_name", name=line.about)
    return words("verify", language)[f"error_{line.problem}"]


def chosen_language(lang: Language | None) -> str:
    """What was asked for, or what the locale says, or English."""
    if lang is not None:
        return lang.value
    for variable in ("LC_ALL", "LC_MESSAGES", "LANG"):  # the first that is set decides, as everywhere
        if value := os.environ.get(variable):
            code = value[:2].lower()
            return code if code in LANGUAGES and value[2:3] in ("", "_", ".", "-", "@") else "en"
    return "en"


def _linker(site: str, language: str) -> Callable[[str], str] | None:
    """Where a page is: at an address, or in a site on this disk, given or built in this checkout; None: nowhere."""
    if "://" not in site:
        folder_of_site = Path(site) if site else Path(__file__).parent.parent / "build" / "site"
        if not (folder_of_site / "index.html").is_file():
            return None
        site = folder_of_site.resolve().as_uri()
    base = f"{site.rstrip('/')}/"
    folder = "" if language == "en" else f"{language}/"

    def link(explained: str) -> str:
        return f"{base}{folder}{explained.replace('.md', '.html', 1)}"

    return link


def _loaded() -> Bank:
    try:
        return load_bank()
    except (RematError, FileNotFoundError) as error:
        typer.echo(f"lightning-remat quiz: the bank of questions cannot be loaded: {error}", err=True)
        raise typer.Exit(2) from error


def _refused(message: str) -> typer.Exit:
    """Say what is wrong with what was asked for; what is returned is to be raised."""
    typer.echo(f"lightning-remat quiz: {message}", err=True)
    return typer.Exit(2)
