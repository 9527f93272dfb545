"""A step that cannot be run again by one process alone."""

from __future__ import annotations

SHARDED = (
    "its parameters are sharded, and the other processes, which gather them in the same step, cannot be told to begin "
    "it again"
)
"""The others are in the middle of gathering them: who began again would gather what they do not expect."""


class Once:
    """Something that a step changes and that cannot be undone.

    Args:
        why: in words that follow "cannot be run again:".
    """

    def __init__(self, why: str) -> None:
        self.why = why

    def take(self) -> None:
        """Nothing is noted."""

    def why_not(self) -> str | None:
        """Always."""
        return self.why

    def restore(self, *, leave: frozenset[str] = frozenset()) -> None:
        """Never called."""

    def release(self) -> None:
        """Nothing to forget."""
