"""A step over sharded parameters, which cannot be run again by one process alone."""

from __future__ import annotations


class Shards:
    """Parameters that are spread over the processes, as something that a step changes: it cannot be undone.

    The others are in the middle of gathering them for the same step: a process that began it again would gather what
    they do not expect.
    """

    def take(self) -> None:
        """Nothing is noted."""

    def why_not(self) -> str | None:
        """Always."""
        return (
            "its parameters are sharded, and the other processes, which gather them in the same step, cannot be told "
            "to begin it again"
        )

    def restore(self, *, leave: frozenset[str] = frozenset()) -> None:
        """Never called."""

    def release(self) -> None:
        """Nothing to forget."""
