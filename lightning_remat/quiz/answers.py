"""Answers that are made by running code: ``python -m lightning_remat.quiz.answers [--check]``.

A question with ``run`` has the answer that its code prints, and a question with ``check`` states a fact that its code
asserts: what the quiz teaches about PyTorch and about this package is run, not remembered.
"""

from __future__ import annotations

import contextlib
import io
import json
import linecache
import sys
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from lightning_remat.errors import RematError
from lightning_remat.quiz.bank import Bank, BankError, Question, load_bank, quiz_folder

FILE = "answers.json"


class AnswerError(RematError, RuntimeError):
    """The code of a question failed, or printed what is no answer to it."""


def make_answers(bank: Bank) -> dict[str, Any]:
    """Run the code of every question and return the answers of those with ``run``, by id in the order of ids.

    Raises:
        AnswerError: about the first question whose code fails or prints no answer.
    """
    made = {question.id: answer for question in bank.questions if (answer := make_answer(question)) is not None}
    return dict(sorted(made.items()))


def make_answer(question: Question) -> Any:
    """Run the code of a question: ``code`` and ``run``, whose output is the answer, then ``code`` and ``check``.

    Each of the two has a namespace of its own, a fixed seed and one thread.

    Returns:
        The answer as ``answers.json`` has it, or None for a question without ``run``.

    Raises:
        AnswerError: If the code fails or prints no answer.
    """
    answer = None
    if question.run is not None:
        answer = _understood(question, _printed(question, "run", question.run))
    if question.check is not None:
        _printed(question, "check", question.check)
    if question.code is not None and question.run is None and question.check is None:
        _printed(question, "code", "")
    return answer


def _printed(question: Question, part: str, last: str) -> str:
    """What ``last`` prints after the question's ``code``; what that prints is not looked at."""
    namespace: dict[str, Any] = {"__name__": f"quiz.{question.id}"}
    output = io.StringIO()
    with _repeatable():
        for name, source in (("code", question.code), (part, last)):
            output = io.StringIO()
            file = f"<{question.id}: {name}>"
            # Where tracebacks, and code that reads its own source, find the lines.
            linecache.cache[file] = (len(source or ""), None, (source or "").splitlines(keepends=True), file)
            try:
                with contextlib.redirect_stdout(output):
                    exec(compile(source or "", file, "exec"), namespace)
            except Exception as error:
                lines = "".join(traceback.format_exception(error))
                raise AnswerError(
                    f"{question.topic}.toml, question {question.id}: its {name} failed\n{lines}"
                ) from error
            finally:
                linecache.cache.pop(file, None)
    return output.getvalue()


@contextlib.contextmanager
def _repeatable() -> Iterator[None]:
    """One thread and known seeds; put back afterwards."""
    threads = torch.get_num_threads()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(threads)


def _understood(question: Question, printed: str) -> Any:
    lines = printed.strip().splitlines()
    place = f"{question.topic}.toml, question {question.id}: its run printed {printed!r}"
    if question.kind == "number":
        try:
            return int(printed.strip())
        except ValueError as error:
            raise AnswerError(f"{place}, which is no integer") from error
    ids = {name: choice.id for choice in question.choices for name in (choice.id, choice.prints) if name is not None}
    for line in lines:
        if line.strip() not in ids:
            raise AnswerError(f"{place}; {line.strip()!r} is none of its choices ({', '.join(ids)})")
    found = [ids[line.strip()] for line in lines]
    if question.kind == "several":
        if len(set(found)) < len(found) or not found:
            raise AnswerError(f"{place}, but must print one line for each right choice")
        return [choice.id for choice in question.choices if choice.id in found]
    if len(found) != 1:
        raise AnswerError(f"{place}, but must print one line")
    return found[0]


def as_text(answers: dict[str, Any]) -> str:
    """As the file has them."""
    return json.dumps(answers, indent=1, ensure_ascii=False) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    status: int = typer.main.get_command(_app)(arguments, standalone_mode=False) or 0
    return status


_app = typer.Typer(add_completion=False)


@_app.command(help="Run the code of every question, and write quiz/answers.json.")
def _command(
    check: Annotated[
        bool, typer.Option("--check", help="Write nothing; exit status 1 if the file has others.")
    ] = False,
    folder: Annotated[Path | None, typer.Option(help="Where the bank is; else the one that comes with it.")] = None,
) -> int:
    path = (folder or quiz_folder()) / FILE
    try:
        text = as_text(make_answers(load_bank(folder, answers=False)))
    except (AnswerError, BankError) as error:
        typer.echo(str(error), err=True)
        return 1
    if check:
        same = path.is_file() and path.read_text(encoding="utf-8") == text
        typer.echo(f"{path} {'is what the code says' if same else 'is not what the code says: make it again'}")
        return 0 if same else 1
    path.write_text(text, encoding="utf-8")
    load_bank(folder)  # whether they are answers at all
    typer.echo(f"{path} written")
    return 0


if __name__ == "__main__":
    sys.exit(main())
