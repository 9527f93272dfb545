"""In-place ops that write no byte: `unsqueeze_`, `t_` and their like change how a tensor shows its storage."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_remat import Remat, ReplayError
from lightning_remat.engine.verify import same_bits
from tests.helpers.exact import EVERYTHING

MOVES: dict[str, Callable[[Tensor], Tensor]] = {
    "unsqueeze_": lambda t: t.unsqueeze_(0),
    "squeeze_": lambda t: t.unsqueeze_(0).squeeze_(0),
    "t_": lambda t: t.t_(),
    "transpose_": lambda t: t.transpose_(0, 1),
    "swapaxes_": lambda t: t.swapaxes_(0, 1),
    "as_strided_": lambda t: t.as_strided_((3, 2), (2, 1), 1),
}


def recompute(op: object) -> str:
    return "recompute"


@pytest.mark.parametrize("name", MOVES)
@pytest.mark.parametrize("computed", [True, False], ids=["dropped", "kept"])
def test_a_moved_tensor_goes_on_as_the_same_value(name: str, computed: bool) -> None:
    """What was recorded before the move and what comes after both find the content, under their own geometry."""

    def gradient() -> Tensor:
        x = torch.arange(12.0).reshape(4, 3).requires_grad_()
        t = x * 2 if computed else torch.zeros(4, 3) + 2
        before = x + t  # does not save t, but is computed from it
        moved = MOVES[name](t)
        loss = (before * before.sin()).sum() + (moved * moved.cos() * x.sum()).sum()
        loss.backward()
        assert x.grad is not None
        return x.grad

    plain = gradient()
    remat = Remat(policy=recompute)
    for _ in range(2):
        with remat:
            again = gradient()
        assert same_bits(again, plain)
    assert remat.stats.replayed_ops > 0


@pytest.mark.parametrize("name", MOVES)
@pytest.mark.parametrize("what", ["batch", "view", "parameter", "data"])
def test_a_leaf_is_moved_after_it_was_read(name: str, what: str) -> None:
    """A batch that is unsqueezed, say: its version counter moves after the op, and no byte has changed."""

    def gradient() -> Tensor:
        x = torch.arange(12.0).reshape(4, 3).requires_grad_()
        leaf = torch.linspace(-1, 1, 12).reshape(4, 3)
        if what == "parameter":
            leaf = torch.nn.Parameter(leaf, requires_grad=False)
        before = ((x * 2 + leaf) * 0.5).sin()
        with torch.no_grad():
            moved = MOVES[name]({"view": leaf.view(4, 3), "data": leaf.data}.get(what, leaf))
        loss = before.square().sum() + (moved.detach() * 2).cos().sum() * x.sum()
        loss.backward()
        assert x.grad is not None
        return x.grad

    plain = gradient()
    remat = Remat(policy=recompute)
    for _ in range(2):
        with remat:
            again = gradient()
        assert same_bits(again, plain)
    assert remat.stats.replayed_ops > 0


def test_a_change_after_the_move_is_still_seen() -> None:
    x, leaf = torch.ones(4, 3, requires_grad=True), torch.ones(4, 3)
    with Remat(policy=recompute):
        loss = ((x * 2 + leaf) * 0.5).sin().sum()
        leaf.t_()
    leaf.mul_(2)
    with pytest.raises(ReplayError, match="outside the recorded step"):
        loss.backward()


@pytest.mark.parametrize("inside", [False, True])
def test_moving_what_autograd_has_saved_is_refused_as_in_plain_pytorch(inside: bool) -> None:
    x = torch.ones(3, requires_grad=True)
    with Remat(policy=recompute):
        t = x.exp()
        loss = (t * t).sum()
        t.unsqueeze_(0)
        if inside:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()
    if not inside:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@pytest.mark.parametrize("name", MOVES)
def test_what_is_saved_after_the_move_is_not_to_blame(name: str) -> None:
    """Saved, moved, saved again: plain PyTorch refuses the first use only, and here nobody asks for its gradient."""

    def gradient() -> Tensor:
        x = torch.arange(12.0).reshape(4, 3).requires_grad_()
        t = x * 0.5
        unused = t.sin()
        moved = MOVES[name](t)
        loss = (moved * moved.cos() * x.sum()).sum()
        loss.backward()
        assert unused.requires_grad
        assert x.grad is not None
        return x.grad

    plain = gradient()
    remat = Remat(policy=recompute)
    for _ in range(2):
        with remat:
            again = gradient()
        assert same_bits(again, plain)


@pytest.mark.parametrize("offload", [None, EVERYTHING], ids=["stays", "leaves"])
def test_a_move_that_fails_has_changed_nothing(offload: Any) -> None:
    """What was read and what was saved are what they were, under the version that they had."""

    def gradient() -> Tensor:
        x = torch.arange(12.0).reshape(4, 3).requires_grad_()
        leaf = torch.linspace(-1, 1, 12).reshape(4, 3)
        y = ((x * 2 + leaf) * 0.5).exp()
        with pytest.raises(IndexError, match="out of range"):
            leaf.unsqueeze_(7)
        with pytest.raises(RuntimeError, match="out of bounds"):
            leaf.as_strided_((9, 9), (3, 1))
        with pytest.raises(IndexError, match="out of range"):
            y.unsqueeze_(7)
        (y * y).sum().backward()
        assert x.grad is not None
        return x.grad

    plain = gradient()
    remat = Remat(policy=recompute if offload is None else "offload_only", offload=offload)
    for _ in range(2):
        with remat:
            again = gradient()
        assert same_bits(again, plain)
    remat.close()
