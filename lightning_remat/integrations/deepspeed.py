"""DeepSpeed as a base: which of its settings were run with recomputation.

ZeRO's stages 1 and 2 spread optimizer state and gradients over the processes and leave parameters where they are, so a
replay finds them. DeepSpeed reduces gradients from hooks in backward and counts micro-batches in its engine, which
nothing can take back: a step that has failed is not run again. Stage 3 also spreads parameters, by putting other
storages behind them; a tape that refers to these would keep what was gathered alive.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_remat.errors import ConfigurationError

NOT_TWICE = (
    "DeepSpeed's engine may have reduced gradients and counted the batch already, neither of which can be taken back"
)
"""Why a step under it cannot be run again."""

_OFFLOADS = ("offload_optimizer", "offload_param", "cpu_offload", "cpu_offload_params")  # the last two are older names


def is_deepspeed(strategy: Any) -> bool:
    """Whether a strategy of Lightning's stands on DeepSpeed."""
    return any(c.__name__ == "DeepSpeedStrategy" for c in type(strategy).__mro__)


def check_options_of_deepspeed(options: Mapping[str, Any]) -> None:
    """The same of keyword arguments, before a strategy is made of them, for which DeepSpeed has to be installed.

    Raises:
        ConfigurationError: see :func:`check_deepspeed`.
    """
    if options.get("config") is None:  # else that is what counts
        zero = {
            "stage": options.get("stage", 2),
            "offload_optimizer": options.get("offload_optimizer", False),
            "offload_param": options.get("offload_parameters", False),
        }
        check_deepspeed({"zero_optimization": zero})


def check_deepspeed(config: Any) -> None:
    """Refuse settings that were not run with recomputation.

    Args:
        config: DeepSpeed's, as Lightning's strategy has it once it is made.

    Raises:
        ConfigurationError: which setting, its value, and the ways out.
    """
    zero = config.get("zero_optimization") if isinstance(config, Mapping) else None
    zero = zero if isinstance(zero, Mapping) else {}
    stage = zero.get("stage", 0)
    if stage not in (0, 1, 2):
        raise ConfigurationError(
            f"DeepSpeed with stage={stage!r} is not supported: it puts gathered parameters into other storages around "
            "each module, and recomputation would keep these alive. Use base='deepspeed_stage_2', or parameters that "
            "PyTorch shards (base='fsdp' or base='ModelParallelStrategy')."
        )
    for name in _OFFLOADS:
        given = zero.get(name)
        if isinstance(given, Mapping) and given.get("device") in (None, "none"):
            continue  # DeepSpeed's way to say that nothing leaves
        if given:
            raise ConfigurationError(
                f"DeepSpeed with {name}={zero[name]!r} is not supported (yet): it was never run with recomputation. "
                "Leave it out: base='deepspeed_stage_2' with a budget= or policy='full' saves memory on the device too."
            )
    if isinstance(config, Mapping) and config.get("activation_checkpointing"):
        given = config["activation_checkpointing"]
        on = {k: v for k, v in given.items() if v} if isinstance(given, Mapping) else given
        if on:
            raise ConfigurationError(
                f"DeepSpeed with activation_checkpointing={on!r} recomputes already; leave that out of its config, or "
                "leave lightning-remat out."
            )
