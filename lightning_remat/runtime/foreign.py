"""Activation checkpointing that a model already does by itself. Stacking ours on it would recompute twice, silently."""

from __future__ import annotations

from functools import partial

from torch import nn

from lightning_remat.errors import ConfigurationError


def refuse_foreign_checkpointing(root: nn.Module) -> None:
    """Refuse a model some module of which is checkpointed already, or whose parameters come and go past the tape.

    Raises:
        ConfigurationError: which module or parameter, by what, and how to switch it off.
    """
    for name, parameter in root.named_parameters():
        if hasattr(parameter, "ds_status"):
            raise ConfigurationError(
                f"{name} is partitioned by DeepSpeed's stage 3, which puts gathered parameters into other storages "
                "around each module: recomputation would keep these alive. Use stage 2, or PyTorch's fully_shard."
            )
    for name, module in root.named_modules():
        found = _foreign(module)
        if found is not None:
            by, way_out = found
            where = name or type(root).__name__
            raise ConfigurationError(
                f"{where} already recomputes its activations ({by}). Both at once would recompute twice: {way_out}, or "
                "leave lightning-remat out (policy='none')."
            )


def _foreign(module: nn.Module) -> tuple[str, str] | None:
    kind = type(module).__name__
    if kind == "CheckpointWrapper" and hasattr(module, "checkpoint_fn"):
        return (
            "torch's checkpoint_wrapper",
            "build the model without apply_activation_checkpointing / checkpoint_wrapper",
        )
    if getattr(module, "gradient_checkpointing", False) is True:
        # The attribute is the same in every release of Hugging Face's; the switch has a new name since 5.24.
        return (
            "gradient_checkpointing=True",
            "call model.gradient_checkpointing_disable(), which newer releases of transformers call "
            "activation_checkpointing_disable(); under its Trainer, leave gradient_checkpointing= and "
            "activation_checkpointing= out of TrainingArguments",
        )
    if getattr(module, "grad_checkpointing", False) is True:
        return "grad_checkpointing=True", "call model.set_grad_checkpointing(False)"
    forward = module.__dict__.get("forward")
    if isinstance(forward, partial) and getattr(forward.func, "__name__", "") == "_checkpointed_forward":
        return "fairscale's checkpoint_wrapper", "build the model without checkpoint_wrapper"
    return None
