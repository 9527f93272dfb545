"""Random programs of tensor ops, run plainly and under every policy: whatever is not equal bit for bit is a fault.

A program is a row of small instructions over a list of tensors: arithmetic, views, in-place ops on whatever is there,
random ops, reductions, ops with several outputs, custom functions, parts under ``no_grad``, gradients asked for on the
way. What an instruction does follows from its own seed and from the shapes it finds, so the same program does the same
under any policy, and instructions can be left out one by one to make a failing program short.

``python -m tests.engine.fuzz --programs 20000 --first 0`` looks further than the suite does.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_remat import Remat
from lightning_remat.engine.verify import same_bits
from tests.helpers.exact import recompute_all

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


# ---------------------------------------------------------------------- programs


class Block(nn.Module):
    """A stretch of the program."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self.part = nn.Linear(2, 2, bias=False)

    def forward(self, tensors: list[Tensor], machine: Machine, positions: list[int]) -> list[Tensor]:
        machine.tensors = tensors
        for position in positions:
            machine.run(position)
        return machine.tensors


class Program(nn.Module):
    """A program as a model of several blocks."""

    def __init__(self, seed: int, positions: Sequence[int]) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.p = nn.Parameter(torch.randn(4, 6) * 0.5)
        self.q = nn.Parameter(torch.randn(6, 6) * 0.5)
        self.r = nn.Parameter(torch.randn(6) * 0.5)
        self.register_buffer("b", torch.randn(6))
        self.blocks = nn.ModuleList(Block(i) for i in range(BLOCKS))
        self.machine = Machine(seed, [self.p, self.q, self.r], [self.b])
        self.positions = list(positions)

    def forward(self) -> tuple[Tensor, list[Tensor]]:
        m = self.machine
        m.start()
        tensors = m.tensors
        for number, block in enumerate(self.blocks):
            mine = [i for i in self.positions if i % (BLOCKS + 1) == number]
            tensors = block(tensors, m, mine)
        m.tensors = tensors
        for i in self.positions:
            if i % (BLOCKS + 1) == BLOCKS:
                m.run(i)
        loss = torch.zeros((), dtype=torch.float64)
        for t in m.tensors:
            if t.requires_grad:
                try:
                    loss = loss + t.to(torch.float64).nan_to_num(0, 1, -1).clamp(-9, 9).sin().sum()
                except RuntimeError as error:  # a view of several whose base was changed
                    m.events.append(type(error).__name__)
        return loss + self.p.sum(), m.extra_losses


class Result:
    """Everything that can be seen from outside."""

    def __init__(self) -> None:
        self.events: list[Any] = []
        self.tensors: list[Tensor] = []
        self.raised_in_backward = False

    def add(self, tensor: Tensor | None) -> None:
        self.tensors.append(torch.tensor([]) if tensor is None else tensor.detach().clone().resolve_conj())


def run_program(seed: int, positions: Sequence[int], remat: Remat | None, steps: int = 2) -> Result:
    """Run a program for some steps."""
    program = Program(seed, positions)
    torch.manual_seed(seed)
    result = Result()
    for _ in range(steps):
        try:
            if remat is None:
                loss, extra = program()
            else:
                with remat:
                    loss, extra = program()
        except BackwardError as error:
            result.raised_in_backward = True
            result.events += [list(program.machine.events), f"on the way: {error.__cause__!r}"]
            break
        result.events.append(list(program.machine.events))
        for t in program.machine.tensors:
            result.add(t)
        result.add(loss)
        try:
            if extra and extra[0].requires_grad:
                extra[0].sum().backward(retain_graph=True)
            loss.backward()
        except RuntimeError as error:
            result.raised_in_backward = True
            result.events.append(f"backward: {type(error).__name__}: {error}")
            break
        result.add(torch.get_rng_state())
        for p in program.parameters():
            result.add(p.grad)
        for t in program.machine.tensors:
            result.add(t.grad if t.retains_grad else None)
        result.add(program.b)
    return result


POLICIES: dict[str, Any] = {
    "all": recompute_all,
    "full": "full",
    "every:2": "every:2",
    "sqrt": "sqrt",
    "selective": "selective",
    "map": {"blocks.1": recompute_all, "blocks.*": "selective"},
    "half": lambda op: "keep" if hash((op.name, op.bytes)) % 2 and len(op.name) % 2 else "recompute",
}


def difference(plain: Result, other: Result) -> str | None:
    """What is wrong with ``other``, or None."""
    if plain.raised_in_backward:
        if other.raised_in_backward:
            return None
        # It may give a value instead; up to there everything has to agree.
    elif other.raised_in_backward:
        return f"raised: {other.events[-1]}"
    for i, (a, b) in enumerate(zip(plain.events, other.events, strict=False)):
        for x, y in zip(a, b, strict=False) if isinstance(a, list) and isinstance(b, list) else ():
            if x != y:
                return f"events of step {i}: {x} | {y}"
    for i, (a, b) in enumerate(zip(plain.tensors, other.tensors, strict=False)):
        if not same_bits(a, b):
            return f"tensor {i}: {a} and {b}"
    return None


def check(seed: int, positions: Sequence[int], policies: Sequence[str]) -> str | None:
    """Run one program under the policies; the first fault found, or None."""
    plain = run_program(seed, positions, None)
    if difference(plain, run_program(seed, positions, None)) is not None:
        return None  # not repeatable: nothing can be said
    for name in policies:
        blocks = "blocks.*" if name in ("full", "every:2", "sqrt") else None
        try:
            other = run_program(seed, positions, Remat(policy=POLICIES[name], blocks=blocks))
        except Exception as error:  # nothing but what plain PyTorch raises may come out
            return f"{name}: {type(error).__name__}: {error}"
        wrong = difference(plain, other)
        if wrong is not None:
            return f"{name}: {wrong}"
    return None


def shortened(seed: int, policy: str) -> list[int]:
    """The instructions that it takes."""
    positions = list(range(LENGTH))
    step = 8
    while step:
        i = 0
        while i < len(positions):
            fewer = positions[:i] + positions[i + step :]
            if check(seed, fewer, [policy]) is not None:
                positions = fewer
            else:
                i += step
        step //= 2
    return positions


def main() -> int:
    """Look for programs that fail, and print them shortened."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--programs", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=1e9)
    parser.add_argument("--policies", nargs="*", default=list(POLICIES))
    options = parser.parse_args()
    torch.set_num_threads(1)
    start, failures, done = time.perf_counter(), 0, 0
    for seed in range(options.first, options.first + options.programs):
        if time.perf_counter() - start > options.seconds or failures >= 8:
            break
        done += 1
        fault = check(seed, range(LENGTH), options.policies)
        if fault is None:
            continue
        failures += 1
        policy = next(p for p in POLICIES if fault.startswith(f"{p}: "))
        positions = shortened(seed, policy)
        print(f"--- seed {seed}, positions {positions}\n{check(seed, positions, [policy])}")
        for line in run_program(seed, positions, None, steps=1).events[0]:
            print("   ", line)
        sys.stdout.flush()
    print(f"{done} programs, {failures} failed, {time.perf_counter() - start:.0f} s")
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
