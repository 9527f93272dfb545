"""Precision plugins that recomputation was never run with, and why that is not taken for granted."""

from __future__ import annotations

from typing import Any

from lightning_remat.errors import ConfigurationError
from lightning_remat.runtime.session import Remat

# By the names of Lightning's classes, which are there twice, and whose packages need not be installed.
_REFUSED = {
    "TransformerEnginePrecision": (
        "the kernels of transformer_engine are called past the dispatcher of PyTorch, keep statistics for the scales "
        "of fp8 between calls, and free saved tensors through .data, none of which a tape of ops can see",
        "precision='bf16-mixed'",
    ),
    "BitsandbytesPrecision": (
        "weights become quantised tensors of bitsandbytes, with kernels and a state of their own",
        "precision='bf16-true'",
    ),
}


def refuse_precision(trainer: Any, remat: Remat) -> None:
    """Refuse the trainer's precision plugin if results under it are not known to be exact.

    Raises:
        ConfigurationError: which plugin, why, and the ways out. With ``policy="none"`` nothing is refused.
    """
    plugin = trainer.precision_plugin
    name = next((c.__name__ for c in type(plugin).__mro__ if c.__name__ in _REFUSED), None)
    if name is None or remat.policy == "none":
        return
    reason, instead = _REFUSED[name]
    # A plugin object that no precision= stands for has the attribute all the same.
    by_name = name != "BitsandbytesPrecision"
    setting = f"precision={plugin.precision!r}" if by_name else f"plugins={type(plugin).__name__}"
    raise ConfigurationError(
        f"{setting} ({name}) with policy={remat.policy!r}: {reason}. Recomputation was never run with it and is not "
        f"known to be exact. Use {instead}, or train without recomputation (policy='none', or the strategy without "
        "lightning-remat)."
    )
