"""The link checker on small made-up sites, one for each kind of fault; and the same sites without it."""

import subprocess
import sys
from pathlib import Path

import pytest

from docs import linkcheck
from docs.linkcheck import check, css_links


def page(body: str, head: str = "") -> str:
    return f"<!doctype html><html><head>{head}</head><body>{body}</body></html>"


def site(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return root


def faults(root: Path) -> list[str]:
    return [str(fault) for fault in check(root).faults]


GOOD = {
    "index.html": page(
        '<h1 id="top-of-it">Here</h1><a href="a/page.html#one">one</a> <a href="#top-of-it">up</a>'
        '<a href="#top">top</a>'
        '<a href="https://example.org/there">elsewhere</a> <a href="mailto:a@example.org">mail</a> <a>no link</a>'
        '<img src="pic.svg" srcset="pic.svg 1x, a/pic%202.svg 2x"> <img src="data:image/png;base64,AA==">'
        '<p style="background: url(pic.svg)">x</p>',
        '<link rel="stylesheet" href="s/style.css"><script src="s/s.js"></script>'
        '<link rel="canonical" href="https://example.org/"><style>@import "s/style.css";</style>',
    ),
    "a/page.html": page('<h2 id="one">1</h2><a name="two"></a><a href="../index.html?x=1#top-of-it">back</a>'),
    "a/pic 2.svg": "<svg/>",
    "pic.svg": "<svg/>",
    "s/style.css": "/* url(gone.png) */ p { background: url('../pic.svg') } q { background: url(data:,) }",
    "s/s.js": "1",
}


def test_a_good_site(tmp_path: Path) -> None:
    checked = check(site(tmp_path, GOOD))
    assert [str(fault) for fault in checked.faults] == []
    assert checked.pages == 2
    assert checked.links == 17


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ('<a href="gone.html">x</a>', "index.html: gone.html: there is no such file"),
        ('<a href="a/page.html#three">x</a>', "index.html: a/page.html#three: that page has no such anchor"),
        ('<a href="#three">x</a>', "index.html: #three: that page has no such anchor"),
        ('<a href="a/">x</a>', "index.html: a/: it leads to a folder, which is no page on a disk; name the file"),
        (
            '<a href="/index.html">x</a>',
            "index.html: /index.html: it is not relative, and so depends on",
        ),
        ('<a href="../x.html">x</a>', "index.html: ../x.html: it leaves the site"),
        ('<a href="api:some.name">x</a>', "index.html: api:some.name: api: is nothing that a browser can follow here"),
        ('<a href="javascript:go()">x</a>', "index.html: javascript:go(): javascript: is nothing"),
        ('<img src="gone.svg">', "index.html: gone.svg: there is no such file"),
        ('<img srcset="pic.svg 1x, gone.svg 2x">', "index.html: gone.svg: there is no such file"),
        ('<script src="gone.js"></script>', "index.html: gone.js: there is no such file"),
        ('<video poster="gone.png"></video>', "index.html: gone.png: there is no such file"),
        ('<svg><use href="gone.svg#x"/></svg>', "index.html: gone.svg#x: there is no such file"),
        ('<p style="background: url(gone.png)">x</p>', "index.html: gone.png: there is no such file"),
        ("<style>p { background: url('gone.png') }</style>", "index.html: gone.png: there is no such file"),
        ('<script src="https://example.org/x.js"></script>', "index.html: https://example.org/x.js: it is loaded from"),
        ('<img src="//example.org/x.png">', "index.html: //example.org/x.png: it is loaded from another host"),
        ('<link rel="icon" href="gone.png">', "index.html: gone.png: there is no such file"),
        ('<link rel="alternate" hreflang="es" href="es/gone.html">', "index.html: es/gone.html: there is no such file"),
        ('<form action="gone.html"></form>', "index.html: gone.html: there is no such file"),
        ('<p id="top-of-it">x</p>', "index.html: #top-of-it: two elements have this id"),
        ('<link rel="preload" imagesrcset="gone.svg 1x">', "index.html: gone.svg: there is no such file"),
        ('<img srcset="data:image/png;base64,AA== 1x, gone.svg 2x">', "index.html: gone.svg: there is no such file"),
        ('<meta http-equiv="Refresh" content="0; url=gone.html">', "index.html: gone.html: there is no such file"),
        ('<svg><a xlink:href="gone.html">x</a></svg>', "index.html: gone.html: there is no such file"),
        ('<svg><path fill="url(#gone)"/></svg>', "index.html: #gone: that page has no such anchor"),
        ('<button formaction="gone.html">x</button>', "index.html: gone.html: there is no such file"),
        ('<a ping="https://example.org/p">x</a>', "index.html: https://example.org/p: it is loaded from another"),
        (
            '<link rel="alternate stylesheet" href="https://example.org/a.css">',
            "index.html: https://example.org/a.css: it is loaded from another host",
        ),
        ("<style>p { background: URL(gone.png) }</style>", "index.html: gone.png: there is no such file"),
        ('<style>@IMPORT"gone.css";</style>', "index.html: gone.css: there is no such file"),
        ("<style>p { background: image-set('gone.png' 1x) }</style>", "index.html: gone.png: there is no such file"),
        ('<label for="gone">x</label>', "index.html: #gone: for names it, and no element has this id"),
        ('<p aria-describedby="top-of-it gone">x</p>', "index.html: #gone: aria-describedby names it, and no"),
        ('<base href="https://example.org/">', "index.html: <base>: every link of the page would start from there"),
        ('<a href="http://[x">x</a>', "index.html: http://[x: it is no address"),
        ('<a href="a%00.html">x</a>', "index.html: a%00.html: it is no address"),
        (f'<a href="{"x" * 5000}">x</a>', f"index.html: {'x' * 5000}: it is no address"),
    ],
)
def test_one_fault(tmp_path: Path, body: str, expected: str) -> None:
    files = {**GOOD, "index.html": GOOD["index.html"].replace("</body>", f"{body}</body>")}
    found = faults(site(tmp_path, files))
    assert len(found) == 1
    assert found[0].startswith(expected)


