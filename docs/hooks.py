"""What MkDocs is taught: pages in order and labels by language, and the marks that our Markdown may have in it.

- ``[Remat](api:lightning_remat.Remat)`` and ``[..](dev:planning#anchor)`` lead into what Sphinx has built.
- ``{{ tutorial_kept.total_bytes | MiB }}`` is a figure that a script wrote.
- ``![what it shows](figure:NAME)`` is a picture with words in the page's language.
- ``<!-- quiz: TOPIC -->``, ``<!-- faq -->``, ``<!-- certificate -->``, ``<!-- verify -->`` are made from the bank.

What cannot be resolved is a warning, and so the end of a strict build. docs/build.py says which language it is, and
whether this is a draft, in ``extra``.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import re
import sys
from collections.abc import Callable
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.nav import Link, Navigation
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

from docs.measured import Measured
from docs.pictures import Pictures, UnknownPicture
from docs.references import References, UnknownReference

log = logging.getLogger("mkdocs.hooks")
WORDS: dict[str, Any] = tomllib.loads((ROOT / "docs/nav.toml").read_text(encoding="utf-8"))
LANGUAGES = tuple(WORDS["words"])
API = ROOT / "build/docs/api"
FIGURES = "assets/figures"
T = TypeVar("T")

measured = Measured(ROOT / "docs/results")
pictures = Pictures(ROOT / "docs/results/figures", ROOT / "docs/diagrams")
references = References(API)

_MARK = re.compile(r"<!--\s*(quiz:\s*([\w-]+)|faq|certificate|verify)\s*-->")
_COMMENT = re.compile(r"<!--(?!\s*no-run:).*?-->", re.DOTALL)  # "no-run": for the tests that run the pages' code
_LINK = re.compile(r'(?P<attribute>href|src)="(?P<kind>api|dev|figure):(?P<target>[^"]*)"')


# ---------------------------------------------------------------------- the language


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Labels, and pages in order."""
    language, words = _language(config), WORDS["words"][_language(config)]
    config.site_description = words["description"]
    for choice in config.theme["palette"]:
        choice["toggle"]["name"] = words["dark" if choice["scheme"] == "default" else "light"]
    config.mdx_configs["toc"]["permalink_title"] = words["permalink"]
    # An error page would need to know at which address the site is, and a map of the site, too.
    config.theme.static_templates.clear()
    config.extra["words"] = words
    config.extra["alternate"] = True  # there is a switch; theme/partials/alternate.html fills it
    config.extra["root"] = "" if language == "en" else "../"
    config.nav = _nav(config)
    return config


def _nav(config: MkDocsConfig) -> list[Any]:
    nav: list[Any] = []
    for section in WORDS["section"]:
        pages = [section["page"]] if "page" in section else section["pages"]
        if _draft(config):
            pages = [page for page in pages if (Path(config.docs_dir) / page).is_file()]
        if pages:
            nav.append({section["title"][_language(config)]: pages[0] if "page" in section else pages})
    return nav


def on_nav(nav: Navigation, config: MkDocsConfig, files: Files) -> Navigation:
    """The API reference is a tab, too."""
    nav.items.append(Link(config.extra["words"]["api"], f"{config.extra['root']}api/index.html"))
    return nav


