"""What can go wrong, as a tree.

RematError
├── ConfigurationError (also a ValueError)   an option that cannot work: raised before the first step
│   ├── BudgetError                          no plan fits into the budget
│   └── PlanFileError                        a plan file that cannot be read or written
├── ReplayError (also a RuntimeError)        a dropped value cannot be computed again as it was
└── RestoreError (also a RuntimeError)       what a failed step changed cannot be put back; nothing was
"""

from __future__ import annotations


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
