"""Instructions in autograd's corners: functions of one's own, gradients on the way, hooks, checkpoints."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.engine.fuzzing.machine import BackwardError, Machine, instruction

# ---------------------------------------------------------------------- autograd's corners


class SavesBoth(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Any:
        out = x.sin()
        ctx.save_for_backward(x, out, x.reshape(-1)[:2])
        return out

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, out, part = ctx.saved_tensors
        return g * x.cos() + 0 * out + part.sum() * 0


class Dirty(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Any:
        ctx.mark_dirty(x)
        x.mul_(2)
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return g * 2 + 0 * x


class Odd(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Any:
        ctx.set_materialize_grads(False)
        sign = x.sign()
        ctx.mark_non_differentiable(sign)
        out = x * sign
        ctx.save_for_backward(sign, x.detach())
        ctx.kept = x.detach()
        return out, sign, x.exp().clamp(max=3)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, g: Tensor | None, _: Any, h: Tensor | None) -> Any:
        sign, x = ctx.saved_tensors
        out = torch.zeros_like(x)
        if g is not None:
            out = out + g * sign
        if h is not None:
            out = out + h * (x + ctx.kept)
        return out


@instruction(3)
def function(m: Machine) -> Any:
    a = m.real()
    return m.pick(SavesBoth, Dirty, Odd, SavesBoth).apply(a)


@instruction(1)
def gradient_on_the_way(m: Machine) -> Any:
    a, b = m.real(), m.real()
    if not a.requires_grad or not b.requires_grad:
        return None
    graph = m.pick(True, False)
    loss = a.sum()
    try:
        return torch.autograd.grad(loss, [b], retain_graph=True, create_graph=graph, allow_unused=True)[0]
    except RuntimeError as error:
        raise BackwardError from error


@instruction(1)
def backward_on_the_way(m: Machine) -> Any:
    a = m.real()
    if a.requires_grad:
        m.backward(a.sum(), retain_graph=True)


@instruction(1)
def hooked(m: Machine) -> Any:
    a = m.real() * 1  # retain_grad() on some views crashes PyTorch itself
    if a.requires_grad:
        a.register_hook(m.pick(lambda g: g * 0.5, lambda g: None, lambda g: g.clone().mul_(2)))
        a.retain_grad()
    return a


@instruction(1)
def side_loss(m: Machine) -> Any:
    m.extra_losses.append(m.real())


@instruction(1)
def checkpointed(m: Machine) -> Any:
    from torch.utils.checkpoint import checkpoint

    a = m.real()
    return checkpoint(lambda t: F.dropout(t.sin(), 0.2) * t, a, use_reentrant=False)


@instruction(1)
def under_autocast(m: Machine) -> Any:
    a = m.shaped()
    with torch.autocast("cpu", torch.bfloat16):
        if a.shape[-1] == 6:
            return F.linear(a.float(), m.parameters[1]).sin()
        return (a @ a.transpose(-1, -2)).sin() if a.dim() > 1 else a


@instruction(1)
def saved_elsewhere(m: Machine) -> Any:
    a = m.real()
    with torch.autograd.graph.save_on_cpu():
        return a.sin() * a


@instruction(1)
def shifted_data(m: Machine) -> Any:
    a = m.real()
    return a.data.clone() if m.pick(True, False) else torch.tensor(a.detach().tolist())