# ---------------------------------------------------------------------- files that are made


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add what the quiz needs, its scripts and its bank."""
    if (unfilled := files.get_file_from_path("sitemap.xml")) is not None:
        files.remove(unfilled)  # MkDocs copies the template of what on_config has called off
    if (quiz := _quiz_pages(config)) is not None:
        for path, content in _from_bank(config, lambda: quiz.assets(_language(config)), {}).items():
            files.append(_generated(config, path, content))
    return files


def on_env(env: Any, config: MkDocsConfig, files: Files) -> Any:
    """Add the pictures that pages have named."""
    for name in sorted(config.extra.get("pictures", ())):
        files.append(_generated(config, _picture_path(name), pictures.svg(name, _language(config))))
    return env


def _generated(config: MkDocsConfig, path: str, content: bytes) -> File:
    return File.generated(config, path, content=content, inclusion=InclusionLevel.INCLUDED)


def _picture_path(name: str) -> str:
    return f"{FIGURES}/{name}.svg"


# ---------------------------------------------------------------------- pages


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Figures, and what is Markdown when it comes from the bank."""
    quiz = _quiz_pages(config)
    for mark in _MARK.finditer(markdown):
        if mark[2]:
            page.meta["search"] = {"exclude": True}  # or results would print the answers
        if quiz is None and not _draft(config):
            _warn(page, f"{mark[0]} is made by docs/quiz_pages, which is not there")
    if quiz is not None:
        markdown = re.sub(
            r"<!--\s*faq\s*-->",
            lambda found: _from_bank(config, lambda: quiz.faq_markdown(_language(config)), found[0]),
            markdown,
        )
    markdown, faults = measured.fill(markdown)
    for fault in faults:
        _warn(page, fault)
    return markdown


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links by name, pictures, and quizzes."""
    language, up = _language(config), "../" * page.url.count("/")

    def quiz(mark: re.Match[str]) -> str:
        module = _quiz_pages(config)
        if module is None or mark[1] == "faq":
            return mark[0]
        if mark[2]:
            return _from_bank(config, lambda: str(module.quiz_html(mark[2], language)), mark[0])
        make = module.certificate_html if mark[1] == "certificate" else module.verify_html
        return _from_bank(config, lambda: str(make(language)), mark[0])

    def link(match: re.Match[str]) -> str:
        target = unescape(match["target"])
        try:
            if match["kind"] == "figure":
                pictures.svg(target, language)
                config.extra.setdefault("pictures", set()).add(target)
                where = up + _picture_path(target)
            else:
                find = references.api if match["kind"] == "api" else references.developers
                where = f"{up}{config.extra['root']}api/{find(target)}"
        except (UnknownReference, UnknownPicture) as error:
            _warn(page, str(error))
            return match[0]
        english = "" if language == "en" or match["kind"] == "figure" else ' hreflang="en"'  # site.css marks these
        return f'{match["attribute"]}="{where}"{english}'

    html = _LINK.sub(link, html)
    for comment in _COMMENT.findall(html):
        if not _MARK.fullmatch(comment):
            _warn(page, f"{comment} is no mark that is known here; see the head of docs/hooks.py")
    for source in _without_description(html):
        _warn(page, f"the picture {source} says nothing to those who cannot see it: write ![what it shows](...)")
    return _MARK.sub(quiz, html)


class _Pictures(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.silent: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        if tag == "img" and not (found.get("alt") or "").strip():
            self.silent.append(found.get("src") or "")


def _without_description(html: str) -> list[str]:
    parser = _Pictures()
    parser.feed(html)
    return parser.silent


def on_page_context(context: Any, page: Page, config: MkDocsConfig, nav: Navigation) -> Any:
    """The same page in each language; MkDocs' own way to write links mixes up ``howto/`` and ``../howto/``."""
    to_root = "../" * page.url.count("/") + config.extra["root"]
    context["languages"] = [
        {
            "code": code,
            "name": WORDS["words"][code]["language"],
            "link": to_root + ("" if code == "en" else f"{code}/") + page.url,
            "here": code == _language(config),
        }
        for code in config.extra.get("built", LANGUAGES)
    ]
    return context


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """A name for the search's dialog, for those who cannot see it; Material gives it none."""
    nameless = 'class="md-search" data-md-component="search" role="dialog"'
    if nameless not in output:
        _warn(page, "Material has changed the search's dialog: see whether it has a name now")
    return output.replace(nameless, f'{nameless} aria-label="{config.extra["words"]["search"]}"')


def on_post_build(config: MkDocsConfig) -> None:
    """Words are found in the plural, and those with accents without them, too."""
    assets = Path(config.site_dir) / "assets"
    where, names = {
        "en": ("javascripts/workers/search.*.min.js", ["plurals"]),
        "es": ("javascripts/lunr/min/lunr.es.min.js", ["accents", "plurals"]),
    }.get(_language(config), ("", []))
    for lunr in assets.glob(where) if where else ():
        parts = [lunr, *(assets / f"js/{name}.js" for name in names)]
        lunr.write_text("\n".join(part.read_text(encoding="utf-8") for part in parts), encoding="utf-8")


# ---------------------------------------------------------------------- helpers


def _language(config: MkDocsConfig) -> str:
    return str(config.theme["language"])


def _draft(config: MkDocsConfig) -> bool:
    return bool(config.extra.get("draft"))


def _quiz_pages(config: MkDocsConfig) -> ModuleType | None:
    """docs/quiz_pages; None: it is not there, which :func:`on_page_markdown` says of the pages that need it."""
    if importlib.util.find_spec("docs.quiz_pages") is None:
        return None
    return importlib.import_module("docs.quiz_pages")


def _from_bank(config: MkDocsConfig, make: Callable[[], T], otherwise: T) -> T:
    """What the quiz makes; in a draft, whose bank may not be complete, something else if it cannot."""
    try:
        return make()
    except Exception as error:
        if not _draft(config):
            raise
        log.warning("the quiz: %s", error)
        return otherwise


def _warn(page: Page, text: str) -> None:
    log.warning("%s: %s", page.file.src_uri, text)
