"""What can go wrong, as a tree.

RematError
├── ConfigurationError (also a ValueError)   an option that cannot work: raised before the first step
│   ├── BudgetError                          no plan fits into the budget
│   └── PlanFileError                        a plan file that cannot be read or written
├── NoMemoryLeft (also torch.OutOfMemoryError)  a step does not fit even under the plan that needs least
├── OffloadError (also a RuntimeError)       what has left the device cannot be had back, or cannot leave it
├── ReplayError (also a RuntimeError)        a dropped value cannot be computed again as it was
└── RestoreError (also a RuntimeError)       what a failed step changed cannot be put back; nothing was

The quiz (``lightning_remat/quiz``) has its own beside them: BankError, AnswerError, CertificateError, SigningError,
StatisticsError.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch


class RematError(Exception):
    """Base of every error that lightning-remat raises on its own account."""


class ConfigurationError(RematError, ValueError):
    """An option, or a combination of options with a model, that cannot work; nothing was changed."""


class BudgetError(ConfigurationError):
    """No plan fits into the budget.

    Attributes:
        budget_bytes: what was asked for.
        smallest_bytes: the smallest peak that a plan has, in the same terms.
    """

    def __init__(self, message: str, budget_bytes: int, smallest_bytes: int) -> None:
        super().__init__(message)
        self.budget_bytes = budget_bytes
        self.smallest_bytes = smallest_bytes

    def __reduce__(self) -> tuple[type[BudgetError], tuple[str, int, int]]:
        """With its figures: errors travel between processes."""
        return type(self), (str(self), self.budget_bytes, self.smallest_bytes)


class PlanFileError(ConfigurationError):
    """A plan file that cannot be read or written, is damaged, or is from a future version."""


class NoMemoryLeft(RematError, torch.OutOfMemoryError):
    """A step does not fit into memory, whatever was tried; whoever handles PyTorch's own error handles this one, too.

    It is raised ``from`` the last error of the allocator.

    Attributes:
        asked_bytes: what could not be had; None: the allocator did not say.
        free_bytes: what this process could still have; None: unknown.
        held: what holds memory, by name, in bytes.
        tries: what was tried, in words and in order.
        irreversible: why the step could not be run again, where that ended it; None: it did not fit.
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
    """What has left the device cannot be had back as it was, or cannot leave it."""


class ReplayError(RematError, RuntimeError):
    """A value that backward needs was dropped and can no longer be computed exactly as it was."""


class RestoreError(RematError, RuntimeError):
    """What a failed step changed cannot be put back as it was, so it must not be run again; nothing was put back."""


MODIFIED = (
    "one of the variables needed for gradient computation has been modified by an inplace operation: a tensor saved "
    "for backward was written to after it was saved. PyTorch raises the same error for such a write, unless it goes "
    "through .data; clone the tensor before it is changed, or use the out-of-place form of the operation."
)
"""Text of the error that plain PyTorch raises too; its first words are PyTorch's, so that existing handlers match."""
