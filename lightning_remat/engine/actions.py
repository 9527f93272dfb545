"""What the tape may do with an op, and the tables that say which."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning_remat.engine.rules import Rule

# Actions: what an action table says about an overload.
PASS = 0  # call it; its result is a leaf
RECORD = 1  # call it and drop what it makes
SLOW = 2  # the same, for ops with a generator, hidden writes, ops inside, or a device argument
ASK = 3  # the same, if the policy says so
WATCH = 4  # keep what it makes, but mind what it writes on the side, or the ops inside
WRITE = 5  # changes an argument; the new content is dropped where it can be
WRITE_ASK = 6
WRITE_KEEP = 7
SPLITS = 8  # makes views with version counters of their own
LAZY = 9  # makes a view with a conjugate or negative bit
HIGHER = 10  # a higher-order op: like PASS, but it is no overload
COUNT = 11  # what is to be done depends on how many such ops have run before

Ask = Callable[[Rule, Any], bool]
"""(rule, outputs) -> whether to drop them."""


class ActionTable(dict[int, int]):
    """The action for each overload seen so far, by its id, and where the others come from."""

    __slots__ = ("make",)

    def __init__(self, make: Callable[[Rule], int]) -> None:
        super().__init__()
        self.make = make


def counted(rule: Rule) -> int:
    """The action of a tape that goes by position: what moves no data as ever, everything else COUNT.

    Both who traces a step and who runs a plan count by this, so that they count the same.
    """
    if rule.form == "higher":
        return HIGHER
    if rule.form == "blank":
        return PASS
    if rule.form == "view":
        if rule.name in ("aten._conj.default", "aten._neg_view.default"):
            return LAZY
        return SPLITS if rule.name.startswith("aten.unsafe_") else PASS
    return COUNT
