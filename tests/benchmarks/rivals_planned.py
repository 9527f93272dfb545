"""Peers that decide by themselves what to keep: ckptplan's choice of blocks, and the compiler under a memory budget."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from models import PLAIN, Variant
from rivals import NotHere, per_block
from torch import Tensor, nn
from yards import Yard

from lightning_remat.runtime.memory import measure_peak

Call = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]


def knapsack(yard: Yard, savings: tuple[float, ...] = (0.25, 0.5, 0.75)) -> list[Variant]:
    """ckptplan: which blocks to checkpoint so that a share of the activations is saved at the least cost.

    It measures bytes on CUDA only and refuses to plan without. So the bytes are measured here, and put into its own
    profiles; times are what it measured.
    """
    try:
        import ckptplan
    except ImportError:
        raise NotHere("ckptplan is not installed") from None

    calls = _calls(yard)
    modules = [_Bound(block, args[1:], kwargs) for block, args, kwargs in calls]
    blocks = ckptplan.declare_blocks(nn.ModuleList(modules), [(f"block{i}", m) for i, m in enumerate(modules)])
    start = (calls[0][1][0].detach(),)
    profiles = [
        dataclasses.replace(
            profile,
            timing_only=False,
            activation_bytes_estimate=_kept_bytes(module, args[0]),
            activation_bytes_method="isolated_forward_delta",
        )
        for profile, module, (_, args, _) in zip(
            ckptplan.profile_blocks(blocks, start, device="cpu", num_warmup=1, num_trials=3),
            modules,
            calls,
            strict=True,
        )
    ]
    yard.model.zero_grad()
    if not any(profile.eligible_for_checkpoint for profile in profiles):
        raise NotHere(f"ckptplan excludes every block ({profiles[0].exclusion_reason})")
    variants = []
    for saving in savings:
        plan = ckptplan.plan_checkpoints(
            profiles,
            blocks,
            target_kind="activation_saving_fraction",
            target_value=saving,
            # Its default of 1 MiB is coarse for blocks of a few MiB, and its table has an entry for each bucket.
            activation_bucket_bytes=max(1024, sum(p.activation_bytes_estimate for p in profiles) // 4096),
            on_infeasible="best_effort",
        )
        chosen = [b for b, decision in zip(yard.blocks, plan.decisions, strict=True) if decision.checkpointed]
        variants.append(per_block(f"ckptplan, {saving:.0%} saved", chosen))
    return variants


class _Bound(nn.Module):
    """A block with all arguments but the first one given: ckptplan's chains carry nothing else."""

    def __init__(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super().__init__()
        self.block = block
        self.rest = (args, kwargs)

    def forward(self, x: Tensor) -> Tensor:
        args, kwargs = self.rest
        return self.block(x, *args, **kwargs)


def _calls(yard: Yard) -> list[Call]:
    """How each block is called in a step."""
    found: list[Call] = []

    def note(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        found.append((block, args, kwargs))

    handles = [block.register_forward_pre_hook(note, with_kwargs=True) for block in yard.blocks]
    try:
        PLAIN.forward(yard.model, yard.batch)
    finally:
        for handle in handles:
            handle.remove()
    return found


def _kept_bytes(module: nn.Module, x: Tensor) -> int:
    """Bytes that a block's forward leaves behind for backward."""
    held = []
    return measure_peak(lambda: held.append(module(x.detach().requires_grad_()))).left_bytes


@dataclass(frozen=True, kw_only=True)
class Compiled(Variant):
    """A variant whose forward is a compiled copy of the model's."""

    compiled: Callable[..., Tensor]

    def forward(self, model: nn.Module, batch: Any) -> Tensor:
        return self.compiled(batch)


COMPILED_PLAIN = "compiled"


def compiled(yard: Yard, budgets: tuple[float, ...] = (0.5, 0.25)) -> list[Variant]:
    """The model under `torch.compile`: as it is, then with activation memory budgets (1 is all, 0 is recompute all)."""
    variants = [_compiled(yard.model, COMPILED_PLAIN, 1.0)]
    variants += [_compiled(yard.model, f"compiled, budget {budget:g}", budget) for budget in budgets]
    for variant in variants:
        try:
            variant.step(yard.model, yard.batch)
        except Exception as error:
            raise NotHere(f"torch.compile fails here: {type(error).__name__}: {str(error).splitlines()[0]}") from error
        finally:
            yard.model.zero_grad()
    gc.collect()  # what tracing leaves behind
    return variants


def _compiled(model: nn.Module, name: str, budget: float) -> Compiled:
    from torch._functorch import config
    from torch._inductor.compile_fx import compile_fx

    # A backend for each budget, since what Dynamo has compiled for a backend is taken again for an equal one, and
    # because the budget is looked at while the backend runs, at the first call.
    def backend(graph: Any, inputs: Any) -> Any:
        with config.patch(activation_memory_budget=budget):
            return compile_fx(graph, inputs)

    return Compiled(name=name, compiled=torch.compile(model, backend=backend))
