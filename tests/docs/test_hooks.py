"""What MkDocs is taught: each mark in a page, and what is said where one cannot be resolved."""

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from docs import hooks


class Fakes:
    """What stands in for results, pictures, Sphinx's output and the quiz."""

    def fill(self, text: str) -> tuple[str, list[str]]:
        return text.replace("{{ run.peak | MiB }}", "12.0 MiB"), ["{{ run.x }}: no x"] if "{{ run.x }}" in text else []

    def api(self, name: str) -> str:
        if name == "gone":
            raise hooks.UnknownReference("the API reference has no 'gone'")
        return f"remat.html#{name}"

    def developers(self, target: str) -> str:
        return f"dev/{target}"

    def svg(self, name: str, language: str) -> bytes:
        if name == "gone":
            raise hooks.UnknownPicture("there is no picture 'gone'")
        return f"{name} {language}".encode()

    def quiz_html(self, topic: str, language: str) -> str:
        return f"<form>{topic} {language}</form>"

    def faq_markdown(self, language: str) -> str:
        return f"## Why? {{#why}}\n\nBecause, {language}."

    def certificate_html(self, language: str) -> str:
        return f"<p>certificate {language}</p>"

    def verify_html(self, language: str) -> str:
        return f"<p>verify {language}</p>"


@pytest.fixture(autouse=True)
def fakes(monkeypatch: pytest.MonkeyPatch) -> Fakes:
    found = Fakes()
    for name in ("measured", "references", "pictures"):
        monkeypatch.setattr(hooks, name, found)
    monkeypatch.setattr(hooks, "_quiz_pages", lambda config: found)
    return found


def config(language: str = "en", *, draft: bool = False) -> Any:
    root = "" if language == "en" else "../"
    return SimpleNamespace(theme={"language": language}, extra={"root": root, "draft": draft})


def page(name: str = "tutorials/kept") -> Any:
    return SimpleNamespace(file=SimpleNamespace(src_uri=f"{name}.md"), url=f"{name}.html", meta={})


def content(html: str, language: str = "en", name: str = "tutorials/kept") -> str:
    return hooks.on_page_content(html, page(name), config(language), files=None)


@pytest.mark.parametrize(
    ("language", "name", "expected"),
    [
        ("en", "index", "api/remat.html#a.B"),
        ("en", "tutorials/kept", "../api/remat.html#a.B"),
        ("es", "index", "../api/remat.html#a.B"),
        ("hi", "tutorials/kept", "../../api/remat.html#a.B"),
    ],
)
def test_links_to_the_api(language: str, name: str, expected: str) -> None:
    """There is one reference, beside the English pages; elsewhere a link says that it leads to English."""
    english = "" if language == "en" else ' hreflang="en"'
    assert content('<a href="api:a.B">B</a>', language, name) == f'<a href="{expected}"{english}>B</a>'


def test_links_to_pages_for_developers() -> None:
    assert content('<a href="dev:planning#x">p</a>', "es") == '<a href="../../api/dev/planning#x" hreflang="en">p</a>'


def test_pictures() -> None:
    """They lie beside the pages of their language, and only those that are shown."""
    here = config("hi")
    html = hooks.on_page_content('<img alt="A tape" src="figure:tape">', page(), here, files=None)
    assert html == '<img alt="A tape" src="../assets/figures/tape.svg">'
    assert here.extra["pictures"] == {"tape"}


@pytest.mark.parametrize(
    ("html", "said"),
    [
        ('<a href="api:gone">x</a>', "tutorials/kept.md: the API reference has no 'gone'"),
        ('<img alt="x" src="figure:gone">', "tutorials/kept.md: there is no picture 'gone'"),
        ('<img alt="" src="figure:tape">', "says nothing to those who cannot see it"),
        ('<img src="x.png">', "the picture x.png says nothing to those who cannot see it"),
        ("<!-- quizz: kept -->", "tutorials/kept.md: <!-- quizz: kept --> is no mark that is known here"),
        ("<!-- Quiz: kept --><!-- no-run: why -->", "<!-- Quiz: kept --> is no mark"),
    ],
)
def test_what_cannot_be_resolved(html: str, said: str, caplog: pytest.LogCaptureFixture) -> None:
    content(html)
    assert [said in record.getMessage() for record in caplog.records] == [True]
    assert caplog.records[0].levelno == logging.WARNING


def test_warnings_end_a_strict_build() -> None:
    """MkDocs counts those of its own loggers."""
    assert hooks.log.name.startswith("mkdocs.")


