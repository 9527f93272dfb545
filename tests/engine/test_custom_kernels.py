"""Ops that users register with torch.library: called as often as plainly, and every bit the same."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.helpers.kernels import Calls, X, around, every_way

calls = Calls()


@pytest.fixture
def library() -> Iterator[Any]:
    """A namespace for the length of one test."""
    with torch.library._scoped_library("remat_kernels", "FRAGMENT") as lib:
        yield lib


@torch.library.custom_op("remat_kernels_new::sin", mutates_args=())
def counted_sin(x: Tensor) -> Tensor:
    calls()
    return x.sin()


counted_sin.register_autograd(
    lambda ctx, g: g * ctx.saved_tensors[0].cos(),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]),
)
counted_sin.register_fake(lambda x: torch.empty_like(x))


@torch.library.custom_op("remat_kernels_new::two", mutates_args=())
def two(x: Tensor) -> tuple[Tensor, Tensor]:
    calls()
    return x.exp(), x.mean(1)


two.register_autograd(
    lambda ctx, g, s: g * ctx.saved_tensors[0] + s[:, None] / 8 * ctx.saved_tensors[1][:, None].sign().abs(),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*output),
)


@torch.library.custom_op("remat_kernels_new::noisy", mutates_args=())
def noisy(x: Tensor) -> Tensor:
    calls()
    return x + torch.rand_like(x)


noisy.register_autograd(
    lambda ctx, g: g * ctx.saved_tensors[0],
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output),
)


@torch.library.custom_op("remat_kernels_new::stateful", mutates_args=())
def stateful(x: Tensor) -> Tensor:
    return x * calls()  # another factor each time


stateful.register_autograd(
    lambda ctx, g: g * ctx.saved_tensors[0],
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output),
)


@torch.library.custom_op("remat_kernels_new::scale_", mutates_args={"x"})
def scale_(x: Tensor, by: float) -> None:
    calls()
    x.mul_(by)


@torch.library.custom_op("remat_kernels_new::fill", mutates_args={"out"})
def fill(x: Tensor, out: Tensor) -> None:
    calls()
    np.multiply(x.numpy(), 3, out=out.numpy())


@torch.library.custom_op("remat_kernels_new::many", mutates_args=())
def many(
    xs: list[Tensor],
    y: Tensor | None,
    n: int,
    sizes: list[int],
    how: str,
    dtype: torch.dtype,
    device: torch.device,
    s: torch.types.Number,
) -> Tensor:
    calls()
    assert sizes == [4, 8]
    assert how == "sum"
    out = sum(xs[1:], xs[0] * n) * s
    return (out if y is None else out + y).to(device, dtype)


many.register_autograd(
    lambda ctx, g: ([g * ctx.saved_tensors[0], g.cos()], None, None, None, None, None, None, None),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output),
)


def written(h: Tensor) -> Tensor:
    """A mutating op between what reads the old content and what reads the new one."""
    with torch.no_grad():
        scale_(h, 0.5)
        scale_(h.t()[2:], 1.5)
    return h.sin()


def filled(h: Tensor) -> Tensor:
    outs = [torch.empty_like(h), torch.zeros(4, 8), h.detach().clone(), (h.detach() * 2)]
    for out in outs:
        fill(h.detach(), out)
    return sum((out * h for out in outs), h)


KERNELS = {
    "with autograd": lambda h: counted_sin(h).exp(),
    "of a view": lambda h: counted_sin(h.t()).t() * h,
    "a tuple": lambda h: two(h)[0] * 1.5 + two(h * 2)[1][:, None].sin(),
    "random": noisy,
    "another result each time": stateful,
    "changes its argument": written,
    "fills its argument": filled,
    "arguments of all kinds": lambda h: (
        many([h, h * 2], None, 2, [4, 8], "sum", torch.float32, torch.device("cpu"), 1.5)
        + many([h.sin(), h], h.detach() * 3, 2, [4, 8], "sum", torch.float32, torch.device("cpu"), 2)
    ),
}


@pytest.mark.parametrize("name", KERNELS)
def test_custom_ops(name: str) -> None:
    """Kept, called once, and what they write is seen."""
    every_way(around(KERNELS[name]), calls)
    assert calls.count


def test_the_old_style(library: Any) -> None:
    """Library.define and impl: a tuple with None, lists, no autograd of its own, CompositeImplicit."""
    library.define("parts(Tensor x) -> Tensor[]")
    library.define("optional(Tensor x, Tensor? y=None, *, int[2] n=1) -> (Tensor, Tensor)")
    library.define("implicit(Tensor x, Tensor y) -> Tensor")
    library.define("nothing(Tensor x) -> ()")
    library.define("add_(Tensor(a!) x, Tensor y) -> Tensor(a!)")

    def counted(function: Any) -> Any:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            calls()
            return function(*args, **kwargs)

        return wrapper

    library.impl("parts", counted(lambda x: [x * 2, x.sum(1)]), "CPU")
    library.impl("optional", counted(lambda x, y=None, *, n=(1, 1): (x * n[0], (x if y is None else y) + 1)), "CPU")
    library.impl("implicit", lambda x, y: (x * y).sin() * y.exp(), "CompositeImplicitAutograd")
    library.impl("nothing", counted(lambda x: None), "CompositeExplicitAutograd")
    library.impl("add_", counted(lambda x, y: x.add_(y)), "CPU")
    ops = torch.ops.remat_kernels

    def kernel(h: Tensor) -> Tensor:
        ops.nothing(h.detach())
        with torch.no_grad():
            parts = ops.parts(h)
            a, b = ops.optional(h, n=[2, 3])
            c = ops.optional(h, y=h * 2)[1]
            ops.add_(h, X)
        return ops.implicit(h * 1.5, parts[0]) * a + b * h + c * parts[1][:, None]

    every_way(around(kernel), calls)
    assert calls.count


def test_a_result_that_is_the_argument(library: Any) -> None:
    """Aliasing that the schema does not tell of, by an op that computes nothing."""
    library.define("itself(Tensor x) -> Tensor")
    library.define("a_part(Tensor x) -> Tensor")
    library.impl("itself", lambda x: x, "CPU")
    library.impl("a_part", lambda x: x[1:], "CPU")
    ops = torch.ops.remat_kernels

    def kernel(h: Tensor) -> Tensor:
        with torch.no_grad():
            one, other = ops.itself(h), ops.a_part(h)
        return (h * one).sin() + (other * h[:3]).cos().sum()

    every_way(around(kernel))


@pytest.mark.parametrize("how", ["aten", "numpy"])
@pytest.mark.parametrize("grad", [True, False])
def test_a_write_that_the_schema_does_not_tell_of(library: Any, how: str, grad: bool) -> None:
    """What reads the memory before sees the old content, what reads it after sees the new one."""
    library.define("sneaky(Tensor x) -> ()")

    def sneaky(x: Tensor) -> None:
        calls()
        if how == "aten":
            x.mul_(0.5)
        else:
            x.detach().numpy()[:] *= 0.5

    library.impl("sneaky", sneaky, "CPU")
    library.impl("sneaky", lambda x: None, "Meta")

    def kernel(h: Tensor) -> Tensor:
        torch.ops.remat_kernels.sneaky(torch.empty(4, device="meta"))  # of which nothing can be learned
        with torch.set_grad_enabled(grad):
            torch.ops.remat_kernels.sneaky(h.detach())
        return h.sin()

    every_way(around(kernel), calls)


def test_an_aten_op_with_a_kernel_of_the_users() -> None:
    """Somebody replaces PyTorch's own kernel by one in Python: that is user code, and not run twice."""
    with torch.library._scoped_library("aten", "IMPL") as aten:

        def silu(x: Tensor) -> Tensor:
            return torch.sigmoid(x) * x * (1 + calls() / 64)

        aten.impl("silu", silu, "CPU")
        every_way(around(lambda h: F.silu(h * 1.5) * h), calls)
        assert calls.count


def test_a_kernel_of_the_users_for_a_part_of_the_step() -> None:
    """What a library's own context manager does: outside of it, the op is PyTorch's again."""

    def silu(x: Tensor) -> Tensor:
        return torch.sigmoid(x) * x * (1 + calls() / 64)

    def kernel(h: Tensor) -> Tensor:
        before = F.silu(h * 2)
        with torch.library._scoped_library("aten", "IMPL") as aten:
            aten.impl("silu", silu, "CPU")
            h = F.silu(h * 1.5) * h
        return h * before

    every_way(around(kernel), calls)
    assert calls.count


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor, torch.quantize_per_channel and other")  # to go, some day
def test_a_script_object_as_argument() -> None:
    """Objects that the tape does not know go through."""
    packed = torch.ops.quantized.linear_prepack(torch.quantize_per_tensor(torch.eye(8), 0.1, 0, torch.qint8), None)

    def kernel(h: Tensor) -> Tensor:
        q = torch.quantize_per_tensor(h.detach(), 0.1, 0, torch.quint8)
        return torch.ops.quantized.linear(q, packed, 0.1, 0).dequantize() * h

    every_way(around(kernel))
