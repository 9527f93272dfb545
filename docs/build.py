"""Build the site: `python docs/build.py`. It lands in build/site, and works from a disk or any server.

The reference of the API and the pages for developers come first (Sphinx), since the guide links to them by name; then
the guide in each language (MkDocs), then a look at every link of the whole. Nothing is asked of the network. Whatever
is missing or wrong ends the build.
"""

from __future__ import annotations

import argparse
import functools
import http.server
import logging
import os
import shutil
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))
os.environ.setdefault("NO_MKDOCS_2_WARNING", "1")  # a banner about another release

try:
    from mkdocs.commands.build import build as mkdocs
    from mkdocs.config import load_config

    for theirs in ("furo", "material", "myst_parser", "sphinx"):  # used by name only, and missed late
        if find_spec(theirs) is None:
            raise ImportError(f"No module named {theirs!r}")
except ImportError as error:
    sys.exit(
        f"{error}: what builds the site is in the extra `docs`. In the folder of the project, say\n"
        f'{sys.executable} -m pip install -c constraints.txt -e ".[docs]"'
    )

from docs import linkcheck
from docs.hooks import API, LANGUAGES

SITE = ROOT / "build/site"


class Failed(Exception):
    """The site cannot be built; it says why."""


def sphinx(builder: str, out: Path, *options: str) -> None:
    """Run one of Sphinx's builders on docs/api.

    Raises:
        Failed: it was not content.
    """
    command = [sys.executable, "-m", "sphinx", "-q", "-b", builder, *options, "-d", str(API.parent / "doctrees")]
    if subprocess.run([*command, "docs/api", str(out)], cwd=ROOT, check=False).returncode:
        raise Failed(f"Sphinx ({builder}) found the above.")


def guide(
    language: str, languages: list[str], *, draft: bool, pages: Path = ROOT / "docs/site", site: Path = SITE
) -> None:
    """Run MkDocs for one language.

    Args:
        language: its code.
        languages: all that there are, for the switch between them.
        draft: only say what is missing or wrong.
        pages: a folder of Markdown for each language.
        site: where to; English lies at the top, and is built first, for it empties the folder.

    Raises:
        Failed: it was not content.
    """
    config = load_config(
        str(ROOT / "docs/mkdocs.yml"),
        docs_dir=str(pages / language),
        site_dir=str(site if language == "en" else site / language),
        strict=not draft,
    )
    config.theme["language"] = language
    config.extra.update(draft=draft, built=languages)
    if draft:
        config.mdx_configs["pymdownx.snippets"]["check_paths"] = False
    config.plugins.on_startup(command="build", dirty=False)
    try:
        mkdocs(config)
    except BaseException as error:  # MkDocs leaves by SystemExit, snippets by their own errors
        if isinstance(error, KeyboardInterrupt):
            raise
        raise Failed(f"The guide, language {language}: {error}") from None
    finally:
        config.plugins.on_shutdown()


def build(*, draft: bool = False) -> None:
    """Build everything.

    Args:
        draft: make do with what is there, and only say what is missing or wrong.

    Raises:
        Failed: something is missing or wrong; what was found is on standard error.
    """
    strict = [] if draft else ["-W", "--keep-going"]
    if not draft:  # -E: nothing is taken from an earlier build
        step("examples in docstrings", sphinx, "doctest", API.parent / "doctest", "-E", *strict)
    step("API reference", sphinx, "html", API, "-a", *strict)
    languages = [lang for lang in LANGUAGES if (ROOT / "docs/site" / lang / "index.md").is_file()]
    if not draft and (missing := set(LANGUAGES) - set(languages)):
        raise Failed(f"docs/site has no index.md in {', '.join(sorted(missing))}.")
    faults = []
    for language in languages:
        try:
            step(f"guide, {language}", functools.partial(guide, draft=draft), language, languages)
        except Failed as failed:
            faults.append(str(failed))
    if faults:
        raise Failed("\n".join(faults))
    ignored = shutil.ignore_patterns(".doctrees", ".buildinfo", "_sources")
    shutil.copytree(API, SITE / "api", dirs_exist_ok=True, ignore=ignored)
    step("links", functools.partial(links, draft=draft))


def links(*, draft: bool) -> None:
    """Look at every link of the finished site.

    Raises:
        Failed: one leads nowhere.
    """
    checked = linkcheck.check(SITE)
    for fault in checked.faults:
        print(fault, file=sys.stderr)
    print(f"{checked.links} links on {checked.pages} pages, {len(checked.faults)} of them bad")
    if checked.faults and not draft:
        raise Failed("Links lead nowhere: see above.")


def step(name: str, action: object, *args: object) -> None:
    """Do one of the things that building consists of, and say how long it took."""
    start = time.monotonic()
    action(*args)  # type: ignore[operator]  # a function or a partial
    print(f"{name}: {time.monotonic() - start:.1f} s", flush=True)


def serve(port: int) -> None:
    """Serve the finished site on this machine until interrupted."""
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(SITE))
    with http.server.ThreadingHTTPServer(("127.0.0.1", port), handler) as server:
        print(f"http://127.0.0.1:{server.server_port}/index.html", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print()


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Build the site into build/site.")
    parser.add_argument("--draft", action="store_true", help="make do with what is there, and only say what is wrong")
    parser.add_argument("--serve", nargs="?", type=int, const=8000, metavar="PORT", help="and show it on this machine")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s")  # or strict fails without a word
    try:
        build(draft=arguments.draft)
    except Failed as failed:
        sys.exit(f"The site was not built. {failed}")
    print(f"built: {SITE.relative_to(ROOT)}/index.html")
    if arguments.serve is not None:
        serve(arguments.serve)


if __name__ == "__main__":
    main()