def test_code_is_left_alone() -> None:
    html = "<pre><code>&lt;a href=&quot;api:a.B&quot;&gt;</code></pre>"
    assert content(html) == html


def test_figures(caplog: pytest.LogCaptureFixture) -> None:
    text = hooks.on_page_markdown("Peak: {{ run.peak | MiB }}, {{ run.x }}", page(), config(), files=None)
    assert text == "Peak: 12.0 MiB, {{ run.x }}"
    assert [record.getMessage() for record in caplog.records] == ["tutorials/kept.md: {{ run.x }}: no x"]


def test_quizzes_are_made_from_the_bank() -> None:
    """And stay out of the search, whose results would print the answers."""
    here, markdown = page("quiz/kept"), "# Kept\n\n<!-- quiz: kept -->\n"
    assert hooks.on_page_markdown(markdown, here, config("hi"), files=None) == markdown
    assert here.meta["search"] == {"exclude": True}
    assert hooks.on_page_content("<!-- quiz: kept -->", here, config("hi"), files=None) == "<form>kept hi</form>"


def test_other_pages_from_the_bank() -> None:
    here = page("quiz/certificate")
    assert hooks.on_page_content("<!-- certificate -->", here, config("es"), files=None) == "<p>certificate es</p>"
    assert hooks.on_page_content("<!-- verify -->", here, config("es"), files=None) == "<p>verify es</p>"
    assert here.meta == {}


def test_frequent_questions_are_markdown() -> None:
    """They are searched, and have anchors."""
    here = page("faq")
    text = hooks.on_page_markdown("# FAQ\n\n<!-- faq -->\n", here, config("en"), files=None)
    assert text == "# FAQ\n\n## Why? {#why}\n\nBecause, en.\n"
    assert "search" not in here.meta


@pytest.mark.parametrize("draft", [False, True])
def test_without_what_makes_quizzes(
    draft: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A draft goes on without; a build says what is missing."""
    monkeypatch.setattr(hooks, "_quiz_pages", lambda config: None)
    markdown = "<!-- quiz: kept -->"
    assert hooks.on_page_markdown(markdown, page(), config(draft=draft), files=None) == markdown
    said = [record.getMessage() for record in caplog.records]
    assert said == (
        [] if draft else ["tutorials/kept.md: <!-- quiz: kept --> is made by docs/quiz_pages, which is not there"]
    )


def test_a_bank_that_is_not_complete(monkeypatch: pytest.MonkeyPatch, fakes: Fakes) -> None:
    """It ends a build, and not a draft."""

    def quiz_html(topic: str, language: str) -> str:
        raise ValueError("no answers")

    monkeypatch.setattr(fakes, "quiz_html", quiz_html)
    mark = "<!-- quiz: kept -->"
    assert hooks.on_page_content(mark, page("quiz/kept"), config(draft=True), files=None) == mark
    with pytest.raises(ValueError, match="no answers"):
        hooks.on_page_content(mark, page("quiz/kept"), config(), files=None)


def test_the_switch_of_language_leads_to_the_same_page() -> None:
    context = hooks.on_page_context({}, page(), config("es"), nav=None)
    assert [(found["code"], found["link"], found["here"]) for found in context["languages"]] == [
        ("en", "../../tutorials/kept.html", False),
        ("es", "../../es/tutorials/kept.html", True),
        ("hi", "../../hi/tutorials/kept.html", False),
    ]
    context = hooks.on_page_context({}, page("index"), config("en"), nav=None)
    assert [found["link"] for found in context["languages"]] == ["index.html", "es/index.html", "hi/index.html"]


def test_every_word_of_the_frame_is_there_in_every_language() -> None:
    english = hooks.WORDS["words"]["en"]
    assert tuple(hooks.LANGUAGES) == ("en", "es", "hi")
    for language in hooks.LANGUAGES:
        assert hooks.WORDS["words"][language].keys() == english.keys()
        assert all(section["title"][language] for section in hooks.WORDS["section"])


def test_pages_in_order(tmp_path: Path) -> None:
    """All of them in a build, in a draft those that are there."""
    (tmp_path / "tutorials").mkdir()
    (tmp_path / "tutorials/kept.md").write_text("# Kept\n", encoding="utf-8")
    here = config("es", draft=True)
    here.docs_dir = str(tmp_path)
    assert hooks._nav(here) == [{"Tutoriales": ["tutorials/kept.md"]}]
    here.extra["draft"] = False
    assert hooks._nav(here)[0] == {"Inicio": "index.md"}
    assert len(hooks._nav(here)) == len(hooks.WORDS["section"])
