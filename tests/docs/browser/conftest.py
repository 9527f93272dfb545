"""The built site in Chromium, from a server and from the disk. Every page that a test opens is watched.

`python docs/build.py` builds what is looked at. Chromium is the one that the environment variable CHROMIUM names, or
one on the path; no browser is downloaded.
"""

from __future__ import annotations

import functools
import http.server
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:  # the suite is collected where no browser is
    from playwright.sync_api import Browser, BrowserContext, Page

SITE = Path(__file__).parents[3] / "build/site"
NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
QUIET = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
)


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    path = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        pytest.fail(f"There is no Chromium: set CHROMIUM, or put one of {', '.join(NAMES)} on the path.", pytrace=False)
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=path, args=list(QUIET))
        yield chromium
        chromium.close()


@pytest.fixture(scope="session")
def site() -> Path:
    if not (SITE / "index.html").is_file():
        pytest.fail("The site is not built: run `python docs/build.py` first.", pytrace=False)
    return SITE


class _Silent(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *arguments: object) -> None:
        pass


@pytest.fixture(scope="session")
def served(site: Path) -> Iterator[str]:
    """Where the site is on a server, with a slash at the end."""
    handler = functools.partial(_Silent, directory=str(site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()
        thread.join()


@pytest.fixture(scope="session", params=["http", "file"])
def base(request: pytest.FixtureRequest, site: Path, served: str) -> str:
    """Where the site is, both ways of reading it."""
    return served if request.param == "http" else f"{site.as_uri()}/"


# Material builds the index of its search anew on each page. A test that does not search gets a worker that never
# answers, and is done sooner.
NO_SEARCH = """
  class Silent extends EventTarget { postMessage() {} terminate() {} }
  Object.defineProperty(window, "Worker", { get: () => Silent, set() {} });
"""


class Visitor:
    """Opens pages in contexts of their own, each a new learner, and notes what none of them may do."""

    def __init__(self, browser: Browser) -> None:
        self._browser = browser
        self._contexts: list[BrowserContext] = []
        self.faults: list[str] = []

    def context(self, *, search: bool = False, **options: Any) -> BrowserContext:
        """A learner. `options` are Playwright's: viewport, color_scheme, java_script_enabled and so on."""
        context = self._browser.new_context(**options)
        if not search:
            context.add_init_script(NO_SEARCH)
        context.set_default_timeout(10_000)
        context.on("page", self._watch)
        self._contexts.append(context)
        return context

    def __call__(self, address: str, **options: Any) -> Page:
        page = self.context(**options).new_page()
        page.goto(address)
        return page

    def _watch(self, page: Page) -> None:
        page.on("console", lambda message: message.type in ("error", "warning") and self.faults.append(message.text))
        page.on("pageerror", lambda error: self.faults.append(f"script: {error}"))
        page.on("request", lambda request: self._check(request.url))

    def _check(self, url: str) -> None:
        if not url.startswith(("http://127.0.0.1:", "file://", "data:", "blob:")):
            self.faults.append(f"a request to {url}")

    def close(self) -> None:
        for context in self._contexts:
            context.close()


@pytest.fixture
def visit(browser: Browser) -> Iterator[Visitor]:
    visitor = Visitor(browser)
    yield visitor
    visitor.close()
    assert not visitor.faults, "errors in the console, or requests to other hosts"
