"""Other ways to train the same model with less memory, each as a `Variant`.

They work on any `Yard`: what a user would write into the model's code is put on its blocks for the time of a turn. A
package that is not installed, or a model that a way cannot be used on, leaves a line that says so instead of a row.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from itertools import pairwise
from typing import Any

import torch
from models import EXPENSIVE, Variant
from torch import Tensor, nn
from torch._functorch.partitioners import get_default_op_list
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from yards import Yard

aten = torch.ops.aten
Replacement = tuple[nn.Module, str, Callable[..., Any]]

TITAN = {op.default for op in get_default_op_list().compute_intensive_ops} | {
    aten.linear.default,
    aten.max.default,
    aten._scaled_dot_product_cudnn_attention.default,
    aten._scaled_dot_product_attention_math.default,
    aten._scaled_dot_product_fused_attention_overrideable.default,
    # Not in the list, which is for GPUs; it is what fused attention is called on a CPU.
    aten._scaled_dot_product_flash_attention_for_cpu.default,
}
"""What torchtitan's selective checkpointing saves (`torchtitan/distributed/activation_checkpoint.py` of mid 2026), less
collectives and kernels of other packages."""
TITAN_HALVED = {aten.mm.default, aten.linear.default, aten.addmm.default}
"""Of these torchtitan saves every second one. `addmm` is not among its own, since its models have no biases: where
there are some, it is what a linear layer calls."""


class NotHere(Exception):
    """A way that cannot be used here, and why."""


def methods_replaced(replacements: list[Replacement]) -> Callable[[], AbstractContextManager[None]]:
    """Put functions in the place of methods, on these objects only and for a while."""

    @contextmanager
    def replaced() -> Iterator[None]:
        for owner, name, function in replacements:
            setattr(owner, name, function)
        try:
            yield
        finally:
            for owner, name, _ in replacements:
                delattr(owner, name)

    return replaced


def _checkpointed(forward: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, **options, **kwargs)

    return run


def per_block(name: str, blocks: list[nn.Module], **options: Any) -> Variant:
    """`torch.utils.checkpoint` around each of these blocks."""
    replacements = [(block, "forward", _checkpointed(block.forward, **options)) for block in blocks]
    return Variant(name=name, installed=methods_replaced(replacements))


def selective(yard: Yard) -> list[Variant]:
    """Selective checkpointing with torchtitan's rule, and with a list of all matrix products and attention."""

    def titan() -> Any:
        seen: Counter[bool] = Counter()

        def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
            save = op in TITAN
            if op in TITAN_HALVED:
                seen[context.is_recompute] += 1
                save = seen[context.is_recompute] % 2 == 1
            return CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.PREFER_RECOMPUTE

        return create_selective_checkpoint_contexts(policy)

    every = functools.partial(create_selective_checkpoint_contexts, EXPENSIVE)
    return [
        per_block("selective, torchtitan's rule", yard.blocks, context_fn=titan),
        per_block("selective, all matmuls", yard.blocks, context_fn=every),
    ]


def segments(yard: Yard) -> list[Variant]:
    """About sqrt(N) segments of consecutive blocks; as in `checkpoint_sequential`, the last is not checkpointed."""
    blocks = yard.blocks
    count = max(2, round(math.sqrt(len(blocks))))
    bounds = [round(i * len(blocks) / count) for i in range(count + 1)]
    replacements: list[Replacement] = []
    for first, last in pairwise(bounds[:-1]):
        chain = [block.forward for block in blocks[first:last]]
        replacements.append((blocks[first], "forward", _checkpointed(functools.partial(_in_turn, chain))))
        # The first one has done the work of the others.
        replacements += [(block, "forward", _pass_on) for block in blocks[first + 1 : last]]
    return [Variant(name=f"{count} segments", installed=methods_replaced(replacements))]


def _in_turn(chain: list[Callable[..., Any]], x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    for forward in chain:
        x = forward(x, *args, **kwargs)
    return x


def _pass_on(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return x


def switch(yard: Yard) -> list[Variant]:
    """Hugging Face's own switch."""
    model = yard.switch
    if model is None:
        raise NotHere("the model has no such switch")

    @contextmanager
    def switched() -> Iterator[None]:
        # transformers 5.24 renames it; the old name warns.
        new = hasattr(model, "activation_checkpointing_enable")
        prefix = "activation" if new else "gradient"
        options = {f"{prefix}_checkpointing_kwargs": {"use_reentrant": False}}
        getattr(model, f"{prefix}_checkpointing_enable")(**options)
        try:
            yield
        finally:
            getattr(model, f"{prefix}_checkpointing_disable")()

    return [Variant(name="Hugging Face's switch", installed=switched)]


class _RandomState:
    """What torch_remat asks for where there is dropout: it does not look after random states itself."""

    def snapshot(self) -> Tensor:
        return torch.get_rng_state()

    def restore(self, state: Tensor) -> None:
        torch.set_rng_state(state)


def annotated(yard: Yard) -> list[Variant]:
    """torch_remat, with regions whose activations are saved, marked as one would by hand (`Yard.regions`)."""
    try:
        import torch_remat
    except ImportError:
        raise NotHere("torch-remat is not installed") from None

    def saved(function: Callable[..., Any], name: str) -> Callable[..., Any]:
        run = torch_remat.region(function, name, recompute=False)

        @functools.wraps(function)
        def region(*args: Any, **kwargs: Any) -> Any:
            out = run(*args, **kwargs)
            # What follows is not in a region, and reads it when it is run again.
            torch_remat.recompute_needs_tensor(
                *(t for t in (out if isinstance(out, tuple) else [out]) if t is not None)
            )
            return out

        return region

    hooks = (_RandomState(),) if yard.shape.dropout else ()
    variants = []
    for level, paths in yard.regions.items():
        replacements: list[Replacement] = []
        for i, block in enumerate(yard.blocks):
            for path in paths:
                parent, _, last = path.rpartition(".")
                owner = block.get_submodule(parent)
                target = getattr(owner, last)
                if isinstance(target, nn.Module):
                    owner, last, target = target, "forward", target.forward
                replacements.append((owner, last, saved(target, path)))
            around = torch_remat.checkpoint(region_name=f"blocks.{i}", recompute_state_hooks=hooks)
            replacements.append((block, "forward", around(block.forward)))
        variants.append(Variant(name=f"torch_remat, {level}", installed=methods_replaced(replacements)))
    return variants
