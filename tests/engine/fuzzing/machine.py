"""The machine that a random program runs on: its tensors, its choices, and the register of instructions."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

LENGTH = 30
BLOCKS = 4
MOST_ELEMENTS = 512

Make = Callable[["Machine"], Any]
INSTRUCTIONS: dict[str, tuple[Make, int]] = {}


def instruction(weight: int = 2) -> Callable[[Make], Make]:
    """Add a function to the instructions; ``weight`` is how often it comes up."""

    def add(make: Make) -> Make:
        INSTRUCTIONS[make.__name__] = (make, weight)
        return make

    return add


class BackwardError(Exception):
    """A gradient that was asked for on the way could not be had; the program ends there."""


class Machine:
    """Tensors, and the random choices of the instruction that is running."""

    def __init__(self, seed: int, parameters: Sequence[Tensor], buffers: Sequence[Tensor]) -> None:
        self.seed = seed
        self.parameters = list(parameters)
        self.buffers = list(buffers)
        self.tensors: list[Tensor] = []
        self.extra_losses: list[Tensor] = []
        self.events: list[str] = []
        self.choose = random.Random(0)

    def start(self) -> None:
        """Begin a step."""
        grid = torch.linspace(-1, 1, 24)
        self.tensors = [
            grid.reshape(4, 6).clone(),
            *(p * 1.5 for p in self.parameters[:2]),
            self.parameters[0],
            self.buffers[0],
            torch.linspace(0.1, 2, 6, dtype=torch.float64),
        ]
        self.extra_losses = []
        self.events = []

    def backward(self, loss: Tensor, **options: Any) -> None:
        """Run a backward pass on the way."""
        try:
            loss.backward(**options)
        except RuntimeError as error:
            raise BackwardError from error

    def run(self, position: int) -> None:
        """Run one instruction; what it raises is noted, since plain PyTorch must raise at the same place."""
        self.choose = random.Random(self.seed * 1_000_003 + position)
        names = list(INSTRUCTIONS)
        name = self.choose.choices(names, [INSTRUCTIONS[n][1] for n in names])[0]
        try:
            made = INSTRUCTIONS[name][0](self)
        except (RuntimeError, IndexError, ValueError, TypeError, NotImplementedError) as error:
            self.events.append(f"{position} {name}: {type(error).__name__}")
            return
        made = [t for t in (made if isinstance(made, (list, tuple)) else [made]) if isinstance(t, Tensor)]
        for t in made:
            if t.numel() <= MOST_ELEMENTS and t.layout is torch.strided:
                self.tensors.append(t)
        if len(self.tensors) > 14:  # what is let go of is freed: only then does dropping mean anything
            del self.tensors[self.choose.randrange(6, len(self.tensors) - 1)]
        self.events.append(f"{position} {name} -> {[(tuple(t.shape), str(t.dtype)[6:]) for t in made]}")

    # ------------------------------------------------------------------ choices

    def any(self) -> Tensor:
        """One of the tensors, rather a late one."""
        n = len(self.tensors)
        return self.tensors[max(self.choose.randrange(n), self.choose.randrange(n))]

    def real(self) -> Tensor:
        """A floating-point tensor."""
        for _ in range(20):
            t = self.any()
            if t.is_floating_point():
                return t
        return self.tensors[0]

    def shaped(self) -> Tensor:
        """A floating-point tensor with a dimension."""
        for _ in range(20):
            t = self.real()
            if t.dim():
                return t
        return self.tensors[0]

    def fitting(self, shape: Sequence[int]) -> Tensor:
        """A floating-point tensor that can be broadcast to ``shape``; a constant if there is none."""
        for _ in range(20):
            t = self.real()
            try:
                if torch.broadcast_shapes(t.shape, tuple(shape)) == torch.Size(shape):
                    return t
            except RuntimeError:
                continue
        return torch.full((), 0.5)

    def dim(self, t: Tensor) -> int:
        """A dimension of ``t``."""
        return self.choose.randrange(t.dim()) if t.dim() else 0

    def number(self) -> float:
        """A modest factor."""
        return self.choose.choice([-1.5, -0.5, 0.25, 0.75, 1.25, 2.0])

    def pick(self, *options: Any) -> Any:
        """One of the options."""
        return self.choose.choice(options)

    def index(self, n: int, count: int) -> Tensor:
        """``count`` positions below ``n``."""
        return torch.tensor([self.choose.randrange(n) for _ in range(count)])