@pytest.mark.parametrize(
    "body",
    [
        '<h2 id="\u00f1 b">x</h2><a href="#%C3%B1%20b">x</a>',
        '<h2 id="a%20b">x</h2><a href="#a%20b">x</a>',
        '<link rel="CANONICAL" href="https://example.org/">',
        '<svg><g id="paint"/><path fill="url(#paint)"/></svg>',
        '<img srcset="pic.svg 1x,a/pic%202.svg 2x, data:image/svg+xml,%3Csvg/%3E 3x">',
    ],
)
def test_no_fault(tmp_path: Path, body: str) -> None:
    assert faults(site(tmp_path, {**GOOD, "index.html": GOOD["index.html"].replace("</body>", f"{body}</body>")})) == []


def test_a_file_that_is_not_utf8(tmp_path: Path) -> None:
    site(tmp_path, GOOD)
    (tmp_path / "old.html").write_bytes(b'<a href="gone.html">\xe9</a>')
    assert [fault.split(":")[1] for fault in faults(tmp_path)] == [" the file", " gone.html"]


def test_a_folder_without_pages_is_no_good_site(tmp_path: Path) -> None:
    command = [sys.executable, linkcheck.__file__, str(tmp_path)]
    assert subprocess.run(command, capture_output=True, check=False).returncode == 1


@pytest.mark.parametrize(
    ("css", "expected"),
    [
        ('@import "gone.css";', "s/style.css: gone.css: there is no such file"),
        ("p { background: url( gone.png ) }", "s/style.css: gone.png: there is no such file"),
        (
            "@import url(https://example.org/f.css);",
            "s/style.css: https://example.org/f.css: it is loaded from",
        ),
    ],
)
def test_faults_of_style_sheets(tmp_path: Path, css: str, expected: str) -> None:
    found = faults(site(tmp_path, {**GOOD, "s/style.css": css}))
    assert len(found) == 1
    assert found[0].startswith(expected)


def test_faults_in_every_file(tmp_path: Path) -> None:
    """Not the first alone."""
    bad = page('<a href="gone.html">x</a>')
    assert len(faults(site(tmp_path, {"index.html": bad, "a/b/c.html": bad}))) == 2


def test_links_of_style_sheets() -> None:
    text = """a{b:url("x.png")} c{d:url('y z.png')} e{f:url(  u.png  )} @import "v.css"; /* url(w.png) */"""
    assert css_links(text) == ["x.png", "y z.png", "u.png", "v.css"]
