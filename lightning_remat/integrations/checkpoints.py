"""The engine's state in Lightning's checkpoints.

It lies beside what Lightning writes, under a key of its own that nobody else looks at: a checkpoint loads as well
without lightning-remat, under another base, or with the callback in place of the strategy. Rank zero writes its own
state, and every rank starts from that; plans of ranks need not agree, so nothing is communicated.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_remat.runtime.session import Remat

KEY = "lightning_remat"


def is_fitting(trainer: Any) -> bool:
    """Whether the trainer trains: evaluation takes nothing from a checkpoint, and gives nothing."""
    function = trainer.state.fn if trainer is not None else None
    return function is not None and bool(function.value == "fit")


def with_state(checkpoint: dict[str, Any], remat: Remat) -> dict[str, Any]:
    """A checkpoint with the state; one of weights only stays as it is."""
    return {**checkpoint, KEY: remat.state_dict()} if "optimizer_states" in checkpoint else checkpoint


def load_state(checkpoint: Any, remat: Remat) -> None:
    """Go on with the state in a checkpoint, if it has one."""
    state = checkpoint.get(KEY) if isinstance(checkpoint, Mapping) else None
    if state is not None:
        remat.load_state_dict(state)
