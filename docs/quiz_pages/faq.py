"""The frequent questions: those of the bank that say so, with their answers, as Markdown."""

from __future__ import annotations

from lightning_remat.quiz.bank import Question

from .questions import is_right
from .text import bank, explained_title, words


def faq_markdown(lang: str) -> str:
    """Questions under the headings of their topics, for a page in the site's root. Headings have the questions' ids."""
    lines: list[str] = []
    for topic in bank().topics:
        questions = [question for question in topic.questions if question.faq]
        if questions:
            lines += [f"## {topic.title[lang]} {{#topic-{topic.id}}}", ""]
        for question in questions:
            lines += [f"### {question.prompt[lang]} {{#{question.id}}}", ""]
            if question.code is not None:
                lines += ["```python", question.code.rstrip("\n"), "```", ""]
            lines += [*_answer(question, lang), ""]
            title = explained_title(question, lang)
            lines += [f"{words(lang)['explained']} [{_escaped(title)}]({question.explained})", ""]
    return "\n".join(lines)


def _answer(question: Question, lang: str) -> list[str]:
    if question.kind == "number":
        unit = f" {question.unit[lang]}" if question.unit else ""
        why = question.why[lang] if question.why else ""
        return [f"**{question.answer}{unit}.** {why}"]
    right = [choice for choice in question.choices if is_right(question, choice.id)]
    texts = [choice.text[lang] if choice.text[lang][-1] in ".?!।" else f"{choice.text[lang]}." for choice in right]
    answers = [f"**{text}** {choice.why[lang]}" for text, choice in zip(texts, right, strict=True)]
    if len(answers) == 1:
        return answers
    return [f"- {answer}" for answer in answers]


def _escaped(text: str) -> str:
    return text.translate({ord(mark): f"\\{mark}" for mark in r"\`*_[]<>"})
