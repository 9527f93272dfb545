"""Whether every link of a finished site leads somewhere: `python docs/linkcheck.py build/site`.

Files, anchors and what pages and style sheets load are looked for; a link must work from a disk as well, so it names a
file, not a folder, and is relative. Nothing may be loaded from another host. Links *to* other hosts are not followed.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

_LINKS = {
    "a": ("href", "xlink:href"),
    "area": ("href",),
    "blockquote": ("cite",),
    "button": ("formaction",),
    "form": ("action",),
    "input": ("formaction",),
}
_LOADED = {
    "a": ("ping",),
    "audio": ("src",),
    "embed": ("src",),
    "iframe": ("src",),
    "image": ("href", "xlink:href"),
    "img": ("src", "srcset"),
    "input": ("src",),
    "link": ("href", "imagesrcset"),
    "object": ("data",),
    "script": ("src",),
    "source": ("src", "srcset"),
    "track": ("src",),
    "use": ("href", "xlink:href"),
    "video": ("src", "poster"),
}
_NAMED_ONLY = {"alternate", "canonical", "next", "prev", "license", "author", "search", "index"}  # not loaded
_CSS = re.compile(
    r"""url\(\s*(?:"([^"]*)"|'([^']*)'|([^)'"]*))\s*\)|(?:@import\s*|image-set\(\s*)(?:"([^"]*)"|'([^']*)')""",
    re.IGNORECASE,
)
_NAMES = ("aria-controls", "aria-describedby", "aria-labelledby", "aria-owns", "for", "form", "headers", "list")
_THEME = "__toc"  # Material labels it also where a page has too few headings to have it
_PAINT = {"clip-path", "fill", "filter", "marker-end", "marker-mid", "marker-start", "mask", "stroke"}
_SRCSET = re.compile(r"[\s,]*(\S*[^\s,])(?:\s+[^,]*)?(?:,|$)")
_REFRESH = re.compile(r"\s*[\d.]+\s*[;,]\s*(?:url\s*=\s*)?['\"]?([^'\"]+)", re.IGNORECASE)
_COMMENT = re.compile(r"/\*.*?\*/", re.DOTALL)


@dataclass(frozen=True)
class Fault:
    """A link that does not work.

    Attributes:
        file: where it stands, from the root of the site.
        link: what stands there.
        why: what is wrong with it.
    """

    file: str
    link: str
    why: str

    def __str__(self) -> str:
        return f"{self.file}: {self.link}: {self.why}"


@dataclass
class Checked:
    """What was looked at, and what is wrong."""

    pages: int = 0
    links: int = 0
    faults: list[Fault] = field(default_factory=list)


class _Page(HTMLParser):
    """Ids, links, and what is loaded."""

    def __init__(self) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.twice: set[str] = set()
        self.links: list[tuple[str, bool]] = []  # with whether it is loaded
        self.named: list[tuple[str, str]] = []  # ids that attributes name, with the attribute
        self.based = False
        self._style = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        if name := found.get("id"):
            (self.twice if name in self.ids else self.ids).add(name)
        if tag == "a" and found.get("name"):
            self.ids.add(found["name"])
        self.based |= tag == "base"
        self.named += [(name, attribute) for attribute in _NAMES for name in found.get(attribute, "").split()]
        rel = set(found.get("rel", "").lower().split())
        loaded = not (tag == "link" and rel and rel <= _NAMED_ONLY)
        if tag == "meta" and found.get("http-equiv", "").lower() == "refresh":
            self.links += [(link, False) for link in _REFRESH.findall(found.get("content", ""))]
        for attribute in _LOADED.get(tag, ()):
            if attribute in found:
                values = _of_srcset(found[attribute]) if attribute.endswith("srcset") else [found[attribute]]
                self.links += [(value, loaded) for value in values]
        for attribute in _LINKS.get(tag, ()):
            if attribute in found:
                self.links.append((found[attribute], False))
        for attribute in _PAINT | {"style"}:
            self.links += [(link, True) for link in css_links(found.get(attribute, ""))]
        self._style = tag == "style"

    def handle_endtag(self, tag: str) -> None:
        self._style = False

    def handle_data(self, data: str) -> None:
        if self._style:
            self.links += [(link, True) for link in css_links(data)]


def _of_srcset(text: str) -> list[str]:
    """The addresses; a comma may stand inside one."""
    return _SRCSET.findall(text)


def css_links(text: str) -> list[str]:
    """What a style sheet loads."""
    return [next(filter(None, groups), "").strip() for groups in _CSS.findall(_COMMENT.sub("", text))]


def check(root: Path) -> Checked:
    """Look at every page and style sheet below ``root``."""
    root = root.resolve()
    checked, pages = Checked(), {}
    for path in sorted(root.rglob("*.html")):
        page = pages[path] = _Page()
        page.feed(_text(root, path, checked))
        page.close()
    sheets = {path: css_links(_text(root, path, checked)) for path in sorted(root.rglob("*.css"))}
    checked.pages = len(pages)
    for path, page in pages.items():
        name = path.relative_to(root).as_posix()
        checked.faults += [Fault(name, f"#{twice}", "two elements have this id") for twice in sorted(page.twice)]
        checked.faults += [
            Fault(name, f"#{id}", f"{attribute} names it, and no element has this id")
            for id, attribute in page.named
            if id not in page.ids and id != _THEME
        ]
        if page.based:
            checked.faults.append(Fault(name, "<base>", "every link of the page would start from there"))
    everything = [(path, link, loaded) for path, page in pages.items() for link, loaded in page.links]
    everything += [(path, link, True) for path, links in sheets.items() for link in links]
    for path, link, loaded in everything:
        checked.links += 1
        try:
            why = _fault(root, path, link, loaded, pages)
        except (OSError, ValueError) as error:
            why = f"it is no address: {error}"
        if why:
            checked.faults.append(Fault(path.relative_to(root).as_posix(), link, why))
    return checked


def _text(root: Path, path: Path, checked: Checked) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        checked.faults.append(Fault(path.relative_to(root).as_posix(), "the file", f"it is not UTF-8: {error}"))
        return path.read_text(encoding="utf-8", errors="replace")


def _fault(root: Path, path: Path, link: str, loaded: bool, pages: dict[Path, _Page]) -> str | None:
    """What is wrong with one link; None: nothing."""
    parts = urlsplit(link.strip())
    if parts.scheme in ("http", "https") or parts.netloc:
        return "it is loaded from another host" if loaded else None
    if parts.scheme in ("data", "mailto"):
        return None
    if parts.scheme:
        return f"{parts.scheme}: is nothing that a browser can follow here"
    if parts.path.startswith("/"):
        return "it is not relative, and so depends on where the site lies"
    target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
    if not target.is_relative_to(root):
        return "it leaves the site"
    if target.is_dir():
        return "it leads to a folder, which is no page on a disk; name the file"
    if not target.is_file():
        return "there is no such file"
    anchor = unquote(parts.fragment)
    if anchor and anchor != "top" and target in pages and not {anchor, parts.fragment} & pages[target].ids:
        return "that page has no such anchor"
    return None


if __name__ == "__main__":
    result = check(Path(sys.argv[1]))
    for fault in result.faults:
        print(fault)
    print(f"{result.links} links on {result.pages} pages, {len(result.faults)} of them bad")
    sys.exit(bool(result.faults) or not result.pages)
