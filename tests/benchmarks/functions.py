"""Texts of very different lengths that every machine has: the functions of Python's standard library, as tokens."""

from __future__ import annotations

import ast
import io
import math
import random
import sysconfig
import tokenize
import zlib
from bisect import bisect_left
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "lib2to3", "__pycache__"}
PADDING = 0


@cache
def functions(vocabulary: int, files: int | None = None) -> list[list[int]]:
    """Token numbers, in 1 ... vocabulary - 1, of every function and method of the standard library.

    A token's number is a checksum of its text. Functions within functions are there on their own, too; tests are not.

    Args:
        vocabulary: how many numbers there are.
        files: read the first so many files, by name; all by default, which takes some ten seconds.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    found: list[list[int]] = []
    paths = [p for p in sorted(root.rglob("*.py")) if not _LEFT_OUT & set(p.relative_to(root).parts)]
    for path in paths[:files]:
        try:
            text = path.read_text(encoding="utf-8")
            tree = ast.parse(text)
            tokens = [t for t in tokenize.generate_tokens(io.StringIO(text).readline) if t.string.strip()]
        except (SyntaxError, UnicodeDecodeError, tokenize.TokenError):
            continue  # written for another version, or not in UTF-8
        starts = [token.start[0] for token in tokens]
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                first = bisect_left(starts, node.lineno)
                last = bisect_left(starts, (node.end_lineno or node.lineno) + 1)
                words = tokens[first:last]
                found.append([1 + zlib.crc32(t.string.encode()) % (vocabulary - 1) for t in words])
    return found


def as_they_are(texts: list[list[int]], rows: int, count: int, longest: int) -> list[Tensor]:
    """Batches of functions drawn at random: most are of middling length, a few are long."""
    chosen = random.Random(0).choices(texts, k=rows * count)
    return [_padded(chosen[i : i + rows], longest) for i in range(0, len(chosen), rows)]


def varied(texts: list[list[int]], rows: int, count: int, longest: int) -> list[Tensor]:
    """Batches of functions of about one length each, as loaders make them that sort by length.

    The lengths of batches are spread evenly over a logarithmic scale from 8 to ``longest``, and come in no order.
    """
    chance = random.Random(0)
    ordered = sorted(texts, key=len)
    lengths = [len(one) for one in ordered]
    out = []
    for i in range(count):
        wanted = math.exp(math.log(8) + (i + 0.5) / count * (math.log(longest) - math.log(8)))
        at = min(bisect_left(lengths, wanted), len(ordered) - rows)
        out.append(_padded(ordered[at : at + rows], longest))
    chance.shuffle(out)
    return out


def _padded(texts: list[list[int]], longest: int) -> Tensor:
    """``(rows, T)``: cut to ``longest``, padded to the longest of these."""
    width = max(2, *(min(len(one), longest) for one in texts))
    return torch.tensor([one[:width] + [PADDING] * (width - len(one)) for one in texts])
