"""Make ``quiz/vectors.json``: what Python and JavaScript must agree on. Run ``python -m tests.quiz.vectors``.

It has exams of its own, without words, so that no change of the real bank touches it. The file changes only when this
script or the format of certificates does; a test makes it again and compares.
"""

from __future__ import annotations

import base64
import hashlib
import json
from datetime import date, timedelta
from pathlib import Path
from typing import Any

from lightning_remat.quiz.certificate import EPOCH, CertificateError, issue, name_tag, to_bytes, to_text, verify
from lightning_remat.quiz.grading import Core

PATH = Path(__file__).parent.parent.parent / "quiz" / "vectors.json"
ABOUT = (
    "Vectors of certificates, version 1, for whoever reads or writes them. 'exams': their cores, with the digest "
    "(first 5 bytes, hex) and the width of the answers in bytes. 'issued': what makes which ID. 'read': what an ID "
    "says, or the code of the error. 'names': tags (hex), or an error. 'signed': whether a signature is right. "
    "Made by tests/quiz/vectors.py."
)

CORES = [
    # Not a power of two, so that some numbers are out of range.
    ["one", 80, [["a-letter", "single", ["a", "b", "c"], "b"]]],
    # 8 bits of answers fill one byte, and one more needs two.
    ["byte", 50, [["bits", "several", ["a", "b", "c", "d", "e", "f", "g", "h"], ["a", "h"]]]],
    ["byte-and-one", 50, [["steps", "number", [0, 256], 256]]],
    # All kinds; 4 of 5 are 80 percent to the point.
    [
        "mixed",
        80,
        [
            ["what-is", "single", ["right", "wrong", "other"], "right"],
            ["which", "several", ["first", "second", "third"], ["first", "third"]],
            ["how-many", "number", [-5, 1000], 42],
            ["none-of", "several", ["x", "y"], ["y"]],
            ["last", "single", ["no", "yes"], "yes"],
        ],
    ],
    # Longer than any integer that JavaScript has exactly as a Number.
    ["long", 80, [[f"question-{i}", "single", ["a", "b", "c", "d"], "abcd"[i * 7 % 4]] for i in range(40)]],
    ["large", 1, [["bytes", "number", [0, 2**53 - 1], 2**53 - 1], ["below", "number", [-(2**53), 0], -1]]],
]
# As "one", with another answer: what an edited bank would be.
OTHER = ["one", 80, [["a-letter", "single", ["a", "b", "c"], "c"]]]

ASHA = "आशा शर्मा"
KSHA = "\u0915\u094d\u200d\u0937"  # with a zero width joiner, as some keyboards write it
NAMES = [
    ("plain", "Ada Lovelace"),
    ("capitals", "ADA LOVELACE"),
    ("spaces around and between", "  Ada \t\u00a0\u3000 Lovelace\n"),
    ("every kind of space", "a\x1cb\x1dc\x1ed\x1fe\x85f\u1680g\u2028h\u2029i\u202fj\u205fk"),
    ("accents, composed", "Jos\u00e9 Mu\u00f1oz"),
    ("accents, decomposed", "Jose\u0301 Mun\u0303oz"),
    ("Devanagari", ASHA),
    ("Devanagari, nukta composed by exclusion", "\u095e\u093f\u0930\u094b\u095b"),
    ("Devanagari, nukta decomposed", "\u092b\u093c\u093f\u0930\u094b\u091c\u093c"),
    ("Devanagari with a zero width joiner", KSHA),
    ("Devanagari without it", KSHA.replace("\u200d", "")),
    ("marks of direction, as copied", "\u202a\u200eAda Lovelace\u202c\u2069"),
    ("a soft hyphen, a selector, a tag, a control", "A\u00add\ufe0fa\U000e0041 Love\x07lace"),
    ("composed once what is between is gone", "Jose\u2066\u0301 Mu\u00f1oz"),
    ("invisible characters", "\ufeffA\u200bd\u200ca\u2060"),
    ("sharp s", "Wei\u00df"),
    ("two s", "Weiss"),
    ("capital sharp s", "WEI\u1e9e"),
    ("I with a dot", "\u0130stanbul"),
    ("i and a dot above", "i\u0307stanbul"),
    ("i without a dot", "\u0131stanbul"),
    ("final sigma", "\u039f\u0394\u03a5\u03a3\u03a3\u0395\u03a5\u03a3"),
    ("final sigma, lower case", "\u03bf\u03b4\u03c5\u03c3\u03c3\u03b5\u03c5\u03c2"),
    ("emoji of several parts", "\U0001f469\u200d\U0001f52c Ada"),
    ("beyond the first plane, capitals", "\U00010400\U00010401"),
    ("beyond the first plane", "\U00010428\U00010429"),
    ("a ligature stays one", "\ufb01n"),
    ("empty", ""),
    ("only spaces", " \t\u3000"),
    ("only invisible characters", "\u200b\u200d\ufeff"),
    ("only fillers, blanks and marks of direction", "\u3164\uffa0\u2800 \u200e\u2066\u180e"),
]
DAY = date(2026, 11, 29)


