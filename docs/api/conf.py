"""Sphinx: the reference of the API, from docstrings, and the pages for developers, from docs/*.md. English only.

Nothing is fetched, so the names of Python, torch and Lightning are not links: see NOT_OURS.
"""

from __future__ import annotations

import doctest
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT))

from lightning_remat.__about__ import __version__

project = "lightning-remat"
release = version = __version__
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.doctest",
    "sphinx.ext.napoleon",
    "docs.api.directives",
]
exclude_patterns = ["static", "templates"]
templates_path = ["templates"]
nitpicky = True
default_role = "code"
python_display_short_literal_types = True

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_default_options = {"members": True}
autoclass_content = "class"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
# With every Trainer, Lightning tells of devices and of another product; its warnings and errors are left. Where both of
# its names are installed, the one imported last logs for both.
doctest_global_setup = """
import logging
import lightning
for name in ("lightning.pytorch", "lightning.fabric", "pytorch_lightning", "lightning_fabric"):
    logging.getLogger(name).setLevel(logging.WARNING)
"""
doctest_default_flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE  # as in pyproject.toml

html_theme = "furo"
html_title = "lightning-remat, API reference"
html_static_path = ["static"]
html_favicon = "../theme/assets/favicon.svg"
html_css_files = ["guide.css"]
html_show_sphinx = False
html_show_copyright = False
html_copy_source = False
html_show_search_summary = False  # a page on a disk may not read the others
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#4527a0", "color-brand-content": "#4527a0"},
    "dark_css_variables": {"color-brand-primary": "#b39ddb", "color-brand-content": "#b39ddb"},
}

myst_heading_anchors = 4
myst_enable_extensions = ["attrs_inline", "deflist"]

# Names of others, which only an inventory from the network could turn into links.
NOT_OURS = r"(torch|lightning|rich|collections|pathlib|typing|os|contextlib)\b.*"
nitpick_ignore_regex = [("py:.*", NOT_OURS)]
nitpick_ignore = [
    ("py:class", "Path"),  # pathlib's, as it is written in a signature
    ("py:class", "lightning_remat.runtime.session.T"),  # a type variable, which has no page
]

DEVELOPERS = ROOT / "docs"
_REPOSITORY = re.compile(r"\[([^\]]+)\]\((?:\.\./)+([^)\s]+)\)")


def developer_page(text: str) -> str:
    """A page of docs/ as it is to be read here.

    What it links to in the repository has no address that could be given, so its path is named instead.
    """
    text = text.replace("](img/", "](../../img/")
    return _REPOSITORY.sub(lambda m: m[0] if m[2].startswith("img/") else f"{_plain(m[1], m[2])}", text)


def _plain(label: str, path: str) -> str:
    return f"`{path}`" if label.strip("`") == path else f"{label} (`{path}`)"


def _include_developer_pages(app: Any, docname: str, source: list[str]) -> None:
    folder, _, name = docname.rpartition("/")
    if folder != "dev" or name == "index":
        return
    path = DEVELOPERS / f"{name}.md"
    app.env.note_dependency(str(path))
    source[0] = developer_page(path.read_text(encoding="utf-8"))


def _without_private_options(
    app: Any, what: str, name: str, obj: Any, options: Any, signature: str | None, result: str | None
) -> tuple[str | None, str | None]:
    """Leave out arguments whose name begins with an underscore: nobody is to give them."""
    return re.sub(r", _\w+=[^,)]*", "", signature) if signature else signature, result


def _let_it_be_scrolled(app: Any, page: str, template: str, context: dict[str, Any], doctree: Any) -> None:
    """By the keyboard as well: what is wider than the page can have the focus."""
    if "body" in context:
        context["body"] = re.sub(r'<(pre(?=>)|div(?= class="table-wrapper))', r'<\1 tabindex="0"', context["body"])


def setup(app: Any) -> None:
    """Have the pages for developers read from where they are, and what Sphinx writes amended."""
    app.connect("source-read", _include_developer_pages)
    app.connect("autodoc-process-signature", _without_private_options)
    app.connect("html-page-context", _let_it_be_scrolled)
