"""Ways to keep activations out of a device's memory, or to do without them, each as a `Variant` with a fresh engine."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
from models import CHECKPOINT, PLAIN, Variant
from rivals import NotHere
from torch import nn
from torch.autograd.graph import save_on_cpu

from lightning_remat import Offload, Remat


@dataclass(frozen=True, kw_only=True)
class Way(Variant):
    """A variant, and what the comparison must know about it."""

    offloads: bool = False
    ours: bool = False
    needs_steps: int = 1
    """Until it runs as it will from then on."""
    close: Callable[[], None] = lambda: None
    """Gives back what it holds."""


PLAIN_WAY = Way(name=PLAIN.name)
CHECKPOINT_WAY = Way(name=CHECKPOINT.name, run_block=CHECKPOINT.run_block)
Makers = list[tuple[str, Callable[[], list[Way]]]]


def everyone(
    model: nn.Module, device: torch.device, place: str, limits: dict[str, int], budgets: dict[str, int]
) -> Makers:
    """Names, and what makes the variants of that name (or raises `NotHere`); plain is the first.

    Args:
        model: what will be trained.
        device: where.
        place: where ours moves contents to, ``"cpu"`` or ``"disk"``.
        limits: of ours, as `lightning_remat.Offload` takes them. ``min_bytes`` is for peers as well.
        budgets: for ours with ``policy="auto"``, in bytes, by the words for them.
    """
    min_bytes = limits["min_bytes"]
    makers: Makers = [
        ("checkpoint", lambda: [CHECKPOINT_WAY]),
        ("save_on_cpu", lambda: with_and_without_checkpoint("save_on_cpu", _save_on_cpu(device))),
        ("TRL", lambda: with_and_without_checkpoint("TRL", _trl(model, device, min_bytes))),
        ("torchtune (archived)", lambda: with_and_without_checkpoint("torchtune", _torchtune(device, min_bytes))),
        (f"remat offload_only, {place}", lambda: [ours("offload_only", place, limits)]),
        ("remat full", lambda: [ours("full")]),
        (f"remat full, {place}", lambda: [ours("full", place, limits)]),
    ]
    for words, budget in budgets.items():
        makers += [
            (f"remat auto {words}", functools.partial(_planned, words, budget, None, limits)),
            (f"remat auto {words}, {place}", functools.partial(_planned, words, budget, place, limits)),
        ]
    return makers


def with_and_without_checkpoint(name: str, around: Callable[[], AbstractContextManager[Any]]) -> list[Way]:
    """A peer's hooks alone, and around checkpointed blocks, of which it then moves what enters them."""
    return [
        Way(name=name, around=around, offloads=True),
        Way(name=f"checkpoint + {name}", run_block=CHECKPOINT.run_block, around=around, offloads=True),
    ]


def ours(policy: str, place: str | None = None, limits: dict[str, int] | None = None, **options: Any) -> Way:
    """`Remat` under a policy."""
    if place is not None:
        options["offload"] = Offload(place, **(limits or {}))
    engine = Remat(policy=policy, **options)
    name = f"remat {policy}" + (f", {place}" if place else "")
    steps = 4 if policy == "auto" else 2
    return Way(
        name=name, around=lambda: engine, offloads=place is not None, ours=True, needs_steps=steps, close=engine.close
    )


def _planned(words: str, budget: int, place: str | None, limits: dict[str, int]) -> list[Way]:
    way = ours("auto", place, limits, budget=budget)
    name = f"remat auto {words}" + (f", {place}" if place else "")
    return [replace(way, name=name)]


def _save_on_cpu(device: torch.device) -> Callable[[], AbstractContextManager[Any]]:
    return lambda: save_on_cpu(pin_memory=device.type != "cpu", device_type=device.type)


def _trl(model: nn.Module, device: torch.device, min_bytes: int) -> Callable[[], AbstractContextManager[Any]]:
    if device.type == "cpu":
        raise NotHere("it moves what is on an accelerator")
    try:
        from trl.models.activation_offloading import OffloadActivations
    except Exception as error:  # packages that break on import do so with any error
        raise NotHere(f"{type(error).__name__}: {error}") from None
    manager = OffloadActivations(min_offload_size=max(1, min_bytes))
    if hasattr(manager, "update_model_params"):
        manager.update_model_params(model)  # or it would move weights as well
    return lambda: manager


def _torchtune(device: torch.device, min_bytes: int) -> Callable[[], AbstractContextManager[Any]]:
    if device.type != "cuda":
        raise NotHere("it knows CUDA only")
    try:
        from torchtune.training import OffloadActivations
    except Exception as error:
        raise NotHere(f"{type(error).__name__}: {error}") from None
    manager = OffloadActivations(min_offload_size=max(1, min_bytes))
    return lambda: manager
