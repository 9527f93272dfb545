"""The simulator against measured peaks on small blocks, each with one thing that makes memory hard to foresee."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.helpers.plans import Traced, check_all

WIDTH, ROWS = 16, 64


class Block(nn.Module):
    """Layers for the functions below."""

    def __init__(self, what: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.what = what
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.batch_norm = nn.BatchNorm1d(4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)
        self.cell = nn.GRUCell(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.randn(4 * WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.what(self, x)


class Net(nn.Module):
    """Blocks that all do the same."""

    def __init__(self, what: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(what) for _ in range(3)])

    def forward(self, x: Tensor) -> Any:
        for block in self.blocks:
            x = block(x)
        return SimpleNamespace(loss=x.square().mean())


class Gated(torch.autograd.Function):
    """Saves what it computed on the way, as a tensor and as an attribute."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor) -> Tensor:
        h = x * scale
        gate = torch.sigmoid(h)
        ctx.save_for_backward(x, scale, gate)
        ctx.kept = gate * 2
        return h * gate

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, scale, gate = ctx.saved_tensors
        return grad * gate * scale, (grad * gate * x).sum(0)


def mixed(block: Block, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return x + block.down(F.dropout(F.gelu(block.up(block.norm(x))), 0.1))


def custom(block: Block, x: Tensor) -> Tensor:
    return x + block.down(Gated.apply(block.up(block.norm(x)), block.scale))


def in_place(block: Block, x: Tensor) -> Tensor:
    h = block.up(block.norm(x)).relu_() * 2
    h = block.down(h.add_(1.0)).mul_(0.5)
    h[:, :4] = 0
    return x + h.sin()


def made_from_nothing(block: Block, x: Tensor) -> Tensor:
    """What no plan drops: records hold it longer than the block does."""
    h = block.up(x)
    out = torch.zeros_like(h)
    out[:, ::2] += h[:, ::2]
    mask = torch.zeros_like(h).bernoulli_(0.5)
    out = torch.where(mask > 0, out, torch.full_like(out, 0.3)) * torch.ones_like(out)
    return x + block.down(out)


def checkpointed(block: Block, x: Tensor) -> Tensor:
    return x + checkpoint(lambda x: block.down(F.dropout(F.gelu(block.up(x)), 0.1)), x, use_reentrant=False)


def split(block: Block, x: Tensor) -> Tensor:
    a, b = block.up(x).chunk(2, -1)
    parts = torch.cat([a * b.sigmoid(), b.tanh()], -1).view(-1, 4, WIDTH).unbind(1)
    return x + block.down(torch.stack([parts[0], parts[1].exp(), *parts[2:]], 1).flatten(1))


def cells(block: Block, x: Tensor) -> Tensor:
    h = torch.zeros_like(x)
    for _ in range(3):
        h = block.cell(x, h)
    return h


def normed(block: Block, x: Tensor) -> Tensor:
    return x + block.down(F.relu(block.batch_norm(block.up(x)), inplace=True))


def complex_numbers(block: Block, x: Tensor) -> Tensor:
    f = torch.fft.rfft(block.up(x))
    f = f * torch.view_as_complex(torch.stack([f.real.cos(), f.imag.sin()], -1)).conj()
    return x + block.down(torch.fft.irfft(f, n=4 * WIDTH))


WHAT = [mixed, custom, in_place, made_from_nothing, checkpointed, split, cells, normed, complex_numbers]


@pytest.mark.parametrize("what", WHAT, ids=lambda what: what.__name__)
def test_any_plan_is_exact_and_foreseen(what: Callable[[Any, Tensor], Tensor]) -> None:
    """As for whole models."""
    torch.manual_seed(0)
    check_all(Traced(Net(what).train(), {"x": torch.randn(ROWS, WIDTH)}), 4)
