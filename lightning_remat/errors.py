"""What can go wrong, as a tree.

RematError
├── ConfigurationError (also a ValueError)   an option that cannot work: raised before the first step
│   ├── BudgetError                          no plan fits into the budget
│   └── PlanFileError                        a plan file that cannot be read or written
├── NoMemoryLeft (also torch.OutOfMemoryError)  a step does not fit even under the plan that needs least
├── OffloadError (also a RuntimeError)       what has left the device cannot be had back, or cannot leave it
├── ReplayError (also a RuntimeError)        a dropped value cannot be computed again as it was
└── RestoreError (also a RuntimeError)       what a failed step changed cannot be put back; nothing was
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch


class RematError(Exception):
    """Base of every error that lightning-remat raises on its own account.

    Example:
        >>> from lightning_remat import Remat, RematError
        >>> try:
        ...     Remat(policy="ful")
        ... except RematError as error:
        ...     print(type(error).__name__)
        ConfigurationError
    """


class ConfigurationError(RematError, ValueError):
    """An option, or a combination of options with a model, that cannot work; nothing was changed.

    Raised before the first step wherever that can be known by then. It names the setting, the value and a way out.

    Example:
        >>> from lightning_remat import Remat
        >>> Remat(budget="20GiB", policy="full")
        Traceback (most recent call last):
        ...
        lightning_remat.errors.ConfigurationError: budget='20GiB' and policy='full' contradict each other: ...
    """


class BudgetError(ConfigurationError):
    """No plan fits into the budget.

    Attributes:
        budget_bytes: what was asked for.
        smallest_bytes: the smallest peak that a plan has, in the same terms.

    Example:
        >>> from lightning_remat.errors import BudgetError
        >>> error = BudgetError("does not fit", budget_bytes=1000, smallest_bytes=1500)
        >>> error.smallest_bytes - error.budget_bytes
        500
    """

    def __init__(self, message: str, budget_bytes: int, smallest_bytes: int) -> None:
        super().__init__(message)
        self.budget_bytes = budget_bytes
        self.smallest_bytes = smallest_bytes

    def __reduce__(self) -> tuple[type[BudgetError], tuple[str, int, int]]:
        """With its figures: errors travel between processes."""
        return type(self), (str(self), self.budget_bytes, self.smallest_bytes)


class PlanFileError(ConfigurationError):
    """A plan file that cannot be read or written, is damaged, or is from a future version.

    Example:
        >>> from lightning_remat import Remat
        >>> Remat(policy="not-there.json")
        Traceback (most recent call last):
        ...
        lightning_remat.errors.PlanFileError: ...
    """


class NoMemoryLeft(RematError, torch.OutOfMemoryError):
    """A step does not fit into memory, whatever was tried; whoever handles PyTorch's own error handles this one, too.

    It is raised ``from`` the last error of the allocator.

    Attributes:
        asked_bytes: what could not be had; None: the allocator did not say.
        free_bytes: what this process could still have; None: unknown.
        held: what holds memory, by name, in bytes.
        tries: what was tried, in words and in order.
        irreversible: why the step could not be run again, where that ended it; None: it did not fit.

    Example:
        >>> import torch
        >>> from lightning_remat import NoMemoryLeft
        >>> error = NoMemoryLeft("no room", asked_bytes=4096, held={"parameters": 1024}, tries=("eviction",))
        >>> isinstance(error, torch.OutOfMemoryError), error.held["parameters"]
        (True, 1024)
    """

    def __init__(
        self,
        message: str,
        asked_bytes: int | None = None,
        free_bytes: int | None = None,
        held: Mapping[str, int] | None = None,
        tries: Sequence[str] = (),
        irreversible: str | None = None,
    ) -> None:
        super().__init__(message)
        self.asked_bytes = asked_bytes
        self.free_bytes = free_bytes
        self.held = dict(held or {})
        self.tries = tuple(tries)
        self.irreversible = irreversible

    def __reduce__(self) -> tuple[type[NoMemoryLeft], tuple[Any, ...]]:
        """With its figures: errors travel between processes."""
        return type(self), (str(self), self.asked_bytes, self.free_bytes, self.held, self.tries, self.irreversible)


class OffloadError(RematError, RuntimeError):
    """What has left the device cannot be had back as it was, or cannot leave it.

    Where the step can be undone, it is run again without offload instead; this is raised where it cannot, or where
    ``retries=0`` asks for it.

    Example:
        >>> from lightning_remat import OffloadError
        >>> issubclass(OffloadError, RuntimeError)
        True
    """


class ReplayError(RematError, RuntimeError):
    """A value that backward needs was dropped and can no longer be computed exactly as it was.

    Plain PyTorch raises its own error in the same place where a tensor saved for backward was written to; the text
    begins with the same words then.

    Example:
        >>> from lightning_remat import ReplayError
        >>> issubclass(ReplayError, RuntimeError)
        True
    """


class RestoreError(RematError, RuntimeError):
    """What a failed step changed cannot be put back as it was, so it must not be run again; nothing was put back.

    Example:
        >>> from lightning_remat.errors import RestoreError
        >>> issubclass(RestoreError, RuntimeError)
        True
    """


MODIFIED = (
    "one of the variables needed for gradient computation has been modified by an inplace operation: a tensor saved "
    "for backward was written to after it was saved. PyTorch raises the same error for such a write, unless it goes "
    "through .data; clone the tensor before it is changed, or use the out-of-place form of the operation."
)
"""Text of the error that plain PyTorch raises too; its first words are PyTorch's, so that existing handlers match."""
