"""Instructions that compute, and those that only look: arithmetic and views."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from tests.engine.fuzzing.machine import Machine, instruction

# ---------------------------------------------------------------------- arithmetic


@instruction(8)
def unary(m: Machine) -> Any:
    f = m.pick(
        torch.sin,
        torch.cos,
        torch.tanh,
        torch.sigmoid,
        torch.relu,
        torch.abs,
        torch.neg,
        torch.square,
        torch.atan,
        F.gelu,
        F.silu,
        F.softplus,
        F.elu,
        torch.floor,
        torch.sign,
        torch.clone,
        lambda t: t.abs().add(0.5).sqrt(),
        lambda t: t.abs().add(0.5).log(),
        lambda t: t.clamp(-0.7, 0.7),
        lambda t: t.clamp(-1, 1).exp(),
    )
    return f(m.real())


@instruction(8)
def binary(m: Machine) -> Any:
    a = m.real()
    b = m.fitting(a.shape)
    f = m.pick(
        torch.add,
        torch.mul,
        torch.sub,
        torch.maximum,
        lambda a, b: a / (b.abs() + 0.5),
        lambda a, b: torch.where(a > b, a, b),
        lambda a, b: torch.addcmul(a, b, a, value=0.3),
        lambda a, b: torch.lerp(a, b.to(a.dtype).expand_as(a), 0.3),
        lambda a, b: torch.atan2(a, b + 3),
    )
    return f(a, b)


@instruction(3)
def twice(m: Machine) -> Any:
    a = m.real()
    return m.pick(lambda: a * a, lambda: a + a, lambda: torch.addcmul(a, a, a), lambda: torch.stack([a, a]))()


@instruction(4)
def matmul(m: Machine) -> Any:
    a = m.shaped()
    w = m.parameters[1]
    if a.shape[-1] == 6 and m.pick(True, False):
        return F.linear(a.to(w.dtype), w, m.pick(None, m.parameters[2]))
    return a @ a.transpose(-1, -2) if a.dim() > 1 else a @ a


@instruction(4)
def reduction(m: Machine) -> Any:
    a = m.shaped()
    d = m.dim(a)
    f = m.pick(
        lambda: a.sum(d),
        lambda: a.mean(d, keepdim=True),
        lambda: a.softmax(d),
        lambda: a.log_softmax(d),
        lambda: a.logsumexp(d),
        lambda: a.cumsum(d),
        lambda: a.cumprod(d),
        lambda: a.prod(d),
        lambda: torch.linalg.vector_norm(a, dim=d),
        lambda: F.layer_norm(a, a.shape[-1:]),
        lambda: F.normalize(a, dim=d),
        lambda: a.amax(d),
        lambda: a.std(d, correction=0),
    )
    return f()


@instruction(4)
def several(m: Machine) -> Any:
    a = m.shaped()
    d = m.dim(a)
    f = m.pick(
        lambda: torch.var_mean(a, d, correction=0),
        lambda: a.max(d),
        lambda: a.sort(d),
        lambda: a.topk(1, d),
        lambda: a.median(d),
        lambda: torch.aminmax(a, dim=d),
        lambda: torch.frexp(a.detach()),
        lambda: torch._foreach_mul([a, a], m.number()),
        lambda: torch._foreach_add([a, m.real()], 1.0),
        lambda: torch.linalg.qr(a) if a.dim() == 2 and a.shape[0] >= a.shape[1] else a.unbind(d),
    )
    return f()


@instruction(2)
def joined(m: Machine) -> Any:
    a, b = m.shaped(), m.real()
    if a.shape == b.shape:
        return m.pick(torch.cat, torch.stack)([a, b], m.dim(a))
    return torch.cat([a.reshape(-1), b.reshape(-1)])[:24]


@instruction(2)
def indexed(m: Machine) -> Any:
    a = m.shaped()
    d = m.dim(a)
    i = m.index(max(1, a.shape[d]), 3)
    f = m.pick(
        lambda: a.index_select(d, i),
        lambda: a[a > 0],
        lambda: a[..., :2],
        lambda: a.take(m.index(max(1, a.numel()), 4)),
        lambda: a[m.index(a.shape[0], 2)],
        lambda: a.masked_fill(a > 0.3, 0.1),
        lambda: a.index_add(d, i, a.index_select(d, i)),
        lambda: a.nonzero(),
        lambda: F.pad(a, (1, 2)),
        lambda: a.roll(1, d),
        lambda: a.flip(d),
        lambda: a.tril() if a.dim() > 1 else a.flip(0),
    )
    return f()


@instruction(2)
def cast(m: Machine) -> Any:
    return m.real().to(m.pick(torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.float32))


@instruction(1)
def truth(m: Machine) -> Any:
    a = m.real()
    return m.pick(lambda: a > 0, lambda: (a * 5).int(), lambda: a.argsort(-1), lambda: (a > 0).to(a.dtype))()


@instruction(2)
def complex_numbers(m: Machine) -> Any:
    a = m.real()
    if a.dtype not in (torch.float32, torch.float64):
        return None
    z = torch.complex(a, a.sin())
    f = m.pick(
        lambda: torch.view_as_real(z * z.conj()),
        lambda: z.conj().imag,
        lambda: (z.conj() * 2).real,
        lambda: torch.view_as_real(z)[..., 1],
        lambda: z.mul_(1j).conj().imag.mul(2),
        lambda: z.conj().mul_(1j).abs(),
        lambda: z.conj().imag.mul_(2).sin() + z.abs(),
        lambda: z.sin().conj().copy_(z).angle().sin(),
        lambda: (z.mH @ z).abs() if z.dim() == 2 else z.abs(),
        lambda: torch.fft.fft(a).abs() if a.dim() and a.shape[-1] else a,
    )
    return f()


# ---------------------------------------------------------------------- views


@instruction(8)
def view(m: Machine) -> Any:
    a = m.shaped()
    d = m.dim(a)
    n = a.shape[d]
    start = m.choose.randrange(n) if n else 0
    f = m.pick(
        lambda: a.transpose(0, -1),
        lambda: a.reshape(-1),
        lambda: a.view(-1),
        lambda: a.narrow(d, start, n - start),
        lambda: a.select(d, start),
        lambda: a[::2],
        lambda: a.unsqueeze(0),
        lambda: a.squeeze(),
        lambda: a.unsqueeze(-1).expand(*a.shape, 2),
        lambda: a.diagonal() if a.dim() > 1 else a[:1],
        lambda: a.as_strided((2, 2), (1, 1), 0),
        lambda: a.as_strided((2,), (1,), a.storage_offset()),
        lambda: a.unfold(d, min(2, n), 1),
        lambda: a.chunk(2, d),
        lambda: a.split(1, d)[:3],
        lambda: a.unbind(d)[:3],
        lambda: [part * 1 for part in torch.unsafe_chunk(a, 2, d)],  # changing them in place is what is unsafe
        lambda: a.detach(),
        lambda: a.movedim(0, -1),
        lambda: a.flatten(),
        lambda: a.real,
        lambda: a.view_as(a),
        lambda: a.detach().view(torch.int32) if a.dtype is torch.float32 else a,
        lambda: a.contiguous(),
        lambda: a.alias() if hasattr(a, "alias") else torch.ops.aten.alias(a),
    )
    return f()


@instruction(1)
def moved_in_place(m: Machine) -> Any:
    a = m.shaped()
    f = m.pick(
        lambda: a.t_(),
        lambda: a.unsqueeze_(0),
        lambda: a.squeeze_(),
        lambda: a.transpose_(0, -1),
        lambda: a.swapaxes_(0, -1),
        lambda: a.as_strided_((2,), (1,), 0),
        lambda: a.detach_(),
    )
    return m.pick(f, lambda: a.transpose_(0, -1))() if a.dim() < 4 else None
