"""Code that reads and writes memory where the dispatcher does not see it: NumPy, pointers, DLPack, shared storages."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lightning_remat import Remat, ReplayError
from lightning_remat.engine.policies import KEEP_ALL, SELECTIVE, Policy
from tests.helpers.evicting import Failing, evicting, policy_tape
from tests.helpers.evicting import outcome as evicted
from tests.helpers.exact import assert_exact, assert_same, outcome, recompute_all
from tests.helpers.kernels import Calls, Net, X, around, every_way
from tests.helpers.names import named

calls = Calls()


class Doubled(torch.autograd.Function):
    """NumPy on what NumPy was handed; the result is NumPy's memory."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        calls()
        ctx.save_for_backward(x)
        return torch.from_numpy(np.tanh(x.detach().numpy()) * 2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return torch.from_numpy(g.numpy() * 2 * (1 - np.tanh(x.numpy()) ** 2))


class Copied(torch.autograd.Function):
    """Writes into a copy that an op has made."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        calls()
        out = x.clone()
        other = x * 1.0
        np.tanh(out.numpy(), out=out.numpy())
        other.numpy()[:] = out.numpy() ** 2
        ctx.save_for_backward(out, other)
        return out

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        out, other = ctx.saved_tensors
        return g * (1 - other) * out.sign().abs()


class Pointer(torch.autograd.Function):
    """Reads and writes addresses, as a kernel that is launched on pointers does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        calls()
        out = torch.empty(x.shape)
        there = (ctypes.c_float * x.numel()).from_address(x.data_ptr())
        to = (ctypes.c_float * x.numel()).from_address(out.data_ptr())
        for i, v in enumerate(there):
            to[i] = v * v
        ctx.save_for_backward(x)
        return out

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        there = (ctypes.c_float * x.numel()).from_address(x.data_ptr())
        return g * 2 * torch.tensor(list(there)).reshape(x.shape)


class InPlace(torch.autograd.Function):
    """Changes its argument, and says so to autograd."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        calls()
        array = x.detach().numpy()
        np.maximum(array, 0.1, out=array)
        ctx.mark_dirty(x)
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g * (ctx.saved_tensors[0] > 0.1)


class Negated(torch.autograd.Function):
    """The same, and autograd saves nothing of it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        array = x.detach().numpy()
        np.negative(array, out=array)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return -g


class Stateful(torch.autograd.Function):
    """Keeps what it needs itself: a mask that is no tensor, a number that is another one each time."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, by: dict[str, Any]) -> tuple[Tensor, Tensor, None]:
        ctx.mask = x.detach().numpy() > 0
        ctx.by = by["factor"] * calls()
        out = torch.zeros_like(x)
        out.numpy()[ctx.mask] = x.detach().numpy()[ctx.mask] * ctx.by
        ctx.mark_non_differentiable(marks := torch.from_numpy(ctx.mask.astype(np.float32)))
        return out, marks, None

    @staticmethod
    def backward(ctx: Any, g: Tensor, *rest: Any) -> tuple[Tensor, None]:
        return g * ctx.by * torch.from_numpy(ctx.mask), None


class Itself(torch.autograd.Function):
    """Gives back its argument, as it is."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        calls()
        ctx.save_for_backward(x, y)
        return x, y.view(-1)

    @staticmethod
    def backward(ctx: Any, g: Tensor, f: Tensor) -> tuple[Tensor, Tensor]:
        x, y = ctx.saved_tensors
        return g * x.cos(), f.view_as(y) * y


class Mapped(torch.autograd.Function):
    """In the new style, with a rule for vmap."""

    generate_vmap_rule = False

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        calls()
        return torch.from_numpy(np.sinh(x.detach().numpy()))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(inputs[0], output)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        x, out = ctx.saved_tensors
        return g * x.cosh() * (out - x.sinh() + 1)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int], x: Tensor) -> tuple[Tensor, int]:
        return Mapped.apply(x), in_dims[0]


def exchanged(h: Tensor) -> Tensor:
    """To another library and back: two tensors over one memory."""
    other = torch.from_dlpack(h.detach())
    third = torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(h.detach() * 2))
    return (h * other).sin() + other.cos() * h + third * h


def from_buffers(h: Tensor) -> Tensor:
    """Memory of Python's, and storages made by hand."""
    flat = torch.frombuffer(bytearray(h.detach().numpy().tobytes()), dtype=torch.float32).view(4, 8)
    same = torch.empty(0).set_(h.detach().untyped_storage(), 0, h.shape, h.stride())
    copied = torch.empty(0).set_(h.detach().untyped_storage().clone(), 0, h.shape, h.stride())
    return h * flat + same.sin() * h + (copied * h).cos()


def shared(h: Tensor) -> Tensor:
    """Moved into shared memory: another storage behind the same tensor."""
    other = (h.detach() * 3).share_memory_()
    return h * other + other.sin()


