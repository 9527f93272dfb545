"""In-place ops: a new value of the same storage, whatever was dropped before and whoever still looks at it."""

import contextlib
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lightning_remat import Remat, ReplayError
from tests.helpers.exact import assert_exact, outcome, recompute_all
from tests.helpers.names import named


class Net(nn.Module):
    """Two linear layers; what happens in between is the test's."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.a = nn.Linear(width, width)
        self.b = nn.Linear(width, width)


X = torch.linspace(-1, 1, 32).reshape(4, 8)


def test_inplace_on_a_dropped_value() -> None:
    """conv → norm → in-place ReLU, and arithmetic in place: the old value is gone, its ops are not."""

    def step(net: Net) -> torch.Tensor:
        h = net.a(X).mul(1.5)
        h.relu_()
        h = net.b(h)
        h.add_(1).mul_(0.5)
        return h.sin().sum()

    remat = assert_exact(Net(), step)
    assert remat.stats.replayed_ops > 0


def test_old_and_new_content_are_both_needed() -> None:
    """A recorded op read the value before it was changed, another after: each gets its own."""

    def step(net: Net) -> torch.Tensor:
        h = net.a(X) * 2
        before = (h + 1).sin()
        h.add_(3)
        after = (h * 2).cos()
        return net.b(before * after).exp().sum()

    assert_exact(Net(), step)


def test_write_through_a_view_of_a_dropped_base() -> None:
    """x[:, 0] = 0 and h[...] += y: the new value is of the whole storage, and is written through the view."""

    def step(net: Net) -> torch.Tensor:
        h = net.a(X) * 2
        h[:, 0] = 0
        h[1:3] += net.b(X)[1:3]
        h.view(2, 16)[1].mul_(0.5)
        h.t()[2].sin_()
        return (net.b(h) * h).sin().sum()

    assert_exact(Net(), step)


def test_write_to_a_leaf_that_recorded_ops_have_read() -> None:
    """A buffer (a code book, a power iteration's vector) changes after it was used: replay sees what forward saw."""

    class Book(Net):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("book", torch.linspace(0, 1, 8))

    def step(net: Book) -> torch.Tensor:
        h = net.a(X) + net.book  # neither addition saves the book itself
        g = (h - net.book).sin()
        with torch.no_grad():
            net.book.mul_(0.9).add_(h.mean(0), alpha=0.1)
        return net.b(g * 2).sin().sum() + (h * net.book.clone()).sum()

    assert_exact(Book(), step)


def test_write_to_a_parameter_inside_the_step() -> None:
    """Two optimizers in one step: a weight changes while values computed from the old one are still to be replayed."""

    def step(net: Net) -> torch.Tensor:
        first = net.a(X * 2).mul(0.3).sin().mul(2)  # its backward needs the sin's input, not the weight
        with torch.no_grad():
            net.a.weight.add_(0.5)
            net.a.bias.copy_(net.b.bias)
        second = net.b(X).sum()
        return first.sum() + second

    assert_exact(Net(), step, recompute_all)


def test_write_under_no_grad_to_a_dropped_value() -> None:
    """What a no_grad block writes stays: the content becomes a leaf."""

    def step(net: Net) -> torch.Tensor:
        h = net.a(X) * 2
        with torch.no_grad():
            h.clamp_(-0.5, 0.5)
        return (net.b(h * 3) * h).sum()

    assert_exact(Net(), step)


def test_out_argument() -> None:
    """out= writes, and may resize; the result is kept."""

    def step(net: Net) -> torch.Tensor:
        buffer = torch.zeros(4, 8)
        with torch.no_grad():
            torch.mul(X, 3, out=buffer)
        return net.b(net.a(buffer).sin() * buffer).sum()

    assert_exact(Net(), step)


def test_index_put_and_scatter() -> None:
    """Masked assignment and index_add_ into a dropped value, and into zeros."""

    def step(net: Net) -> torch.Tensor:
        h = net.a(X) * 2
        h[X > 0.5] = 0.25
        out = torch.zeros_like(h)
        out.index_add_(0, torch.tensor([0, 2, 2, 3]), h.sin())
        return net.b(out * h).sin().sum()

    assert_exact(Net(), step)


@pytest.mark.parametrize("policy", [recompute_all, "full", "selective", "none"], ids=named)
def test_the_error_of_plain_pytorch_is_kept(policy: object) -> None:
    """Changing a saved tensor in place raises in backward, as without us."""

    def step(net: Net) -> torch.Tensor:
        h = (net.a(X) * 2).sigmoid()  # saves its output
        h.add_(1)
        return h.sum()

    for remat in (None, Remat(policy=policy)):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            outcome(Net(), step, remat)


@pytest.mark.parametrize("policy", [None, "full", "selective"])
def test_changing_an_output_after_the_step(policy: str | None) -> None:
    """The same where the change comes after the context has been left."""
    net = nn.Sequential(nn.Linear(8, 8), nn.Sigmoid())
    with Remat(policy=policy) if policy else contextlib.nullcontext():
        out = net(X)
    with torch.no_grad():
        out.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_an_input_changed_outside_the_step_is_refused() -> None:
    """An optimizer step between forward and backward, outside the context: never a silently wrong gradient."""
    net = Net()
    with Remat(policy=recompute_all):
        loss = (net.a(X) * 0.3).sin().sum()
    with torch.no_grad():
        net.a.weight.add_(1)
    with pytest.raises(ReplayError, match="outside the recorded step"):
        loss.backward()


def test_a_parameter_replaced_outside_the_step_is_refused() -> None:
    """param.data = ... between forward and backward."""
    net = Net()
    with Remat(policy=recompute_all):
        loss = (net.a(X) * 0.3).sin().sum()
    net.a.weight.data = torch.zeros(8, 8)
    with pytest.raises(ReplayError, match="replaced"):
        loss.backward()


def test_inplace_takes_memory_over() -> None:
    """conv → norm → in-place ReLU is replayed in the memory of the old value: no copy, so no more than out of place."""
    copies = []
    import lightning_remat.engine.replay as replay

    original = replay.storage_copy

    def counted(tensor: torch.Tensor) -> torch.Tensor:
        copies.append(tensor.shape)
        return original(tensor)

    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Conv2d(4, 4, 3))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replay, "storage_copy", counted)
        with Remat(policy=lambda op: "keep" if "convolution" in op.name else "recompute") as remat:
            loss = net(torch.ones(2, 3, 8, 8)).square().sum()
        loss.backward()
    assert remat.stats.replayed_ops > 0
    # The normalised values are not needed by anybody but the ReLU.
    assert copies == []


