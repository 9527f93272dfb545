"""The certificate as a picture: well-formed in every language, nothing left to fill in, names are text and no more."""

from __future__ import annotations

import re
from datetime import date
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_remat.quiz.bank import LANGUAGES, load_bank, quiz_folder
from lightning_remat.quiz.certificate import CertificateError, issue, normal_name
from lightning_remat.quiz.picture import display_name, draw
from lightning_remat.quiz.words import words

BANK = load_bank(Path(__file__).parent / "tiny")
EXAM = BANK.exam("all")
ANSWERS = {question.id: question.answer for question in EXAM.questions if question.answer is not None}
LONG = "Maria " * 40


def made_for(name: str) -> str:
    return issue(EXAM, ANSWERS, name, date(2026, 11, 29))


@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.parametrize(
    "name", ["Ada Lovelace", "आशा शर्मा", LONG, '<script>alert("&amp;{{id}}")</script>', "\x00A\x07\ufffe"]
)
def test_a_picture(name: str, language: str) -> None:
    name = display_name(name)
    text = made_for(name)
    picture = draw(BANK, text.lower(), name, language)
    assert "{{" not in picture.replace("{{id}}", "")
    root = ElementTree.fromstring(picture)
    assert root.get("lang") == language
    assert {element.tag.partition("}")[2] for element in root.iter()} == {
        "svg",
        "title",
        "desc",
        "rect",
        "g",
        "path",
        "circle",
        "text",
    }
    shown = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    say = words("certificate", language)
    assert name in shown
    assert text in shown
    assert {say["shows"], say["shows_not"], say["check"], EXAM.title[language]} <= set(shown)
    assert say.say("score", right=5, of=5) in shown
    # It is one page: a name of average letters is no wider than the frame.
    size = next(
        int(element.get("font-size", "0")) for element in root.iter() if element.text == name and element.get("x")
    )
    assert 0.6 * size * len(name) <= 2650


@given(st.text())
def test_a_name_as_shown_is_the_one_it_was_made_for(name: str) -> None:
    """Whoever copies it from the picture, and whoever has it as it was typed, finds it right."""
    try:
        shown = display_name(name)
    except CertificateError:
        with pytest.raises(CertificateError):
            normal_name(name)
    else:
        assert normal_name(shown) == normal_name(name)
        assert display_name(shown) == shown


@pytest.mark.parametrize(
    ("name", "tenths"),  # of its size: what letters are wide in the bold of common fonts
    [("W" * 36, 11), ("mw" * 25, 11), ("MARÍA GUADALUPE HERNÁNDEZ DE LA TORRE", 8), ("界" * 30, 10), ("W" * 500, 11)],
)
def test_wide_letters_fit(name: str, tenths: int) -> None:
    picture = draw(BANK, made_for(name), name, "en")
    (size,) = re.findall(rf'font-size="(\d+)" font-weight="700">{name}<', picture)
    assert 0 < int(size) * tenths / 10 * len(name) <= 2650


def test_no_name_is_too_long_to_be_drawn() -> None:
    assert 'font-size="1" font-weight="700"' in draw(BANK, made_for("x" * 10_000), "x" * 10_000, "en")


def test_nothing_is_asked_of_the_network() -> None:
    """No font, no picture, no script; the name space is a name."""
    template = (quiz_folder() / "certificate.svg").read_text(encoding="utf-8")
    assert set(re.findall(r"https?://[^\"]*", template)) == {"http://www.w3.org/2000/svg"}
    assert not re.search(r"href|url\(|@import|<script|<style|on\w+=", template)


def test_only_for_the_name_it_was_made_for() -> None:
    with pytest.raises(CertificateError) as caught:
        draw(BANK, made_for("Ada"), "Grace", "en")
    assert caught.value.code == "name"
    with pytest.raises(CertificateError) as caught:
        draw(BANK, made_for("Ada")[1:], "Ada", "en")
    assert caught.value.code == "mistyped"


def test_names_as_they_are_shown() -> None:
    joined = "\u0915\u094d\u200d\u0937"
    assert display_name(f"  {joined}\n x\t") == f"{joined} x"
    assert display_name("Jose\u0301\x07 \u202eX") == "Jos\u00e9 X"
    assert display_name("\U0001f469\u200d\U0001f52c") == "\U0001f469\u200d\U0001f52c"
    assert display_name("Jose\u202e\u0301") == "Jos\u00e9", "composed, once what was between is gone"
    for nothing in ("", " ", "\x07", "\u200d", "\u202e", "\u200e", "\u00ad", "\u3164", "\u2800", "\ufe0f"):
        with pytest.raises(CertificateError, match="at least one visible character"):
            display_name(nothing)
