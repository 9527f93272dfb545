"""A certificate as a picture: ``quiz/certificate.svg`` with its places filled in. The site fills in the same ones."""

from __future__ import annotations

import re
import unicodedata
from pathlib import Path
from xml.sax.saxutils import escape

from lightning_remat.quiz.bank import Bank, quiz_folder
from lightning_remat.quiz.certificate import CertificateError, normal_name, to_bytes, to_text, verify
from lightning_remat.quiz.words import words

_UNPRINTABLE = "[\x00-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff\u202a-\u202e\u2066-\u2069]"
_WIDE = "\u2e80"  # from here on, writing is mostly in squares
_PLACE = re.compile(r"\{\{([a-z_]+)\}\}")


def draw(bank: Bank, text: str, name: str, language: str, folder: Path | None = None) -> str:
    """The picture of a certificate, as SVG.

    Args:
        bank: which the ID is graded by.
        text: the ID.
        name: whom it was made for, as it is to be written.
        language: of the words.
        folder: where template and words are; None: those that come with the package.

    Raises:
        CertificateError: If the ID cannot be graded, or was made for another name (``name``).
    """
    found = verify(bank, text, name)
    if not found.name_matches:
        raise CertificateError("name")
    exam, place = bank.exam(found.exam), quiz_folder() if folder is None else folder
    say, name, shown = words("certificate", language, place), display_name(name), to_text(to_bytes(text))
    values: dict[str, object] = {
        "language": language,
        "title": say["title"],
        "exam": exam.title[language],
        "given_to": say["given_to"],
        "name": name,
        "name_size": max(1, min(120, 25920 // _units(name))),
        "score": say.say("score", right=found.right, of=found.of),
        "pass_mark": say.say("pass_mark", percent=exam.pass_mark),
        "day": say.say("day", day=found.day.isoformat()),
        "id_label": say["id"],
        "id": shown,
        "id_size": min(46, 3400 // len(shown)),
        "shows": say["shows"],
        "shows_not": say["shows_not"],
        "check": say["check"],
    }
    template = (place / "certificate.svg").read_text(encoding="utf-8")
    return _PLACE.sub(lambda match: escape(str(values[match[1]]), {'"': "&quot;"}), template)


def _units(name: str) -> int:
    """How wide a name becomes in bold, at most, in tenths of its size: the fonts are those of whoever shows it."""

    def units(char: str) -> int:
        if char in "MWmw@%" or char >= _WIDE:
            return 11
        return 9 if char.lower() != char else 6

    return sum(map(units, name))


def display_name(name: str) -> str:
    """A name as it is written on a certificate: composed, on one line, without what no XML can hold.

    What turns the direction of writing goes, too; joiners stay: Devanagari is written with them.

    Raises:
        CertificateError: If nothing can be seen of it (``name``).
    """
    kept = re.sub(_UNPRINTABLE, "", " ".join(name.split()))
    shown = " ".join(unicodedata.normalize("NFC", kept).split())
    normal_name(shown)
    return shown
