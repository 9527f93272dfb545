"""What can go wrong, as a tree.

RematError
├── ConfigurationError (also a ValueError)   an option that cannot work: raised before the first step
└── ReplayError (also a RuntimeError)        a dropped value cannot be computed again as it was
"""

from __future__ import annotations


class RematError(Exception):
    """Base of every error that lightning-remat raises on its own account."""


class ConfigurationError(RematError, ValueError):
    """An option, or a combination of options with a model, that cannot work; nothing was changed."""


class ReplayError(RematError, RuntimeError):
    """A value that backward needs was dropped and can no longer be computed exactly as it was."""


MODIFIED = (
    "one of the variables needed for gradient computation has been modified by an inplace operation: a tensor saved "
    "for backward was written to after it was saved. PyTorch raises the same error for such a write, unless it goes "
    "through .data; clone the tensor before it is changed, or use the out-of-place form of the operation."
)
"""Text of the error that plain PyTorch raises too; its first words are PyTorch's, so that existing handlers match."""