def listed(h: Tensor) -> Tensor:
    """Changed by an op that leaves counting to those that it calls."""
    torch._foreach_mul_([h], 0.5)
    return h


KERNELS: dict[str, Callable[[Tensor], Tensor]] = {
    "NumPy's result": Doubled.apply,
    "NumPy in a copy": Copied.apply,
    "pointers": Pointer.apply,
    "its argument, in place": lambda h: InPlace.apply(h * 1.0) * h,
    "its argument, in place, with nothing saved": lambda h: Negated.apply(h * 1.25) * h,
    "in place, after an op in place": lambda h: Negated.apply((h * 1.25).mul_(0.5)) * h,
    "in place, before an op in place": lambda h: (Negated.apply(h * 1.25).mul_(0.5) * h).add_(h).sin(),
    "in place, after a list of ops": lambda h: Negated.apply(listed(h * 1.25)) * h,
    "in place, after no_grad": lambda h: Negated.apply(torch.no_grad()(torch.relu_)(h * 1.25)) * h,
    "a part of its argument, in place": lambda h: InPlace.apply((h * 1.0)[1:]).sum() * h,
    "state that is no tensor": lambda h: (lambda o: o[0] * o[1] + h)(Stateful.apply(h, {"factor": 0.5})),
    "its argument": lambda h: Itself.apply(h, h * 2)[0] * Itself.apply(h * 3, h.sin())[1].view_as(h),
    "for vmap": lambda h: Mapped.apply(h) + torch.func.vmap(Mapped.apply)(h),
    "DLPack": exchanged,
    "buffers": from_buffers,
    "shared memory": shared,
}


@pytest.mark.parametrize("name", KERNELS)
def test_functions_that_nobody_sees_into(name: str) -> None:
    """Kept, or computed again from what it was made of; never called a second time."""
    every_way(around(KERNELS[name]), calls)


def read_before(net: nn.Module) -> Tensor:
    h = net.a(X) * 1.5
    before = (h + 1).sin()
    return (net.b(InPlace.apply(h)) * before * (h * 2).cos()).sin().sum()


def test_a_value_that_is_changed_in_place_after_it_was_read() -> None:
    """Where it is computed again, what was recorded before finds the old content, and what came later the new one."""
    assert_exact(Net(), read_before, recompute_all)


def test_a_kept_value_that_is_changed_in_place_after_it_was_read() -> None:
    """The old content is gone, and nobody could see it coming: refused, and never computed from the new one."""
    remat = Remat(policy=lambda op: "keep" if "aten.mul" in op.name else "recompute")
    with pytest.raises(ReplayError, match=r"a kernel in an autograd\.Function"):
        outcome(Net(), read_before, remat)


def test_what_autograd_had_saved_before_is_refused() -> None:
    """With the words of plain PyTorch, where the value was dropped as well as where it was kept."""

    def step(net: nn.Module) -> Tensor:
        h = net.a(X) * 1.5
        return (h.sin() * InPlace.apply(h)).sum()

    for remat in (None, Remat(policy=recompute_all), Remat(policy="selective"), Remat(policy=lambda op: "keep")):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            outcome(Net(), step, remat)


def test_a_write_that_autograd_is_told_of() -> None:
    """NumPy writes, and the version counter is moved by hand."""

    def step(net: nn.Module) -> Tensor:
        g = (net.a(X) * 1.5).neg()
        before = g.exp()
        memory = g.detach().numpy()
        memory[:, ::2] *= 0.5
        torch.autograd.graph.increment_version(g)
        return net.b(before * g.sin() + (g * 2).cos()).sin().sum()

    assert_exact(Net(), step, recompute_all)


@pytest.mark.parametrize("policy", [recompute_all, "selective"], ids=named)
def test_counters_of_other_tensors_over_the_same_memory(policy: Any) -> None:
    """.data counts for itself: that its counter lags behind is no write."""

    def step(net: nn.Module) -> Tensor:
        h = (net.a(X) * 1.5).relu_()
        g = h.data * 2
        return (net.b(h) * g * h.data.sin()).sin().sum()

    remat = assert_exact(Net(), step, policy)
    assert remat.stats.replayed_ops > 0


class Unseen(nn.Module):
    """Kept values that are written to by code that nobody sees."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        g = (self.a(x) * 1.5).square()
        h = Negated.apply(g)
        return self.b((h * 2).cos()).sin().sum()


@pytest.mark.parametrize("policy", [KEEP_ALL, SELECTIVE], ids=["keep", "selective"])
def test_what_was_written_so_is_not_made_from_its_op_when_memory_runs_out(policy: Policy) -> None:
    """All that can be computed again is dropped before backward; the op that made the memory did not make this."""
    torch.manual_seed(0)
    model = Unseen()
    tape = policy_tape(policy)
    eviction = evicting(tape)
    plain = evicted(model, X, None, Failing())
    ours = evicted(model, X, tape, Failing(), before_backward=lambda: eviction.make_room(1 << 60) and None)
    assert_same(plain, ours)
    assert eviction.evictions > 0