def test_functional_inplace_dropout_and_activation() -> None:
    """nn.functional's inplace=True variants."""

    def step(net: Net) -> torch.Tensor:
        h = F.dropout(net.a(X) * 1.0, 0.4, True, inplace=True)
        h = F.leaky_relu(h * 1.0, 0.1, inplace=True)
        h = F.hardtanh_(net.b(h) * 1.0)
        return h.square().sum()

    assert_exact(Net(), step)


def test_a_list_of_one_tensor_is_changed_in_place() -> None:
    """torch._foreach_mul_([h], ...) has a list where other in-place ops have the tensor."""

    def step(net: Net) -> torch.Tensor:
        h = net.a(X) * 2
        before = (h + 1).sin()
        torch._foreach_mul_([h], 1.5)
        torch._foreach_add_([h.view(-1)], 0.25)
        return net.b(before * (h * 2).cos()).sin().sum()

    assert_exact(Net(), step)


@pytest.mark.parametrize("policy", [None, recompute_all, lambda op: "keep"], ids=["plain", "recompute", "keep"])
@pytest.mark.parametrize("name", ["_foreach_mul_", "_foreach_copy_", "_foreach_zero_"])
def test_changes_to_lists_are_counted(name: str, policy: Any) -> None:
    """Foreach ops leave version counters to the ops they call, which have to count inside the step as well."""
    arguments: dict[str, tuple[Any, ...]] = {"_foreach_mul_": (2.0,), "_foreach_copy_": ([X, X],)}
    leaf = X.clone().requires_grad_()
    with contextlib.nullcontext() if policy is None else Remat(policy=policy):
        h, other = leaf * 2, torch.zeros(4, 8)
        loss = h.sin().sum()
        with torch.no_grad():
            getattr(torch, name)([h, other], *arguments.get(name, ()))
    assert h._version == other._version == 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_write_through_a_lazy_bit() -> None:
    """Filling a conjugated view stores the conjugate, and a replay has to do the same."""

    def step(net: Net) -> torch.Tensor:
        z = torch.complex(net.a(X) * 2, net.b(X))
        first = (z * 2).conj().mul_(1j)
        second = (z * 3).conj().copy_(z.sin())
        third = torch._neg_view((z * 1.5).detach()).copy_(z * 0.5)
        return (first.abs() + second.angle().sin() + (third * second).abs()).sum()

    assert_exact(Net(), step)


def test_an_in_place_op_that_fails_half_way() -> None:
    """An index that is out of range after one that is not: what has been written stays, and the user goes on."""

    def step(net: Net) -> torch.Tensor:
        h = net.a(X) * 2
        before = (h + 1).sin()
        with pytest.raises(IndexError):
            h.index_put_((torch.tensor([1, 9]),), torch.tensor(0.3), accumulate=True)
        return net.b(before * (h * 2).cos()).sin().sum()

    assert_exact(Net(), step)
