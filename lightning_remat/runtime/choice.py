"""``policy="auto"`` under a budget, until the planner chooses per value: ``selective`` if it fits, else ``full``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from lightning_remat.engine.ledger import Ledger
from lightning_remat.engine.policies import FULL, SELECTIVE, Policy
from lightning_remat.runtime.sizes import device_memory, format_bytes

# What a step needs beyond what is counted here (backward's own tensors, one block's replay), as a share of the budget.
_HEADROOM = 0.1


@dataclass(frozen=True)
class Choice:
    """A policy, and a sentence that says why."""

    policy: Policy
    sentence: str


def choose_under_budget(ledger: Ledger, roots: Sequence[nn.Module], budget: int | float) -> Choice:
    """Judge by the books of one step under ``full`` whether ``selective`` would fit.

    Args:
        ledger: of that step.
        roots: the models, for the memory that does not change from step to step.
        budget: bytes, or (float) a share of the device's memory.
    """
    device = next((p.device for root in roots for p in root.parameters()), torch.device("cpu"))
    limit = budget if isinstance(budget, int) else int(budget * device_memory(device))
    kept = sum(line.kept_bytes for line in ledger.lines.values())
    more = sum(line.dropped_bytes for line in ledger.lines.values() if line.kind == "expensive")
    need = static_bytes(roots, device) + kept + more
    fits = need <= limit * (1 - _HEADROOM)
    policy = SELECTIVE if fits else FULL
    return Choice(
        policy,
        f"policy='auto' with a budget of {format_bytes(limit)}: 'selective' would need about {format_bytes(need)}, "
        f"so it takes {policy.name!r} until the planner chooses per value.",
    )


def static_bytes(roots: Sequence[nn.Module], device: torch.device) -> int:
    """What stays allocated between steps.

    On CUDA what the allocator says after the first step, optimizer state included; elsewhere parameters, buffers and
    one gradient for each trainable parameter.
    """
    if device.type == "cuda":
        return int(torch.cuda.memory_allocated(device))
    seen: dict[int, int] = {}
    for root in roots:
        for p in root.parameters():
            seen[id(p)] = p.numel() * p.element_size() * (2 if p.requires_grad else 1)
        for b in root.buffers():
            seen[id(b)] = b.numel() * b.element_size()
    return sum(seen.values())
