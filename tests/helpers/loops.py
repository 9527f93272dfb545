"""Plain training loops of a few steps, with everything that each step leaves behind, to be compared in every bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from lightning_remat import Remat
from tests.helpers.bits import difference_in_bits, random_streams
from tests.helpers.seed import seed_everything

Step = Callable[["Loop", Any], None]
"""Trains one batch; uses :meth:`Loop.recorded` for what is to run inside the tape."""


class Loop:
    """A training: a model, its optimizer, and maybe an engine.

    Attributes:
        steps: how many have been begun.
        seen: for each step, losses, gradients, weights, buffers, optimizer state and random streams.
    """

    def __init__(self, model: nn.Module, remat: Remat | None, bind: bool = False) -> None:
        self.model = model.train()
        self.remat = remat
        self.optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        self.losses: list[Tensor] = []
        self.steps = 0
        self.seen: list[dict[str, Any]] = []
        if remat is not None and bind:
            remat.bind(model)

    def recorded(self) -> Any:
        """The context of a step."""
        return nullcontext() if self.remat is None else self.remat

    def loss(self, batch: Any) -> Tensor:
        """Forward inside the tape."""
        with self.recorded():
            out = self.model(*batch) if isinstance(batch, tuple) else self.model(batch)
            loss = out.square().mean()
        self.losses.append(loss.detach().clone())
        return loss

    def backward(self, loss: Tensor, **options: Any) -> None:
        loss.backward(**options)

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def note(self) -> None:
        """Copy whatever there is now, gradients before they are taken away."""
        model = self.model
        self.seen.append(
            {
                "losses": list(self.losses),
                "gradients": {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()},
                "weights": {n: p.detach().clone() for n, p in model.named_parameters()},
                "buffers": {n: b.clone() for n, b in model.named_buffers()},
                "optimizer": [
                    {k: v.clone() if isinstance(v, Tensor) else v for k, v in s.items()}
                    for s in self.optimizer.state.values()
                ],
                "streams": random_streams(),
            }
        )
        self.losses.clear()


def usual(loop: Loop, batch: Any) -> None:
    """Forward, backward, optimizer."""
    loss = loop.loss(batch)
    loop.backward(loss)
    loop.note()
    loop.update()


def run(
    make: Callable[[], nn.Module],
    batches: Sequence[Any],
    step: Step = usual,
    remat: Remat | None = None,
    **options: Any,
) -> Loop:
    """Train from a known seed."""
    seed_everything(3)
    loop = Loop(make(), remat, **options)
    seed_everything(4)
    for batch in batches:
        loop.steps += 1
        step(loop, batch)
        loop.note()
    return loop


def assert_same_training(
    make: Callable[[], nn.Module], batches: Sequence[Any], step: Step = usual, *, remat: Remat, **options: Any
) -> Loop:
    """Fail unless a training with ``remat`` is the plain one in every bit, after each step."""
    plain = run(make, batches, step)
    ours = run(make, batches, step, remat, **options)
    assert difference_in_bits(plain.seen, ours.seen) == []
    return ours
