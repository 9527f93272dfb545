"""Ops that take functions, and models that are graphs: what goes into them runs once, and every bit is the same."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn import functional as F
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.utils.checkpoint import checkpoint

from tests.helpers.kernels import Calls, X, around, every_way

calls = Calls()


def heads(h: Tensor) -> Tensor:
    return h.reshape(1, 2, 4, 4)


def causal(b: Any, h: Any, q: Any, k: Any) -> Any:
    return q >= k


def flex(h: Tensor) -> Tensor:
    """On the CPU it has no backward uncompiled."""
    q = heads(h.detach())
    mask = create_block_mask(causal, 1, 1, 4, 4, device="cpu", BLOCK_SIZE=4)
    out = flex_attention(q, q.sin(), q * 2, score_mod=lambda s, b, h, q, k: s + (q - k), block_mask=mask)
    return F.dropout(out, 0.3).reshape(4, 8) * h


def cond(h: Tensor) -> Tensor:
    return torch.cond(h.sum() > 0, lambda x: x.sin() * 2, lambda x: x.cos(), (h,)) * h


def while_loop(h: Tensor) -> Tensor:
    from torch._higher_order_ops.while_loop import while_loop

    _, x = while_loop(lambda i, x: i < 3, lambda i, x: (i + 1, x.sin()), (torch.tensor(0), h.detach()))
    return x * h


def scan(h: Tensor) -> Tensor:
    from torch._higher_order_ops.scan import scan

    last, ys = scan(lambda c, x: (c * 0.5 + x, c.sin()), h[0].clone(), h)
    return ys * last


def associative_scan(h: Tensor) -> Tensor:
    from torch._higher_order_ops.associative_scan import associative_scan

    return associative_scan(lambda x, y: x * 0.5 + y, h.detach(), 0, combine_mode="generic") * h


def mapped(h: Tensor) -> Tensor:
    from torch._higher_order_ops.map import map as map_

    return map_(lambda x, y: x.sin() * y, h, h[0].clone())


def gradient(h: Tensor) -> Tensor:
    return torch.func.grad(lambda x: (x * 1.5).sin().square().sum())(h) * h


def jvp(h: Tensor) -> Tensor:
    out, tangent = torch.func.jvp(lambda x: (x * 1.5).sin(), (h,), (h.detach() * 2,))
    return out * tangent


def vmapped(h: Tensor) -> Tensor:
    return torch.func.vmap(lambda x: (x * x.sum()).sin())(h) * torch.func.vmap(
        torch.func.grad(lambda x: x.exp().sum())
    )(h)


def functional(h: Tensor) -> Tensor:
    net = nn.Linear(8, 8, bias=False)
    return torch.func.functional_call(net, {"weight": h.t() @ h}, (h,)).sin()


def checkpointed(h: Tensor) -> Tensor:
    def part(x: Tensor) -> Tensor:
        return F.dropout((x * 1.5).sin(), 0.3) * x

    return checkpoint(part, h, use_reentrant=False) + checkpoint(part, h * 2, use_reentrant=True)


def grad_mode(h: Tensor) -> Tensor:
    from torch._higher_order_ops.wrap import wrap_with_autocast, wrap_with_set_grad_enabled

    fixed = wrap_with_set_grad_enabled(False, lambda x: x.sin() * 2, h)
    with_autocast = wrap_with_autocast("cpu", torch.bfloat16, True, False, lambda x: x @ x.t(), h)
    return fixed * h + with_autocast.float() @ h


def subgraph(h: Tensor) -> Tensor:
    @torch.compiler.nested_compile_region
    def part(x: Tensor) -> Tensor:
        return (x * 1.5).sin() * x

    return part(h) + part(h * 2)


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        with torch.no_grad():
            self.inner.weight.copy_(torch.linspace(-0.4, 0.4, 64).view(8, 8))
            self.inner.bias.zero_()

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(self.inner(x) * 1.5).sin() * x


def exported(h: Tensor) -> Tensor:
    return EXPORTED(h)


def graph_module(h: Tensor) -> Tensor:
    return GRAPH(h)


with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # TorchScript is to go
    SCRIPTED = torch.jit.script(Small())
    TRACED = torch.jit.trace(Small(), X)
EXPORTED = torch.export.export(Small(), (X,)).module()
GRAPH = torch.fx.symbolic_trace(Small())

OPS: dict[str, Callable[[Tensor], Tensor]] = {
    "flex_attention": flex,
    "cond": cond,
    "while_loop": while_loop,
    "scan": scan,
    "associative_scan": associative_scan,
    "map": mapped,
    "func.grad": gradient,
    "func.jvp": jvp,
    "func.vmap": vmapped,
    "functional_call": functional,
    "checkpoint": checkpointed,
    "grad mode and autocast": grad_mode,
    "nested_compile_region": subgraph,
    "export": exported,
    "fx": graph_module,
    "script": lambda h: SCRIPTED(h),
    "trace": lambda h: TRACED(h),
}


@pytest.mark.filterwarnings("ignore:.*flex_attention called without torch.compile")  # uncompiled on purpose
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # Dynamo's look at what is no leaf
@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")  # to go, and still in PyTorch's own code
@pytest.mark.filterwarnings("ignore:torch.func transforms do not support saved-tensor hooks")  # what we say of it
@pytest.mark.parametrize("name", OPS)
def test_higher_order(name: str) -> None:
    if name in ("script", "trace"):
        for _ in range(4):  # TorchScript's executor compiles anew in its first calls
            (OPS[name](X.clone().requires_grad_()).sum()).backward()
    every_way(around(OPS[name]), calls)


@torch.library.custom_op("remat_higher::sin", mutates_args=())
def counted_sin(x: Tensor) -> Tensor:
    calls()
    return x.sin()


counted_sin.register_fake(torch.empty_like)
counted_sin.register_autograd(
    lambda ctx, g: g * ctx.saved_tensors[0].cos(),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]),
)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # Dynamo's look at what is no leaf
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_custom_op_in_a_compiled_function(backend: str) -> None:
    """In one graph, and called as often as without us."""
    graphs = CompileCounterWithBackend(backend)

    @torch.compile(fullgraph=True, backend=graphs)
    def part(h: Tensor) -> Tensor:
        return (counted_sin(h * 2) * h).exp()

    every_way(around(part), calls)
    assert calls.count
    assert graphs.frame_count == 1


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # Dynamo's look at what is no leaf
def test_compiled_flex_attention() -> None:
    """With a function of scores and a mask; it has a backward where it is compiled for a GPU only."""
    compiled = torch.compile(flex_attention, fullgraph=True, backend="aot_eager")
    mask = create_block_mask(causal, 1, 1, 4, 4, device="cpu", BLOCK_SIZE=4)

    def kernel(h: Tensor) -> Tensor:
        q = heads(h.detach())
        out = compiled(q, q.sin(), q * 2, score_mod=lambda s, b, h, q, k: s + (q - k), block_mask=mask)
        return F.dropout(out, 0.3).reshape(4, 8) * h

    every_way(around(kernel))
