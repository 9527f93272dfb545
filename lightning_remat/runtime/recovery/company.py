"""Other processes: what has been sent to them cannot be taken back, and they do not send theirs a second time."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

BEGUN = "communication with the other processes had begun, and what this one has sent cannot be taken back"


def sequences() -> dict[int, int]:
    """How many collectives this process has started in each group that counts them."""
    found: dict[int, int] = {}
    groups: list[Any] = list(dist.distributed_c10d._world.pg_map)
    for number, group in enumerate(groups):
        try:
            found[number] = group._get_sequence_number_for_group()
        except RuntimeError:  # a backend that does not count
            continue
    return found


def is_distributed() -> bool:
    """Whether there are other processes."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


class Company:
    """The other processes, as something that a step changes: a step that has spoken to them cannot be undone."""

    def __init__(self) -> None:
        self._sequences: dict[int, int] = {}

    def take(self) -> None:
        """Note what has been said so far."""
        self._sequences = sequences()

    def why_not(self) -> str | None:
        """A collective has been started."""
        return BEGUN if sequences() != self._sequences else None

    def restore(self, *, leave: frozenset[str] = frozenset()) -> None:
        """Nothing was said, so that nothing has to be taken back."""

    def release(self) -> None:
        """The step is over."""
