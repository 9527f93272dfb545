"""Instructions that change a tensor, and those that draw."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.engine.fuzzing.machine import Machine, instruction

# ---------------------------------------------------------------------- in place


def _change(m: Machine, a: Tensor) -> Any:
    d = m.dim(a)
    n = max(1, a.shape[d]) if a.dim() else 1
    b = m.fitting(a.shape)
    i = m.index(n, 2)
    f = m.pick(
        lambda: a.add_(m.number()),
        lambda: a.mul_(m.number()),
        lambda: a.add_(b),
        lambda: a.mul_(b),
        lambda: a.sub_(a),
        lambda: a.mul_(a),
        lambda: a.sin_(),
        lambda: a.relu_(),
        lambda: a.sigmoid_(),
        lambda: a.tanh_(),
        lambda: a.clamp_(-0.6, 0.6),
        lambda: a.copy_(b),
        lambda: a.copy_(a.flip(0)) if a.dim() else a.zero_(),
        lambda: a.fill_(0.3),
        lambda: a.zero_(),
        lambda: a.masked_fill_(a > 0.2, -0.4),
        lambda: a.masked_scatter_(a > 0, torch.arange(float(a.numel())).to(a.dtype)),
        lambda: a.index_fill_(d, i, 0.7),
        lambda: a.index_add_(d, i, a.index_select(d, i).mul(0.5)),
        lambda: a.index_copy_(d, i, a.index_select(d, i).sin()),
        lambda: a.put_(m.index(max(1, a.numel()), 2), torch.tensor([0.1, -0.2], dtype=a.dtype)),
        lambda: a.scatter_(d, torch.zeros_like(a, dtype=torch.int64), 0.5),
        lambda: a.addcmul_(b, b, value=0.3),
        lambda: a.lerp_(b.to(a.dtype).expand_as(a), 0.4),
        lambda: a.cumsum_(d),
        lambda: a.tril_(),
        lambda: a.__setitem__(0, 0.2),
        lambda: a.__setitem__(a > 0.4, 0.2),
        lambda: a.__setitem__((..., slice(None, 1)), b if b.dim() == 0 else 0.1),
        lambda: a.neg_(),
        lambda: a.pow_(2),
        lambda: a.div_(1.7),
        lambda: a.bernoulli_(0.6),
        lambda: a.normal_(),
        lambda: a.uniform_(-1, 1),
        lambda: a.exponential_().clamp_(max=2),
        lambda: F.dropout(a, 0.3, True, inplace=True),
        lambda: F.leaky_relu(a, 0.1, inplace=True),
        lambda: F.elu(a, inplace=True),
        lambda: torch._foreach_mul_([a], 0.9),
        lambda: torch._foreach_add_([a, m.real()], 0.1),
        lambda: a.copy_(b, non_blocking=True),
        lambda: a.addmv_(a, a[0]) if a.dim() == 2 else a.mul_(0.5),
        lambda: a.index_put_((i,), torch.tensor(0.3, dtype=a.dtype), accumulate=True),
        lambda: a.fill_diagonal_(0.3),
        lambda: a.t().mul_(0.9),
        lambda: a.view(-1).add_(0.1),
        lambda: a.reshape(-1).add_(0.1),
        lambda: a.diagonal().mul_(2) if a.dim() == 2 else a.mul_(2),
        lambda: a.as_strided((2,), (1,), 0).mul_(1.5),
        lambda: a.detach().mul_(1.1),
        lambda: a.squeeze().exp_().clamp_(max=2),
    )
    f()


@instruction(12)
def change(m: Machine) -> Any:
    _change(m, m.real())


@instruction(3)
def change_without_history(m: Machine) -> Any:
    with torch.no_grad():
        _change(m, m.real())


@instruction(1)
def change_buffer(m: Machine) -> Any:
    with torch.no_grad():
        b = m.buffers[0]
        m.pick(lambda: b.mul_(0.9), lambda: b.copy_(b.sin()), lambda: b.lerp_(m.fitting(b.shape).expand_as(b), 0.1))()
    return m.pick(m.buffers[0], m.buffers[0] * 1.0, m.buffers[0].detach())


@instruction(1)
def change_parameter(m: Machine) -> Any:
    with torch.no_grad():
        m.pick(m.parameters[2].mul_, m.parameters[0].mul_)(0.9)


@instruction(2)
def written_out(m: Machine) -> Any:
    a = m.real()
    with torch.no_grad():
        target = m.pick(torch.zeros_like(a), torch.empty_like(a), m.real(), torch.empty(0))
        m.pick(torch.sin, torch.neg, torch.exp)(a.clamp(-1, 1), out=target)
    return target


@instruction(2)
def filled(m: Machine) -> Any:
    a = m.real()
    out = torch.empty_like(a)
    m.pick(
        lambda: out.normal_(),
        lambda: out.copy_(a),
        lambda: out.zero_()[..., :1].uniform_() if out.dim() else out.zero_(),
        lambda: out.bernoulli_(0.5),
        lambda: out.fill_(0.25),
        lambda: out.view(-1).normal_() if out.is_contiguous() else out.zero_(),
    )()
    return m.pick(lambda: out * a, lambda: out)()


# ---------------------------------------------------------------------- chance


@instruction(4)
def chance(m: Machine) -> Any:
    a = m.real()
    f = m.pick(
        lambda: F.dropout(a, 0.4),
        lambda: F.alpha_dropout(a, 0.3, True),
        lambda: a * torch.rand_like(a),
        lambda: a + torch.randn(a.shape),
        lambda: a * torch.bernoulli(torch.full_like(a, 0.5)),
        lambda: a[torch.randperm(a.shape[0])] if a.dim() else a * torch.rand(()),
        lambda: a * (torch.randint(0, 3, a.shape)),
        lambda: torch.normal(0.0, 1.0, (4, 6)) * 0.5,
        lambda: F.rrelu(a, training=True),
        lambda: F.gumbel_softmax(a, hard=m.pick(True, False)) if a.dim() else a,
        lambda: torch.poisson(a.abs()),
    )
    return f()
