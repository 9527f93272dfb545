"""Comparing a step under the tape with the plain one, bit for bit."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lightning_remat import Offload, OpInfo, Remat
from lightning_remat.engine.verify import same_bits


def recompute_all(op: OpInfo) -> str:
    """The policy that drops everything that may be dropped: the hardest for exactness."""
    return "recompute"


EVERYTHING = Offload("disk", min_bytes=0, in_flight=1)
"""All that is kept leaves, whatever its size, and at once."""


@dataclass
class Outcome:
    """Everything that a training step leaves behind."""

    losses: list[Tensor]
    grads: dict[str, Tensor | None]
    buffers: dict[str, Tensor]
    rng: tuple[Tensor, object, bytes]


Step = Callable[[nn.Module], Any]
"""Runs forward and returns a loss, or does its own backward and returns losses."""


class _Block(nn.Module):
    """Runs a step as one module, so that policies over blocks find one."""

    def __init__(self, model: nn.Module, step: Step) -> None:
        super().__init__()
        self.model = model
        self.step = step

    def forward(self) -> Any:
        return self.step(self.model)


def outcome(model: nn.Module, step: Step, remat: Remat | None, *, steps: int = 2, seed: int = 5) -> Outcome:
    """Run a copy of ``model`` for some steps, in train mode, from one seed; ``remat`` None is the plain run."""
    model = copy.deepcopy(model).train()
    block = _Block(model, step)
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
    losses: list[Tensor] = []
    for _ in range(steps):
        if remat is None:
            loss = block()
        else:
            with remat:
                loss = block()
        if isinstance(loss, Tensor) and loss.requires_grad:
            loss.backward()
        losses.append(torch.as_tensor(loss).detach().clone())
    return Outcome(
        losses,
        {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()},
        {n: b.clone() for n, b in model.named_buffers()},
        (torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tobytes()),
    )


def assert_same(plain: Outcome, other: Outcome) -> None:
    """Fail unless two outcomes agree in every bit."""
    for i, (a, b) in enumerate(zip(plain.losses, other.losses, strict=True)):
        assert same_bits(a, b), f"loss of step {i}: {a} and {b}"
    for name, grad in plain.grads.items():
        got = other.grads[name]
        assert (grad is None) == (got is None), f"gradient of {name}: one of them is None"
        assert grad is None or same_bits(grad, got), f"gradient of {name} differs by {(grad - got).abs().max()}"
    for name, buffer in plain.buffers.items():
        assert same_bits(buffer, other.buffers[name]), f"buffer {name}"
    assert torch.equal(plain.rng[0], other.rng[0]), "torch's random stream"
    assert plain.rng[1:] == other.rng[1:], "Python's or NumPy's random stream"


def assert_exact(model: nn.Module, step: Step, *policies: Any, **options: Any) -> Remat:
    """Fail unless a step gives under each policy what it gives plainly; returns the last engine."""
    plain = outcome(model, step, None)
    assert_same(plain, outcome(model, step, None))  # otherwise nothing could be said
    if not policies and not options:
        for policy in ("offload_only", "full", recompute_all):
            remat = Remat(policy=policy, offload=EVERYTHING)
            assert_same(plain, outcome(model, step, remat))
            remat.close()
    remat = Remat(policy=recompute_all)
    for policy in policies or (recompute_all, "full", "selective"):
        remat = Remat(policy=policy, **options)
        assert_same(plain, outcome(model, step, remat))
    return remat
