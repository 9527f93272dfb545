"""A dispatch mode changes what PyTorch computes in places; under the tape it is what it is without one."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from lightning_remat import Remat
from lightning_remat.engine.verify import same_bits


def recompute(op: object) -> str:
    return "recompute"


def keep(op: object) -> str:
    return "keep"


class Seen(TorchDispatchMode):
    """Writes down what comes by."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def value_and_gradient(function: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
    x = x.detach().clone().requires_grad_()
    y = function(x.neg().neg())
    (y * y.sin()).abs().sum().backward()
    assert x.grad is not None
    return y, x.grad


@pytest.mark.parametrize("policy", [recompute, keep])
def test_backward_inside_the_step_takes_the_formulas_of_plain_pytorch(policy: Any) -> None:
    """Autograd's formula for prod at zeros differs while a mode is active; the bits show it."""
    x = torch.randn(7, 33)
    x[3, 5] = 0
    plain = value_and_gradient(lambda x: x.prod(1), x)
    with Remat(policy=policy):
        value, gradient = value_and_gradient(lambda x: x.prod(1), x)
    assert same_bits(value, plain[0])
    assert same_bits(gradient, plain[1])


def test_modes_of_others_see_backward_and_the_stack_is_put_back() -> None:
    """Those entered before the tape and after it; only the tape stays outside."""
    below, above = Seen(), Seen()
    x = torch.ones(3, requires_grad=True)
    remat = Remat(policy=recompute)
    with below, remat, above:
        stack = _get_current_dispatch_mode_stack()
        loss = x.sin().sum()
        forward = len(below.names), len(above.names)
        loss.backward()
        assert _get_current_dispatch_mode_stack() == stack
    assert "aten.cos.default" in below.names[forward[0] :]
    assert "aten.cos.default" in above.names[forward[1] :]


def test_the_stack_is_put_back_when_backward_raises() -> None:
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            raise ArithmeticError("no gradient")

    with Remat(policy=recompute):
        stack = _get_current_dispatch_mode_stack()
        with pytest.raises(ArithmeticError, match="no gradient"):
            Fails.apply(torch.ones(2, requires_grad=True)).sum().backward()
        assert _get_current_dispatch_mode_stack() == stack


# PyTorch sets these on entry and exit of a mode without regard to threads.
@pytest.mark.allow_leak("dispatch mode flags")
def test_steps_on_two_threads_end_in_any_order() -> None:
    def replaced() -> tuple[Any, Any]:
        return torch.autograd._engine_run_backward, torch.autograd.graph.disable_saved_tensors_hooks

    original = replaced()
    entered, leave = threading.Event(), threading.Event()

    def step() -> None:
        with Remat(policy=recompute):
            entered.set()
            leave.wait(10)

    thread = threading.Thread(target=step)
    with Remat(policy=recompute):
        thread.start()
        entered.wait(10)
    assert all(now is not before for now, before in zip(replaced(), original, strict=True))
    leave.set()
    thread.join(10)
    assert replaced() == original


@pytest.mark.parametrize("policy", [recompute, keep, "selective"])
@pytest.mark.parametrize("function", [torch.linalg.pinv, lambda x: torch.linalg.lstsq(x, x[..., :1].conj()).solution])
def test_complex_factorisations_conjugate_what_they_call(function: Callable[[Tensor], Tensor], policy: Any) -> None:
    """Inside a mode lazy conjugation is not resolved, and pinv of a complex matrix is not its pseudo-inverse."""
    torch.use_deterministic_algorithms(True)  # fills the pivots that lstsq reads before they are written
    try:
        x = torch.randn(2, 4, 3, dtype=torch.complex64)
        plain = value_and_gradient(function, x)
        for remat in [Remat(policy=policy), Remat(policy=policy, verify=True)]:
            for _ in range(2):  # the first step keeps books
                with remat:
                    value, gradient = value_and_gradient(function, x)
                assert same_bits(value, plain[0])
                assert same_bits(gradient, plain[1])
    finally:
        torch.use_deterministic_algorithms(False)


def test_without_gradient_inside_the_step_too() -> None:
    x = torch.randn(4, 3, dtype=torch.complex64)
    plain = torch.linalg.pinv(x)
    with Remat(policy=recompute), torch.no_grad():
        assert same_bits(torch.linalg.pinv(x), plain)


@pytest.mark.parametrize("policy", [recompute, keep])
def test_bilinear_leaves_its_products_to_autocast(policy: Any) -> None:
    layer = torch.nn.Bilinear(4, 4, 5, bias=False)
    x = torch.randn(3, 4)

    def function(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return layer(x, x)

    plain = value_and_gradient(function, x)
    with Remat(policy=policy):
        value, gradient = value_and_gradient(function, x)
    assert not same_bits(value, layer(x, x))
    assert same_bits(value, plain[0])
    assert same_bits(gradient, plain[1])


def test_pinverse_stays_in_float32_under_autocast() -> None:
    x = torch.randn(4, 3)
    with torch.autocast("cpu", torch.bfloat16):
        plain = torch.pinverse(x)
        with Remat(policy=recompute):
            assert same_bits(torch.pinverse(x), plain)
