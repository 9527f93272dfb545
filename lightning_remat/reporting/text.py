"""What the reports share: printing plainly, repeated blocks under one name, amounts in words."""

from __future__ import annotations

import io
import re
from collections import defaultdict
from collections.abc import Iterable

from rich.console import Console

from lightning_remat.sizes import format_bytes

WIDTH = 110
"""Columns of a report that is printed plainly."""


class Plain:
    """Something that ``rich`` can print, and that ``str`` turns into plain text."""

    def __str__(self) -> str:
        out = io.StringIO()
        Console(file=out, width=WIDTH, color_system=None).print(self)
        return out.getvalue()


class Folding:
    """Names of modules, repeated blocks under one name: ``layers.3.mlp`` as ``layers.*.mlp``.

    Blocks are repeated if their names differ in the number at the end only. A single block keeps its name.

    Args:
        blocks: qualified names of the blocks.

    Example:
        >>> folding = Folding(["layers.0", "layers.1", "head"])
        >>> folding.name("layers.1.mlp"), folding.block("layers.1.mlp"), folding.name("head.norm")
        ('layers.*.mlp', 'layers.1', 'head.norm')
    """

    def __init__(self, blocks: Iterable[str]) -> None:
        groups: dict[str, list[str]] = defaultdict(list)
        for block in dict.fromkeys(blocks):
            groups[re.sub(r"\d+$", "*", block)].append(block)
        self._folded = {
            block: stem if len(members) > 1 else block for stem, members in groups.items() for block in members
        }
        self._cache: dict[str, tuple[str, str]] = {}

    def name(self, module: str) -> str:
        """The name under which a module is shown."""
        return self._found(module)[0]

    def block(self, module: str) -> str:
        """The block that a module is or is in; ``""`` if there is none."""
        return self._found(module)[1]

    def _found(self, module: str) -> tuple[str, str]:
        found = self._cache.get(module)
        if found is None:
            found = module, ""
            parts = module.split(".")
            for end in range(1, len(parts) + 1):
                block = ".".join(parts[:end])
                if block in self._folded:
                    found = self._folded[block] + module[len(block) :], block
                    break
            self._cache[module] = found
        return found


def format_size(count: float) -> str:
    """As :func:`format_bytes`, with one more digit from a GiB on, where 0.1 is more than plans differ by."""
    return format_bytes(count) if abs(count) < 2**30 else f"{count / 2**30:.2f} GiB"


def format_seconds(seconds: float) -> str:
    """``0.0041`` as ``"4.10 ms"``; three digits that matter."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if abs(seconds) >= size:
            return f"{three_digits(seconds / size)} {unit}"
    return f"{three_digits(seconds * 1e6)} µs" if seconds else "0 s"


def three_digits(number: float) -> str:
    """A number with three digits that matter, without an exponent."""
    size = abs(number)
    return f"{number:.0f}" if size >= 99.95 else f"{number:.1f}" if size >= 9.995 else f"{number:.2f}"
