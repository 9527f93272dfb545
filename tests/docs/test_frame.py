"""The frame around every page, built by MkDocs with the real configuration around two small pages."""

import re
from pathlib import Path

import pytest

from docs import linkcheck
from docs.build import guide

LANGUAGES = ["en", "es", "hi"]
PAGE = """# Title

[home](../index.md#there), `code`

```python
--8<-- "tests/docs/test_frame.py:shown"
```
"""
# --8<-- [start:shown]
SHOWN = 5
# --8<-- [end:shown]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pages, out = tmp_path_factory.mktemp("pages"), tmp_path_factory.mktemp("site")
    for language in LANGUAGES:
        (pages / language / "howto").mkdir(parents=True)
        (pages / language / "index.md").write_text("# Home\n\n## There {#there}\n", encoding="utf-8")
        (pages / language / "howto/slow.md").write_text(PAGE, encoding="utf-8")
    for language in LANGUAGES:
        guide(language, LANGUAGES, draft=True, pages=pages, site=out)
    for name in ("api/index.html", "api/dev/index.html"):  # Sphinx's, which every page leads to
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_text("<html></html>", encoding="utf-8")
    return out


def html(site: Path, language: str, page: str = "howto/slow.html") -> str:
    return (site / ("" if language == "en" else language) / page).read_text(encoding="utf-8")


def test_every_link_leads_somewhere_and_nothing_is_asked_of_another_host(site: Path) -> None:
    checked = linkcheck.check(site)
    assert [str(fault) for fault in checked.faults] == []
    assert checked.pages == 2 * len(LANGUAGES) + 2


@pytest.mark.parametrize("language", LANGUAGES)
def test_the_language_is_said(site: Path, language: str) -> None:
    assert f'<html lang="{language}"' in html(site, language)


@pytest.mark.parametrize("language", LANGUAGES)
def test_the_same_page_in_the_other_languages(site: Path, language: str) -> None:
    up = "../" if language == "en" else "../../"
    expected = {code: f"{up}{'' if code == 'en' else f'{code}/'}howto/slow.html" for code in LANGUAGES}
    text = html(site, language)
    switch = re.findall(r'<a href="([^"]+)" hreflang="(\w+)" lang="\w+" class="md-select__link"', text)
    assert {code: link for link, code in switch} == expected
    head = re.findall(r'<link rel=" alternate" href="([^"]+)" hreflang="(\w+)">', text)
    assert {code: link for link, code in head} == expected
    assert text.count('aria-current="true"') == 1


@pytest.mark.parametrize(
    ("language", "words"),
    [
        ("en", ("How-to", "Start", "API reference", "Switch to dark mode", 'aria-label="Search"', "Permanent link")),
        (
            "es",
            (
                "Guías prácticas",
                "Inicio",
                "Referencia de la API (en inglés)",
                "Cambiar al modo oscuro",
                "Enlace permanente",
            ),
        ),
        ("hi", ("कैसे करें", "शुरुआत", "API संदर्भ (अंग्रेज़ी में)", "डार्क मोड पर जाएँ", 'aria-label="खोज"', "स्थायी लिंक")),
    ],
)
def test_words_of_the_frame(site: Path, language: str, words: tuple[str, ...]) -> None:
    text = html(site, language)
    assert [word for word in words if word not in text] == []


@pytest.mark.parametrize("language", LANGUAGES)
def test_each_language_has_its_own_search(site: Path, language: str) -> None:
    """As a script, too, which a page on a disk can load."""
    folder = site / ("" if language == "en" else language) / "search"
    index = (folder / "search_index.js").read_text(encoding="utf-8")
    assert index.startswith("var __index = ")
    assert f'"lang":["{language}"]' in index.replace(": ", ":").replace("[ ", "[")
    assert "iframe-worker/shim.js" in html(site, language)


def test_what_a_page_includes(site: Path) -> None:
    assert "SHOWN" in html(site, "hi")


def test_there_is_no_page_whose_links_depend_on_an_address(site: Path) -> None:
    assert not list(site.rglob("404.html")) + list(site.rglob("sitemap.xml"))


@pytest.mark.parametrize("language", LANGUAGES)
def test_accents_are_left_out_of_spanish_alone(site: Path, language: str) -> None:
    folder = site / ("" if language == "en" else language) / "assets/javascripts/lunr/min"
    assert [path.name for path in folder.glob("*.js") if "es-accents" in path.read_text(encoding="utf-8")] == (
        ["lunr.es.min.js"] if language == "es" else []
    )
