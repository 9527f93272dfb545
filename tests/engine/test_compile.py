"""Compiled parts of a model: they stay compiled, nothing of ours is traced, and results are the same."""

import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter

from lightning_remat import Remat
from tests.helpers.exact import EVERYTHING, recompute_all
from tests.helpers.names import named

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


def trained(remat: Remat | None, how: str) -> tuple[list[Any], list[int]]:
    """Losses and gradients of five steps, and how many graphs had been compiled after each."""
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
    graphs: list[int] = []
    for _ in range(5):
        if remat is None:
            loss = model(X).square().mean()
        else:
            with remat:
                loss = model(X).square().mean()
        loss.backward()
        found += [loss.detach(), *(p.grad.clone() for p in blocks.parameters() if p.grad is not None)]
        graphs.append(counter.frame_count)
        blocks.zero_grad()
    torch._dynamo.reset()
    return found, graphs


# Dynamo looks at .grad of what it wraps, and warns itself about that.
# The compiler's own look at a tensor that is no leaf.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.parametrize("offload", [None, EVERYTHING], ids=["stays", "leaves"])
@pytest.mark.parametrize("policy", [recompute_all, "full", "selective", "offload_only"], ids=named)
@pytest.mark.parametrize("how", ["blocks", "whole model", "whole model, graph breaks"])
def test_compiled_parts_stay_compiled(policy: Any, how: str, offload: Any) -> None:
    """Compiled they run, in the same bits; from the third step on nothing is compiled any more.

    The first step, under the ledger's hooks, and the second, without them, may each compile once more than plainly.
    """
    plain, graphs = trained(None, how)
    if policy == "offload_only" and offload is None:
        policy = "none"  # the same without anything to move
    remat = Remat(policy=policy, offload=offload)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*the first step ran none")  # what is compiled has no blocks of ours
        got, ours = trained(remat, how)
    remat.close()
    assert graphs[0] > 0
    assert ours[0] > 0
    assert ours[2] == ours[-1]
    assert all(torch.equal(a, b) for a, b in zip(plain, got, strict=True))
