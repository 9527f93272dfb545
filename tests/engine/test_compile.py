"""Compiled parts of a model: they stay compiled, nothing of ours is traced, and results are the same."""

from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter

from lightning_remat import Remat
from tests.helpers.exact import recompute_all

X = torch.linspace(-1, 1, 32).reshape(4, 8)


class Block(nn.Module):
    def __init__(self, breaks: bool) -> None:
        super().__init__()
        self.up, self.down, self.breaks = nn.Linear(8, 16), nn.Linear(16, 8), breaks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.dropout(torch.tanh(self.up(x)), 0.3, True)
        if self.breaks:
            torch._dynamo.graph_break()
        return x + self.down(h)


def trained(remat: Remat | None, how: str) -> tuple[list[Any], int]:
    """Losses and gradients of three steps, and how many graphs were compiled."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    counter = CompileCounter()
    blocks = nn.Sequential(*[Block(how == "whole model, graph breaks") for _ in range(3)])
    model: Any = blocks
    if how == "blocks":
        for block in blocks:
            block.compile(backend=counter)
    else:
        model = torch.compile(blocks.forward, backend=counter)
    found: list[Any] = []
    for _ in range(3):
        if remat is None:
            loss = model(X).square().mean()
        else:
            with remat:
                loss = model(X).square().mean()
        loss.backward()
        found += [loss.detach(), *(p.grad.clone() for p in blocks.parameters() if p.grad is not None)]
        blocks.zero_grad()
    torch._dynamo.reset()
    return found, counter.frame_count


@pytest.mark.parametrize("policy", [recompute_all, "full", "selective"], ids=str)
@pytest.mark.parametrize("how", ["blocks", "whole model", "whole model, graph breaks"])
def test_compiled_parts_stay_compiled(policy: Any, how: str) -> None:
    """As many graphs as without us, in the first step and after it, and the same bits."""
    plain, graphs = trained(None, how)
    got, ours = trained(Remat(policy=policy), how)
    assert graphs > 0
    assert ours == graphs
    assert all(torch.equal(a, b) for a, b in zip(plain, got, strict=True))
