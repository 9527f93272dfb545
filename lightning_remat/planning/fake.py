"""A trace without a device."""
from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only

from lightning_remat.engine.blocks import find_blocks
from lightning_remat.engine.ledger import ModuleStack
from lightning_remat.planning.meter import Meter
from lightning_remat.planning.trace import Trace


def fake_copies(mode, model, batch):
    def fake(t):
        with mode:
            return torch.empty_strided(t.size(), t.stride(), dtype=t.dtype)
    memo = {}
    for p in model.parameters():
        memo[id(p)] = nn.Parameter(fake(p), p.requires_grad)
    for b in model.buffers():
        memo[id(b)] = fake(b)
    m = copy.deepcopy(model, memo)
    return m, tree_map_only(Tensor, fake, batch)


def fake_trace(step: Callable[[nn.Module, Any], Tensor], model: nn.Module, batch: Any, device: str = "cpu") -> Trace:
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    model, batch = fake_copies(mode, model, batch)
    modules = ModuleStack()
    modules.name(model)
    meter = Meter(device, lambda: modules.current)
    for t in (*model.parameters(), *model.buffers()):
        meter.outside(t)
    tree_map_only(Tensor, meter.outside, batch)
    with mode, torch.enable_grad(), modules.watching(), meter.hooks, meter:
        loss = step(model, batch)
        meter.in_backward = True
        loss.backward()
        del loss
    return meter.close()