def right(core: list[Any]) -> dict[str, Any]:
    return {id: answer for id, _, _, answer in core[2]}


def named(name: str) -> list[Any]:
    return next(core for core in CORES if core[0] == name)


def issued() -> list[dict[str, Any]]:
    mixed = named("mixed")
    wrong = {"what-is": "other", "which": [], "how-many": -5, "none-of": ["x", "y"], "last": "no"}
    cases = [("all right", core[0], right(core), "Ada Lovelace", DAY) for core in CORES]
    cases += [
        ("all wrong", "mixed", wrong, "Ada Lovelace", DAY),
        ("just passed", "mixed", right(mixed) | {"which": ["first"]}, ASHA, DAY),
        (
            "just not passed",
            "mixed",
            right(mixed) | {"which": ["first"], "how-many": 1000},
            "Jos\u00e9 Mu\u00f1oz",
            DAY,
        ),
        ("the first day", "one", {"a-letter": "a"}, KSHA, EPOCH),
        ("the last day", "one", {"a-letter": "c"}, "Ada", EPOCH + timedelta(2**16 - 1)),
        ("every bit", "byte", {"bits": list("abcdefgh")}, "Ada", DAY),
        ("no bit", "byte", {"bits": []}, "Ada", DAY),
        ("the lowest numbers", "large", {"bytes": 0, "below": -(2**53)}, "Ada", DAY),
        ("all the same", "long", dict.fromkeys(right(named("long")), "d"), "Ada", DAY),
    ]
    return [
        {
            "what": what,
            "exam": exam,
            "answers": answers,
            "name": name,
            "day": day.isoformat(),
            "id": issue(Core.from_data(named(exam)), frozen(answers), name, day),
        }
        for what, exam, answers, name, day in cases
    ]


def frozen(answers: dict[str, Any]) -> dict[str, Any]:
    return {id: tuple(answer) if isinstance(answer, list) else answer for id, answer in answers.items()}


def thawed(answers: Any) -> dict[str, Any]:
    return {id: list(answer) if isinstance(answer, tuple) else answer for id, answer in answers.items()}


def resealed(text: str, change: dict[int, int]) -> str:
    """With other bytes, and a check that is right for them."""
    body = bytearray(to_bytes(text)[:-3])
    for place, value in change.items():
        body[place] = value
    return sealed(bytes(body))


def sealed(body: bytes) -> str:
    return to_text(body + hashlib.sha256(body).digest()[:3])


def read() -> list[dict[str, Any]]:
    made = issued()
    ids = {(one["what"], one["exam"]): one["id"] for one in made}
    cases = [(f"{one['what']}, {one['exam']}", one["id"], one["name"]) for one in made]
    one, mixed = ids["all right", "one"], ids["all right", "mixed"]
    passed = ids["just passed", "mixed"]
    alphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZ234567"
    plain = one.replace("-", "")  # 18 bytes: the last character has one bit that is not used
    twin = alphabet[alphabet.index(plain[-1]) ^ 1]
    unknown = issue(Core.from_data(OTHER), {"a-letter": "c"}, "Ada", DAY)
    cases += [
        ("another name", one, "Grace Hopper"),
        ("no name", one, None),
        ("an empty name", one, "  "),
        ("Devanagari, with other spaces", passed, " आशा\u00a0\u3000शर्मा "),
        ("Devanagari, another name", passed, "आशा वर्मा"),
        ("accents composed otherwise", ids["just not passed", "mixed"], "jose\u0301 MUN\u0303OZ"),
        ("without the joiner", ids["the first day", "one"], KSHA.replace("\u200d", "")),
        ("in lower case", mixed.lower(), "ada lovelace"),
        ("without groups", mixed.replace("-", ""), "Ada Lovelace"),
        ("in other groups, with spaces", f"  {mixed[:4]} {mixed[4:].replace('-', ' - ')}\n", "Ada Lovelace"),
        ("a tab and a space that does not break", mixed.replace("-", "\t\u00a0"), "Ada Lovelace"),
        ("nothing", "", "Ada"),
        ("only hyphens", "---", "Ada"),
        ("a character that is not of base32", "0" + one[1:], "Ada Lovelace"),
        ("padding", one + "======", "Ada Lovelace"),
        ("a long s for an S", to_text(to_bytes(passed)).replace("S", "\u017f", 1), ASHA),
        ("another first letter", ("B" if one[0] == "A" else "A") + one[1:], "Ada Lovelace"),
        ("another letter in the middle", mixed[:15] + ("Q" if mixed[15] != "Q" else "R") + mixed[16:], "Ada Lovelace"),
        ("two letters swapped", swapped(mixed), "Ada Lovelace"),
        ("another last letter", plain[:-1] + alphabet[alphabet.index(plain[-1]) ^ 2], "Ada Lovelace"),
        ("an unused bit of the last letter", plain[:-1] + twin, "Ada Lovelace"),
        ("one letter less", plain[:-1], "Ada Lovelace"),
        ("two letters less", plain[:-2], "Ada Lovelace"),
        ("one letter more", plain + "A", "Ada Lovelace"),
        ("three letters more", plain + "AAA", "Ada Lovelace"),
        ("too short for any exam, with a check that is right", sealed(to_bytes(one)[:13]), "Ada Lovelace"),
        ("version 0", resealed(one, {0: 0}), "Ada Lovelace"),
        ("version 2", resealed(one, {0: 2}), "Ada Lovelace"),
        ("version 255 of an exam that is not known", resealed(unknown, {0: 255}), "Ada"),
        ("another edition of an exam", unknown, "Ada"),
        ("the digest of no exam", resealed(mixed, {1: to_bytes(mixed)[1] ^ 1}), "Ada Lovelace"),
        ("a byte too many for its exam", sealed(to_bytes(one)[:-3] + b"\0"), "Ada Lovelace"),
        ("a byte too few for its exam", sealed(to_bytes(mixed)[:-4]), "Ada Lovelace"),
        ("answers out of range", resealed(one, {13: 3}), "Ada Lovelace"),
        ("answers far out of range", resealed(one, {13: 255}), "Ada Lovelace"),
        ("another day, sealed again: this cannot be seen", resealed(one, {6: 0, 7: 0}), "Ada Lovelace"),
    ]
    return [{"what": what, "id": id, "name": name, **outcome(id, name)} for what, id, name in cases]


