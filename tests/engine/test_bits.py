"""Lazy conjugation and negation: a bit on the tensor that is neither in its storage nor in its geometry."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_remat import Remat
from lightning_remat.engine.verify import same_bits


def recompute(op: object) -> str:
    return "recompute"


def gradient(x: Tensor) -> Tensor:
    x = x.detach().clone().requires_grad_()
    y = x.exp()
    (y.conj() @ y.mT.conj().sin()).imag.square().sum().backward()
    assert x.grad is not None
    return x.grad


def test_every_tape_of_a_context_carries_them() -> None:
    """The first step keeps books on a tape of its own; the ones after it must not rely on what that one has seen."""
    x = torch.randn(3, 3, dtype=torch.complex64)
    plain = gradient(x)
    remat = Remat(policy=recompute)
    for _ in range(3):
        with remat:
            loss_gradient = gradient(x)
        assert same_bits(loss_gradient, plain)


def test_a_bit_set_before_the_step_is_carried() -> None:
    weight = torch.randn(3, 3, dtype=torch.complex64).conj()
    x = torch.randn(3, 3, dtype=torch.complex64)

    def gradient(x: Tensor) -> Tensor:
        x = x.detach().clone().requires_grad_()
        y = (x.exp() @ weight).exp()
        y.abs().sum().backward()
        assert x.grad is not None
        return x.grad

    plain = gradient(x)
    remat = Remat(policy=recompute)
    for _ in range(3):
        with remat:
            again = gradient(x)
        assert same_bits(again, plain)
