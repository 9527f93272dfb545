"""Plots and diagrams by name and language."""

from pathlib import Path

import pytest

from docs.pictures import Pictures, UnknownPicture

WORDS = """
[all]
budget.en = "budget"
budget.es = "presupuesto"

[tape]
tape.en = "a < b"
tape.es = "cinta"
"""


@pytest.fixture
def pictures(tmp_path: Path) -> Pictures:
    plots, diagrams = tmp_path / "plots", tmp_path / "diagrams"
    plots.mkdir()
    diagrams.mkdir()
    (plots / "front.en.svg").write_text("<svg>plot</svg>", encoding="utf-8")
    (diagrams / "tape.svg").write_text("<svg><text>{{tape}} {{ budget }}</text></svg>", encoding="utf-8")
    (diagrams / "words.toml").write_text(WORDS, encoding="utf-8")
    return Pictures(plots, diagrams)


def test_a_plot(pictures: Pictures) -> None:
    assert pictures.svg("front", "en") == b"<svg>plot</svg>"


def test_a_diagram_has_the_words_of_its_language(pictures: Pictures) -> None:
    assert pictures.svg("tape", "es") == b"<svg><text>cinta presupuesto</text></svg>"
    assert pictures.svg("tape", "en") == b"<svg><text>a &lt; b budget</text></svg>"


def test_a_word_that_is_missing(pictures: Pictures) -> None:
    with pytest.raises(UnknownPicture, match="no 'hi' for the word 'tape' of the diagram 'tape'"):
        pictures.svg("tape", "hi")


@pytest.mark.parametrize(("name", "language"), [("gone", "en"), ("front", "es")])
def test_a_picture_that_is_missing(pictures: Pictures, name: str, language: str) -> None:
    with pytest.raises(UnknownPicture, match=rf"neither {name}\.{language}\.svg in .*figures nor {name}\.svg"):
        pictures.svg(name, language)


def test_words_that_cannot_be_read(pictures: Pictures, tmp_path: Path) -> None:
    """The file is named: a page is where it came up, not where it is mended."""
    (tmp_path / "diagrams" / "words.toml").write_text("budget.\n", encoding="utf-8")
    with pytest.raises(UnknownPicture, match=r"docs/diagrams/words\.toml cannot be read: Invalid"):
        pictures.svg("tape", "es")
