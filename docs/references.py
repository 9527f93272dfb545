"""Links from the guide into what Sphinx has built: ``api:lightning_remat.Remat`` and ``dev:planning#anchor``."""

from __future__ import annotations

import difflib
import re
from functools import cached_property
from pathlib import Path

from sphinx.util.inventory import InventoryFile


class UnknownReference(LookupError):
    """A name that Sphinx does not know; it says which."""


class References:
    """What Sphinx has built, by name.

    Args:
        folder: its output, with ``objects.inv`` in it.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._ids: dict[str, set[str]] = {}

    @cached_property
    def _names(self) -> dict[str, str]:
        inventory = InventoryFile.loads((self._folder / "objects.inv").read_bytes(), uri="")
        return {
            name: item.uri.replace("$", name)
            for domain, items in inventory.data.items()
            if domain.startswith("py:")
            for name, item in items.items()
        }

    def api(self, name: str) -> str:
        """Where a public name is described, from the folder of the API; ``""`` is its first page.

        Raises:
            UnknownReference: Sphinx has no such name.
        """
        if not name:
            return "index.html"
        if name not in self._names:
            near = difflib.get_close_matches(name, self._names, n=3)
            raise UnknownReference(
                f"the API reference has no {name!r}" + (f"; did you mean {' or '.join(near)}?" if near else "")
            )
        return self._names[name]

    def developers(self, target: str) -> str:
        """Where a page for developers is, likewise.

        Args:
            target: the page's name, and perhaps ``#anchor``; ``""`` is the list of them.

        Raises:
            UnknownReference: there is no such page, or no such anchor in it.
        """
        name, _, anchor = target.partition("#")
        page = f"dev/{name or 'index'}.html"
        if page not in self._ids:
            if not (self._folder / page).is_file():
                have = sorted(path.stem for path in (self._folder / "dev").glob("*.html"))
                raise UnknownReference(f"there is no page {name!r} for developers; there are {', '.join(have)}")
            self._ids[page] = set(re.findall(r'\bid="([^"]+)"', (self._folder / page).read_text(encoding="utf-8")))
        if anchor and anchor not in self._ids[page]:
            near = difflib.get_close_matches(anchor, self._ids[page], n=3)
            raise UnknownReference(
                f"the page {name!r} for developers has no #{anchor}"
                + (f"; did you mean {' or '.join(near)}?" if near else "")
            )
        return f"{page}#{anchor}" if anchor else page
