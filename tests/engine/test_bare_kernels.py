"""Kernels of others that leave something to keys of the dispatcher: autograd, autocast, lazy conjugation.

A dispatch mode excludes these keys in what it calls; without recomputation such a kernel finds them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.helpers.kernels import X, every_way


@pytest.fixture
def ops() -> Iterator[Any]:
    """Ops with a kernel for the CPU, and none for autograd."""
    with torch.library._scoped_library("remat_bare", "FRAGMENT") as lib:
        lib.define("product(Tensor x, Tensor w) -> Tensor")
        lib.impl("product", lambda x, w: (x.exp().sin() @ w).tanh(), "CPU")
        lib.define("noisy(Tensor x) -> Tensor")
        lib.impl("noisy", lambda x: F.dropout(x.exp().sin(), 0.5).relu_().exp(), "CPU")
        lib.define("several(Tensor[] x) -> Tensor[]")
        lib.impl("several", lambda x: [t.exp().sin() for t in x], "CPU")
        lib.define("half(Tensor(a) x) -> Tensor(a)")
        lib.impl("half", lambda x: x[:, :4], "CPU")
        lib.define("scale_(Tensor(a!) x, Tensor w) -> ()")
        lib.impl("scale_", _scale, "CPU")
        yield torch.ops.remat_bare


def _scale(x: Tensor, w: Tensor) -> None:
    x.mul_(w.sin())


@torch.library.custom_op("remat_bare_new::product", mutates_args=())
def product(x: Tensor, w: Tensor) -> Tensor:
    return (x @ w).float()


product.register_autograd(
    lambda ctx, g: (g @ ctx.saved_tensors[1].t(), ctx.saved_tensors[0].t() @ g),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


@torch.library.custom_op("remat_bare_new::adjoint", mutates_args=())
def adjoint(x: Tensor) -> Tensor:
    return torch.view_as_real(torch.complex(x, x.sin()).mH @ torch.complex(x.cos(), x)).sum(-1)


adjoint.register_autograd(
    lambda ctx, g: ctx.saved_tensors[0] @ g,
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)

In = Callable[[Any, Tensor, Any], Tensor]
"""(ops, a hidden state that depends on parameters, the net) -> another."""


def _written_through_a_view(ops: Any, h: Tensor, net: Any) -> Tensor:
    h = h.sin() * 2
    ops.half(h).mul_(2)
    return h.exp().sin()


def _written(ops: Any, h: Tensor, net: Any) -> Tensor:
    h = h * 2
    ops.scale_(h, net.a.bias)
    return h.exp().tanh()


def _several(ops: Any, h: Tensor, net: Any) -> Tensor:
    one, two = ops.several([h.sin(), h.cos()])
    return one.exp() * two.sin()


BARE: dict[str, In] = {
    "a product": lambda ops, h, net: ops.product(ops.product(h.sin(), net.a.weight).exp(), net.b.weight).sin(),
    "dropout": lambda ops, h, net: ops.noisy(h.sin()).exp().tanh(),
    "a list": _several,
    "a view": lambda ops, h, net: torch.cat([ops.half(h.sin()).exp(), ops.half(h)], 1).tanh(),
    "a write": _written,
    "a write through a view": _written_through_a_view,
}


@pytest.mark.filterwarnings("ignore:.*an autograd kernel was not registered:UserWarning")  # which plain training does
@pytest.mark.parametrize("name", BARE)
def test_autograd_follows_what_a_kernel_without_autograd_calls(name: str, ops: Any) -> None:
    def step(net: nn.Module) -> Tensor:
        h = net.get_submodule("a")(X).exp()
        return net.get_submodule("b")(BARE[name](ops, h, net)).square().mean()

    every_way(step)


@pytest.mark.filterwarnings("ignore:.*an autograd kernel was not registered:UserWarning")  # likewise
@pytest.mark.parametrize("bare", [False, True], ids=["with autograd", "without"])
def test_autocast_holds_inside(bare: bool, ops: Any) -> None:
    def step(net: nn.Module) -> Tensor:
        with torch.autocast("cpu"):
            a, b = net.get_submodule("a"), net.get_submodule("b")
            h = a(X).exp().sin().float()
            return b((ops.product if bare else product)(h, a.weight).exp()).float().square().mean()

    every_way(step)


def test_lazy_conjugation_is_resolved_inside() -> None:
    def step(net: nn.Module) -> Tensor:
        h = net.get_submodule("a")(X).exp().sin()
        return net.get_submodule("b")(adjoint(h).tanh()).square().mean()

    every_way(step)