def swapped(text: str) -> str:
    place = next(i for i in range(20, len(text)) if "-" not in text[i : i + 2] and text[i] != text[i + 1])
    return text[:place] + text[place + 1] + text[place] + text[place + 2 :]


def outcome(id: str, name: str | None) -> dict[str, Any]:
    try:
        found = verify([Core.from_data(core) for core in CORES], id, name)
    except CertificateError as error:
        return {"error": error.code}
    return {
        "exam": found.exam,
        "right": found.right,
        "of": found.of,
        "passed": found.passed,
        "day": found.day.isoformat(),
        "name_matches": found.name_matches,
        "right_questions": list(found.right_questions),
        "answers": thawed(found.answers),
    }


def names() -> list[dict[str, Any]]:
    found = []
    for what, name in NAMES:
        try:
            found.append({"what": what, "name": name, "tag": name_tag(name).hex()})
        except CertificateError as error:
            found.append({"what": what, "name": name, "error": error.code})
    return found


def signed() -> list[dict[str, Any]]:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    made = {one["what"]: one["id"] for one in issued() if one["exam"] == "mixed"}
    text, other = made["all right"], made["just passed"]
    keys = [Ed25519PrivateKey.from_private_bytes(bytes([n]) * 32) for n in (1, 2)]
    public = [encoded(key.public_key().public_bytes_raw()) for key in keys]

    def of(key: int, id: str, prefix: bytes = b"lightning-remat certificate 1\n") -> str:
        return encoded(keys[key].sign(prefix + to_bytes(id)))

    good = of(0, text)
    flipped = bytearray(base64.urlsafe_b64decode(good + "=="))
    flipped[5] ^= 1
    cases = [
        ("right", text, public[0], good, True),
        ("right, by another key", text, public[1], of(1, text), True),
        ("right, the ID written otherwise", text.lower().replace("-", " "), public[0], good, True),
        ("right, of another ID", other, public[0], of(0, other), True),
        ("by another key", text, public[1], good, False),
        ("of another ID", other, public[0], good, False),
        ("a bit changed", text, public[0], encoded(bytes(flipped)), False),
        ("without the prefix", text, public[0], of(0, text, b""), False),
        ("of another version", text, public[0], of(0, text, b"lightning-remat certificate 2\n"), False),
        ("too short to be one", text, public[0], good[:-2], False),
        ("no base64url", text, public[0], "*" + good[1:], False),
        ("a key that is too short", text, public[0][:-2], good, False),
        ("nothing", text, public[0], "", False),
    ]
    return [
        {"what": what, "id": id, "key": key, "signature": signature, "right": is_right}
        for what, id, key, signature, is_right in cases
    ]


def encoded(raw: bytes) -> str:
    return base64.urlsafe_b64encode(raw).decode().rstrip("=")


def content() -> str:
    exams = []
    for core in CORES:
        made = Core.from_data(core)
        exams.append({"core": core, "digest": made.digest[:5].hex(), "width": made.width})
    parts = {"exams": exams, "issued": issued(), "read": read(), "names": names(), "signed": signed()}
    # One vector a line, so that a change can be read; in ASCII, so that no editor composes what must stay decomposed.
    lines = [f' "about": {json.dumps(ABOUT)}']
    for key, rows in parts.items():
        lines.append(f' "{key}": [\n  ' + ",\n  ".join(json.dumps(row) for row in rows) + "\n ]")
    return "{\n" + ",\n".join(lines) + "\n}\n"


if __name__ == "__main__":
    PATH.write_text(content(), encoding="utf-8")
