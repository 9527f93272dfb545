"""The quiz in a terminal: one question at a time, and what is right or wrong about the answer at once.

Everything is said in words, one below the other: colours and styles add to it and mean nothing of their own, so that
a screen reader, a pipe and a terminal without them lose nothing.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from typing import TypeVar

from rich.console import Console
from rich.padding import Padding
from rich.syntax import Syntax
from rich.text import Text

from lightning_remat.quiz.bank import Answer, Bank, Choice, Exam, Question, Topic
from lightning_remat.quiz.grading import grade, is_right
from lightning_remat.quiz.progress import Progress
from lightning_remat.quiz.words import Words

LEAVE = "q"
LETTERS = "abcdefgh"
TRIES = 3  # what cannot be understood is asked for again, and not for ever
_INLINE = re.compile(r"(?P<ticks>`+)(?P<code>.+?)(?P=ticks)|\*\*(?P<strong>[^*]+)\*\*|\*(?P<emphasis>[^*\s][^*]*)\*")
_INDENT = 4


T = TypeVar("T")


class Left(Exception):
    """Whoever was asked has left: Ctrl-C, the end of input, a word for it, or nothing that could be understood."""


class Terminal:
    """Asks and says.

    Args:
        console: where to.
        say: the words of the screen ``terminal``.
        language: of questions.
        link: where a page of the site is, by what ``explained`` says; None: that is not known.
        ask: reads a line; None: from standard input.

    Attributes:
        unlinked: whether there was something to explain and no page to name.
    """

    def __init__(
        self,
        console: Console,
        say: Words,
        language: str,
        link: Callable[[str], str] | None,
        ask: Callable[[str], str] | None = None,
    ) -> None:
        self.console, self.say, self.language, self._link = console, say, language, link
        self._ask = self._ask_console if ask is None else ask
        self.unlinked = False

    # ---- saying

    def line(self, text: str = "", style: str = "") -> None:
        """One paragraph, as it is."""
        self.console.print(Text(text, style), highlight=False)

    def marked(self, text: str, indent: int = 0, style: str = "") -> None:
        """One paragraph of inline Markdown."""
        self.console.print(Padding(self._inline(text, style), (0, 0, 0, indent), expand=False), highlight=False)

    def _inline(self, text: str, style: str = "") -> Text:
        """Markdown's inline code and emphasis. Where there are no styles, code keeps its marks."""
        plain = self.console.color_system is None
        found, at = Text(style=style), 0
        for match in _INLINE.finditer(text):
            found.append(text[at : match.start()])
            if match["code"]:
                found.append(match[0] if plain else match["code"], "cyan")
            else:
                found.append(match["strong"] or match["emphasis"], "bold" if match["strong"] else "italic")
            at = match.end()
        return found.append(text[at:])

    def _code(self, code: str) -> None:
        """As it is: lines that are too long for the terminal go on in its next line, so that it can be copied."""
        shown = Text(code.rstrip("\n"))
        if self.console.color_system is not None:
            shown = Syntax(code, "python", theme="ansi_dark", background_color="default").highlight(code)
            shown.rstrip()
        self.line()
        for row in shown.split("\n", allow_blank=True):
            self.console.print(Text(" " * _INDENT) + row, soft_wrap=True, highlight=False)

    # ---- asking

    def ask(self, prompt: str, leave: str = LEAVE) -> str:
        """A line of input, without space at its ends.

        Raises:
            Left: where there is no more, or it is the word for leaving.
        """
        try:
            found = self._ask(prompt).strip()
        except (EOFError, KeyboardInterrupt) as error:
            self.line()
            raise Left from error
        except RuntimeError as error:  # "lost sys.stdin": it was closed before Python began
            if sys.stdin is not None and sys.stdout is not None:
                raise
            raise Left from error
        if leave and found.lower() == leave:
            raise Left
        return found

    def _ask_console(self, prompt: str) -> str:
        self.console.print(Text(prompt + " "), end="", highlight=False, soft_wrap=True)
        return input()

    def until(self, prompt: str, understand: Callable[[str], T], again: str, leave: str = LEAVE) -> T:
        """Ask until there is something that can be understood.

        Args:
            prompt: what is asked.
            understand: what a line means; a ValueError: nothing.
            again: what is said then.
            leave: the word for leaving.

        Raises:
            Left: there was none, after a few times.
        """
        for _ in range(TRIES):
            try:
                return understand(self.ask(prompt, leave))
            except ValueError:
                self.line(again, "yellow")
        self.line(self.say.say("too_often", count=TRIES))
        raise Left

    def pick(self, bank: Bank, progress: Progress) -> Topic | Exam:
        """Show what there is and how far it was answered, and ask which."""
        entries: list[Topic | Exam] = [*bank.topics, *bank.exams]
        for number, entry in enumerate(entries, 1):
            if number in (1, len(bank.topics) + 1):
                self.line()
                self.line(self.say["topics" if number == 1 else "exams"], "bold")
            counts = self._counts(entry.questions, progress)
            self.line(f"{number:3}  {entry.title[self.language]}")
            self.marked(counts, _INDENT + 1, "dim")
        self.line()
        values = {"low": 1, "high": len(entries)}

        def wanted(text: str) -> Topic | Exam:
            chosen = _integer(text)
            if chosen is None or not 1 <= chosen <= len(entries):
                raise ValueError(text)
            return entries[chosen - 1]

        return self.until(self.say.say("which", **values), wanted, self.say.say("which_again", **values))

    def _counts(self, questions: Sequence[Question], progress: Progress) -> str:
        answered = len(progress.first(questions))
        return self.say.say("counts", answered=answered, of=len(questions), right=progress.right(questions))

    def answer(self, question: Question) -> Answer:
        """Ask for an answer."""
        if question.range is not None:
            low, high = question.range
            prompt = self.say.say("ask_number", low=low, high=high)
            again = self.say.say("again_number", low=low, high=high)
        else:
            prompt = self.say[f"ask_{question.kind}"]
            again = self.say.say(f"again_{question.kind}", last=LETTERS[len(question.choices) - 1])

        def meant(text: str) -> Answer:
            found = understood(question, text)
            if found is None:
                raise ValueError(text)
            return found

        return self.until(prompt, meant, again)

    # ---- the quiz

    def run(self, what: Topic | Exam, progress: Progress) -> None:
        """Ask what was not answered yet."""
        questions = what.questions
        self.line()
        self.line(what.title[self.language], "bold")
        self.line(self._counts(questions, progress))
        self.line(self.say.say("how_to_leave", key=LEAVE), "dim")
        for number, question in enumerate(questions, 1):
            if question not in progress:
                self._one(question, number, len(questions), progress)
        self.line()
        self.line(self.say.say("all_answered", right=progress.right(questions), of=len(questions)), "bold")

    def retry(self, what: Topic | Exam, progress: Progress) -> None:
        """Ask again what was missed, as often as that is wanted."""
        while missed := progress.missed(what.questions):
            self.line()
            if not self._retry_wanted(len(missed)):
                return
            for number, question in enumerate(what.questions, 1):
                if question in missed:
                    self._one(question, number, len(what.questions), progress)

    def _retry_wanted(self, count: int) -> bool:
        self.line(self.say["first_counts"], "dim")
        for _ in range(TRIES):
            found = self.ask(self.say.say("retry", count=count)).lower()
            if found in ("n", "no", "नहीं"):
                return False
            if found in ("", "y", "yes", "s", "si", "sí", "हाँ", "हां"):
                return True
            self.line(self.say["retry_again"])
        self.line(self.say["taken_as_no"])
        return False

    def _one(self, question: Question, number: int, of: int, progress: Progress) -> None:
        self.line()
        self.line(self.say.say("question", number=number, of=of), "bold")
        self.marked(question.prompt[self.language])
        if question.code is not None:
            self._code(question.code)
        self.line()
        for letter, choice in zip(LETTERS, question.choices, strict=False):
            self.marked(f"{letter}) {choice.text[self.language]}", 2)
        if question.unit is not None:
            self.marked(f"({question.unit[self.language]})", 2)
        answer = self.answer(question)
        troubled = progress.problem
        progress.answer(question, answer)
        self.feedback(question, answer)
        if progress.problem and not troubled:
            self.line(self.say.say("not_kept", problem=progress.problem), "yellow")

    def feedback(self, question: Question, answer: Answer) -> None:
        """Whether an answer is right, why, and where that is explained."""
        right = is_right(question, answer)
        self.line()
        self.line(self.say["right" if right else "wrong"], "bold green" if right else "bold red")
        if question.kind == "number":
            self._about_number(question, answer, right)
        elif question.kind == "several":
            self._about_several(question, answer)
        else:
            self._about_single(question, answer, right)
        if self._link is not None:
            self.line(f"{self.say['explained']} {self._link(question.explained)}", "dim")
        self.unlinked = self._link is None

    def _about_number(self, question: Question, answer: Answer, right: bool) -> None:
        if not right:
            near = [one.why[self.language] for one in question.near if one.value == answer]
            self.marked(near[0] if near else self.say["other_number"])
            unit = f" {question.unit[self.language]}" if question.unit else ""
            self.marked(f"{self.say['the_answer']}: {question.answer}{unit}")
        if question.why is not None:
            self.marked(question.why[self.language])

    def _about_single(self, question: Question, answer: Answer, right: bool) -> None:
        self.marked(question.choice(str(answer)).why[self.language])
        if not right:
            choice = question.choice(str(question.answer))
            self.marked(f"{self.say['the_answer']}: {self._named(question, choice)}")
            self.marked(choice.why[self.language])

    def _about_several(self, question: Question, answer: Answer) -> None:
        """What was chosen, and what should have been, each with its reason."""
        chosen = answer if isinstance(answer, tuple) else ()
        right = question.answer if isinstance(question.answer, tuple) else ()
        for choice in question.choices:
            if choice.id not in chosen and choice.id not in right:
                continue
            how = self.say["chosen" if choice.id in chosen else "missed"]
            belongs = self.say["belongs" if choice.id in right else "belongs_not"]
            self.marked(f"{self._named(question, choice)} ({how})", 2)
            self.marked(f"{belongs}: {choice.why[self.language]}", 5)

    def _named(self, question: Question, choice: Choice) -> str:
        return f"{LETTERS[question.choices.index(choice)]}) {choice.text[self.language]}"

    def outcome(self, exam: Exam, progress: Progress) -> bool:
        """Say how an exam went; returns whether it is passed, which takes an answer to each of its questions."""
        answers = progress.first(exam.questions)
        if left := len(exam.questions) - len(answers):
            self.line(self.say.say("open", left=left))
            return False
        score = grade(exam, answers)
        needed = -(-exam.pass_mark * score.of // 100)
        key, style = ("passed", "bold green") if score.passed else ("failed", "bold red")
        self.line(self.say.say(key, right=len(score.right), of=score.of, needed=needed), style)
        return score.passed


def understood(question: Question, text: str) -> Answer | None:
    """What was typed, as an answer; None: it is none.

    >>> from lightning_remat.quiz.bank import load_bank
    >>> understood(load_bank().question("what-is"), "?")
    """
    if question.range is not None:
        number = _integer(text)
        return number if number is not None and question.range[0] <= number <= question.range[1] else None
    ids = [choice.id for choice in question.choices]
    words = text.lower().replace(",", " ").replace(")", " ").split()
    if len(words) == 1 and words[0].isalpha():
        words = list(words[0])  # "ac", too, are two letters
    places = [_place(word, ids) for word in words]
    chosen = {ids[place] for place in places if place is not None}
    if not chosen or None in places:
        return None
    if question.kind == "single":
        return chosen.pop() if len(places) == 1 else None
    return tuple(id for id in ids if id in chosen)


def _place(word: str, ids: Sequence[str]) -> int | None:
    """Of a choice, by its letter or its number."""
    if len(word) == 1 and word in LETTERS[: len(ids)]:
        return LETTERS.index(word)
    number = _integer(word)
    return number - 1 if number is not None and 1 <= number <= len(ids) else None


def _integer(text: str) -> int | None:
    """In digits of any script; Python's own reading admits more than that."""
    text = text.strip().replace("\N{MINUS SIGN}", "-")
    if not re.fullmatch(r"[+-]?\d{1,30}", text):
        return None
    return int(text)
