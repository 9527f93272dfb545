"""What all of the quiz's pages share: the bank, words, inline Markdown, links between pages, templates."""

from __future__ import annotations

import functools
import re
from pathlib import Path

import jinja2
from markdown_it import MarkdownIt
from markupsafe import Markup
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer

from lightning_remat.quiz.bank import Bank, Question, load_bank
from lightning_remat.quiz.reading import LANGUAGES
from lightning_remat.quiz.words import words as quiz_words

HERE = Path(__file__).parent
PAGES = HERE.parent / "site"
_ALSO_IN_THE_TERMINAL = (
    "error_mistyped",
    "error_version",
    "error_bank",
    "error_name",
    "name_matches",
    "name_differs",
    "signature_right",
    "signature_wrong",
)
_MARKDOWN = MarkdownIt("commonmark", {"html": False})


@functools.cache
def bank() -> Bank:
    """The bank, read once in a build."""
    return load_bank()


@functools.cache
def words(lang: str) -> dict[str, str]:
    """The words of the quiz's pages in a language, with those about certificates that the terminal says, too."""
    if lang not in LANGUAGES:
        raise ValueError(f"{lang!r} is not a language of the site: {', '.join(LANGUAGES)}")
    verify = quiz_words("verify", lang)
    return {**{key: verify[key] for key in _ALSO_IN_THE_TERMINAL}, **quiz_words("quiz", lang)}


def inline(text: str) -> Markup:
    """Inline Markdown as HTML; HTML in it is text."""
    return Markup(_MARKDOWN.renderInline(text))


def plain(text: str) -> str:
    """Inline Markdown without its marks."""
    (paragraph,) = _MARKDOWN.parseInline(text)
    return "".join(token.content for token in paragraph.children or [])


def code(source: str) -> Markup:
    """Python, with the markup that the theme colours."""
    return Markup(highlight(source, PythonLexer(), HtmlFormatter(cssclass="highlight", wrapcode=True)))


def html_page(place: str, up: str = "../") -> str:
    """The address of ``page.md#anchor`` from a page in a folder of the site (``up`` leads to the site's root)."""
    page, hash_, anchor = place.partition("#")
    return f"{up}{page.removesuffix('.md')}.html{hash_}{anchor}"


def explained_title(question: Question, lang: str) -> str:
    """The heading under which a question is explained, or a general word where the page does not say."""
    source = PAGES / lang / question.page
    if source.is_file():
        heading = re.compile(rf"^#+ +(.*?) *\{{[^}}]*#{re.escape(question.anchor)}[ }}]", re.MULTILINE)
        if found := heading.search(source.read_text(encoding="utf-8")):
            return plain(found[1])
    return words(lang)["the_page"]


@functools.cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(HERE / "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(inline=inline, code=code, href=html_page)
    return environment


def render(template: str, lang: str, **values: object) -> str:
    """A template with the words of a language, as HTML."""
    return _environment().get_template(template).render(lang=lang, words=words(lang), bank=bank(), **values)
