"""What the scripts need to know of the bank, as a script of its own: a page opened from a disk can fetch nothing."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from lightning_remat.quiz.bank import Question, quiz_folder
from lightning_remat.quiz.words import words as quiz_words

from .text import bank, plain, words


def assets(lang: str) -> dict[str, bytes]:
    """Files that the site of a language needs besides those of the theme: path in that site -> content."""
    return {"assets/quiz/data.js": f"rematQuiz.data = {_script_json(quiz_data(lang))};\n".encode()}


def quiz_data(lang: str) -> dict[str, Any]:
    """All that ``data.js`` says."""
    known = bank()
    return {
        "lang": lang,
        "words": words(lang),
        "certificate": {
            "template": (quiz_folder() / "certificate.svg").read_text(encoding="utf-8"),
            "words": quiz_words("certificate", lang),
        },
        "topics": [
            {
                "id": topic.id,
                "title": topic.title[lang],
                "questions": [_question(question, lang) for question in topic.questions],
            }
            for topic in known.topics
        ],
        "exams": [
            {"id": exam.id, "title": exam.title[lang], "pass_mark": exam.pass_mark, "topics": list(exam.topics)}
            for exam in known.exams
        ],
    }


def _question(question: Question, lang: str) -> dict[str, Any]:
    return {**core(question), "prompt": plain(question.prompt[lang]), "digest": digest(question)}


def core(question: Question) -> dict[str, Any]:
    """What grading depends on."""
    found: dict[str, Any] = {"id": question.id, "kind": question.kind}
    if question.kind == "number":
        found["range"] = list(question.range or ())
    else:
        found["choices"] = [choice.id for choice in question.choices]
    found["answer"] = list(question.answer) if isinstance(question.answer, tuple) else question.answer
    return found


def digest(question: Question) -> str:
    """Changes when an answer that a browser remembers would no longer mean the same."""
    return hashlib.sha256(json.dumps(core(question)).encode()).hexdigest()[:8]


def _script_json(value: Any) -> str:
    """JSON that can also stand inside a ``<script>`` element."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")
