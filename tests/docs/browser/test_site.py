"""The whole site as it is read: every page, in the three languages and the reference, from a server and from a disk."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from lightning_remat.quiz.bank import LANGUAGES
from tests.docs.browser.conftest import Visitor

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = pytest.mark.browser

PARTS = (*LANGUAGES, "api")
PHONE = {"width": 360, "height": 740}

# What is wrong with the page that is shown. Boxes that scroll must be within reach of the keyboard in every browser,
# so a tabindex, or something in them that has the focus anyway.
LOOK = """async () => {
  for (let frame = 0; frame < 2; frame++) await new Promise(requestAnimationFrame); // sizes are watched
  const faults = [], root = document.documentElement;
  if (!document.title.trim()) faults.push("no title");
  const headings = document.querySelectorAll("h1").length;
  if (headings !== 1) faults.push(`${headings} headings of the first level`);
  for (const image of document.querySelectorAll("img[src]")) // without: one that a script will fill
    if (!image.naturalWidth) faults.push(`not loaded: ${image.getAttribute("src")}`);
  if (root.scrollWidth > root.clientWidth) {
    const beyond = (it) => it.getBoundingClientRect().right > root.clientWidth;
    const wide = [...document.querySelectorAll("main *, article *")].find(beyond);
    faults.push(`${root.scrollWidth} px wide: ${wide?.outerHTML.slice(0, 80)}`);
  }
  for (const box of document.querySelectorAll("pre, code, table, main div, article div"))
    if (box.scrollWidth > box.clientWidth + 1 && /auto|scroll/.test(getComputedStyle(box).overflowX)
        && box.checkVisibility() && !box.matches("[tabindex]") && !box.querySelector("a, button, input, [tabindex]"))
      faults.push(`scrolls by mouse only: ${box.outerHTML.slice(0, 80)}`);
  return [root.lang, faults];
}"""


def start(base: str, language: str) -> str:
    """The folder of a language."""
    return base if language == "en" else f"{base}{language}/"


def pages(site: Path, part: str) -> list[str]:
    """The pages of a language, or of the reference."""
    found = [path.relative_to(site).as_posix() for path in site.rglob("*.html")]
    return sorted(path for path in found if (path.split("/")[0] if path.split("/")[0] in PARTS else "en") == part)


@pytest.mark.parametrize("part", PARTS)
def test_every_page(visit: Visitor, site: Path, base: str, part: str) -> None:
    # The search takes time to start. From the disk, where it has more to go wrong, it starts on every page.
    page = visit.context(search=base.startswith("file:"), viewport=PHONE).new_page()
    language, wrong = "en" if part == "api" else part, []
    paths = pages(site, part)
    assert len(paths) > 15
    for path in paths:
        page.goto(base + path)
        said, faults = page.evaluate(LOOK)
        if said != language:
            faults.append(f"said to be in {said!r}")
        wrong += [f"{path}: {fault}" for fault in faults + visit.faults]
        visit.faults.clear()
    assert not wrong, "\n".join(wrong)


# ---------------------------------------------------------------------- the same page in another language


@pytest.mark.parametrize("width", [360, 1280], ids=["phone", "desktop"])
def test_the_switch_of_languages_leads_to_the_same_page(visit: Visitor, base: str, width: int) -> None:
    where = "howto/troubleshooting.html"
    page = visit(base + where, viewport={"width": width, "height": 740})
    for language in ("es", "hi", "en", *(("hi", "es", "en") if width > 1000 else ())):  # from each one to each
        page.locator(".md-select button").hover()  # the theme's menu opens under the mouse, and for the focus
        page.locator(f".md-select__link[hreflang={language}]").click()
        page.wait_for_url(start(base, language) + where)
        assert page.locator("html").get_attribute("lang") == language
        assert page.locator(".md-select__link[aria-current]").get_attribute("hreflang") == language


def test_the_switch_of_languages_by_keyboard(visit: Visitor, served: str) -> None:
    page = visit(f"{served}guide.html")
    page.locator(".md-select button").focus()
    page.keyboard.press("Tab")  # to English
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    page.wait_for_url(f"{served}es/guide.html")


# ---------------------------------------------------------------------- light and dark


def scheme(page: Page) -> str | None:
    return page.locator("body").get_attribute("data-md-color-scheme")


def toggle(page: Page) -> None:
    page.locator("[data-md-component=palette] label:visible").click()


@pytest.mark.parametrize("language", LANGUAGES)
def test_light_and_dark_are_chosen_and_remembered(visit: Visitor, base: str, language: str) -> None:
    page = visit(start(base, language) + "index.html", color_scheme="light")
    assert scheme(page) == "default"
    toggle(page)
    assert scheme(page) == "slate"
    page.reload()
    assert scheme(page) == "slate"
    page.goto(start(base, language) + "howto/choose.html")
    assert scheme(page) == "slate"
    toggle(page)
    assert scheme(page) == "default"
    page.reload()
    assert scheme(page) == "default"


def test_light_and_dark_hold_across_languages(visit: Visitor, base: str) -> None:
    """Also in a page that was seen before, one that the browser has kept, and one that is open elsewhere."""
    where = "howto/choose.html"
    page = visit(start(base, "es") + where, color_scheme="light")
    page.goto(base + where)
    toggle(page)
    for language in ("es", "hi"):
        page.locator(".md-select button").hover()
        page.locator(f".md-select__link[hreflang={language}]").click()
        page.wait_for_url(start(base, language) + where)
        assert scheme(page) == "slate"
    other = page.context.new_page()
    other.goto(start(base, "es") + "index.html")
    toggle(other)
    page.wait_for_function("document.body.dataset.mdColorScheme === 'default'")
    page.go_back()
    page.wait_for_url(start(base, "es") + where)
    page.wait_for_function("document.body.dataset.mdColorScheme === 'default'")
    page.goto(base + where)
    assert scheme(page) == "default"


def test_what_the_system_prefers_is_followed(visit: Visitor, base: str) -> None:
    page = visit(f"{base}guide.html", color_scheme="dark")
    assert scheme(page) == "slate"
    page.goto(f"{base}api/index.html")
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.emulate_media(color_scheme="light")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != dark


# ---------------------------------------------------------------------- between the guide and the reference


@pytest.mark.parametrize("language", LANGUAGES)
def test_from_the_guide_to_the_reference_and_back(visit: Visitor, base: str, language: str) -> None:
    page = visit(start(base, language) + "howto/choose.html")
    link = page.locator('article a[href*="/api/"][href*="#"]').first
    name = link.inner_text()
    link.click()
    page.wait_for_url(re.compile(f"^{re.escape(base)}api/.*#lightning_remat"))
    assert page.locator(":target").count() == 1, name
    page.locator(f".guide a[hreflang={language}]").click()
    page.wait_for_url(start(base, language) + "index.html")
    for number, where in enumerate(("api/index.html", "api/dev/index.html")):
        page.locator(".site-foot a").nth(number).click()
        page.wait_for_url(base + where)
        page.locator(f".guide a[hreflang={language}]").click()
        page.wait_for_url(start(base, language) + "index.html")


# ---------------------------------------------------------------------- phones, and no scripts


@pytest.mark.parametrize("language", LANGUAGES)
def test_the_menu_of_a_phone(visit: Visitor, base: str, language: str) -> None:
    page = visit(start(base, language) + "howto/choose.html", viewport=PHONE, has_touch=True)
    page.locator("label.md-header__button[for=__drawer]").tap()
    page.locator('.md-nav--primary a[href$="slow.html"]').tap()
    page.wait_for_url(start(base, language) + "howto/slow.html")


@pytest.mark.parametrize("language", LANGUAGES)
def test_without_scripts(visit: Visitor, base: str, language: str) -> None:
    page = visit(start(base, language) + "index.html", java_script_enabled=False)
    page.locator(".md-tabs__link").nth(2).click()
    page.wait_for_url(start(base, language) + "howto/index.html")
    page.locator('article a[href="choose.html"]').first.click()
    page.wait_for_url(start(base, language) + "howto/choose.html")
    for part in ("h1", "article table", "article pre", "article p"):
        assert page.locator(part).first.is_visible(), part
    other = "es" if language == "en" else "en"
    page.locator(".md-select button").hover()
    page.locator(f".md-select__link[hreflang={other}]").click()
    page.wait_for_url(start(base, other) + "howto/choose.html")
    page.goto(f"{base}api/remat.html")
    assert page.locator("dt#lightning_remat\\.Remat").is_visible()
    page.goto(start(base, language) + "quiz/kept.html")
    assert page.locator("[data-question]").first.is_visible() or page.locator("noscript").first.is_visible()
