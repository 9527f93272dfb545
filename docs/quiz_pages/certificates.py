"""The pages where a certificate is made, and where one is verified; their scripts do the work."""

from __future__ import annotations

from .text import render


def certificate_html(lang: str) -> str:
    """How far one is in each exam and, where it is passed, the certificate; for a page in the folder ``quiz/``."""
    return render("certificate.html", lang, needed=needed)


def verify_html(lang: str) -> str:
    """A form for an ID and what else is known of a certificate; for a page in the folder ``quiz/``."""
    return render("verify.html", lang)


def needed(questions: int, pass_mark: int) -> int:
    """The least number of right answers that passes."""
    return -(-questions * pass_mark // 100)
