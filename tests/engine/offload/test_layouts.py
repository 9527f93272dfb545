"""What comes back is what had left, in every bit and in its layout; and a storage moves once, whatever looks at it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from lightning_remat import Remat
from lightning_remat.engine.verify import same_bits
from tests.helpers.exact import EVERYTHING, assert_exact, recompute_all
from tests.helpers.names import named

WIDE = 60  # elements of the tensor that all of these are made of
Make = Callable[[Tensor], list[Tensor]]
"""What is saved, of a fresh storage that holds ``WIDE`` elements."""


def _real(*makes: Callable[[Tensor], Tensor]) -> Make:
    return lambda x: [make(x) for make in makes]


MADE: dict[str, Make] = {
    "as it is": _real(lambda x: x),
    "transposed": _real(lambda x: x.view(6, 10).t()),
    "permuted": _real(lambda x: x.view(3, 4, 5).permute(2, 0, 1)),
    "channels last": _real(lambda x: x.view(1, 5, 4, 3).permute(0, 3, 1, 2)),
    "expanded": _real(lambda x: x.view(60, 1).expand(60, 50)),
    "expanded scalar": _real(lambda x: x[7].expand(8, 9)),
    "overlapping": _real(lambda x: x.as_strided((7, 5), (3, 2), 4)),
    "unfolded": _real(lambda x: x.unfold(0, 7, 3)),
    "one row of many": _real(lambda x: x.view(10, 6)[7]),
    "every second, from the third": _real(lambda x: x[3::2]),
    "diagonal": _real(lambda x: x[:49].view(7, 7).diagonal(1)),
    "several views": _real(lambda x: x[:20], lambda x: x[10:40].view(5, 6).t(), lambda x: x.view(60, 1).expand(60, 3)),
    "no dimension": _real(lambda x: x[5]),
    "no element": _real(lambda x: x[:0], lambda x: x[60:].view(0, 4), lambda x: x),
    "as integers": _real(lambda x: x.detach().view(torch.int16), lambda x: x),
    "as bytes, shifted": _real(lambda x: x.detach()[3:8].view(torch.uint8), lambda x: x.detach()[1]),
    "one number, odd strides": _real(lambda x: x.as_strided((1, 1), (17, 5), 59)),
}
COMPLEX: dict[str, Make] = {
    "complex": _real(lambda z: z),
    "conjugate": _real(lambda z: z.conj()),
    "conjugate transposed": _real(lambda z: z.view(6, 10).mH),
    "imaginary part of a conjugate": _real(lambda z: z.conj().imag, lambda z: z.imag, lambda z: z),
    "as real": _real(lambda z: torch.view_as_real(z), lambda z: torch.view_as_real(z)[..., 1]),
    "real and imaginary": _real(lambda z: z.real[5:], lambda z: z.imag[::3]),
    "negative view": _real(lambda z: torch._neg_view(z), lambda z: torch._neg_view(z).conj()),
}


class Keeps(torch.autograd.Function):
    """Saves what it is given and passes on its first argument; shows in backward what it gets back."""

    seen: ClassVar[list[Tensor]] = []

    @staticmethod
    def forward(ctx: Any, x: Tensor, *saved: Tensor) -> Tensor:
        ctx.save_for_backward(*saved)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        Keeps.seen = list(ctx.saved_tensors)
        return (g, *[None] * len(Keeps.seen))


def show(make: Make, dtype: torch.dtype, remat: Remat | None) -> tuple[list[Tensor], int]:
    """What backward gets back, and how many bytes had left."""
    base = torch.linspace(-1, 2, WIDE).to(dtype)
    if dtype.is_complex:
        base = torch.complex(base.real, base.real.sin())
    x = torch.ones(3, requires_grad=True)
    before = 0
    if remat is None:
        made = make(base * 1.5)
        loss = Keeps.apply(x, *made).sum()
    else:
        with remat:
            made = make(base * 1.5)
            before = _bytes_out(remat)
            loss = Keeps.apply(x, *made).sum()
    del made
    loss.backward()
    seen, Keeps.seen = Keeps.seen, []
    return seen, (_bytes_out(remat) - before) if remat is not None else 0


def _bytes_out(remat: Remat) -> int:
    assert remat.offloading is not None
    mover = remat.offloading.mover
    return 0 if mover is None else mover.place.traffic.bytes_out


def _assert_the_same(plain: list[Tensor], got: list[Tensor]) -> None:
    assert len(plain) == len(got)
    for a, b in zip(plain, got, strict=True):
        assert (a.shape, a.stride(), a.storage_offset(), a.dtype) == (b.shape, b.stride(), b.storage_offset(), b.dtype)
        assert (a.is_conj(), a.is_neg()) == (b.is_conj(), b.is_neg())
        assert same_bits(a, b)
        assert a.untyped_storage().nbytes() == b.untyped_storage().nbytes()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", MADE)
def test_a_layout_comes_back_as_it_was(name: str, dtype: torch.dtype) -> None:
    """Sizes, strides and offsets; and exactly the storage has moved, once, neither more for what is expanded nor
    less for what shows a part."""
    plain, _ = show(MADE[name], dtype, None)
    remat = Remat(policy="offload_only", offload=EVERYTHING)
    for _ in range(2):
        got, moved = show(MADE[name], dtype, remat)
        _assert_the_same(plain, got)
        assert moved == WIDE * dtype.itemsize
        assert len({t.untyped_storage().data_ptr() for t in got if t.numel()}) == 1
    remat.close()


@pytest.mark.parametrize("name", COMPLEX)
def test_lazy_bits_and_views_of_complex_numbers(name: str) -> None:
    plain, _ = show(COMPLEX[name], torch.complex64, None)
    remat = Remat(policy="offload_only", offload=EVERYTHING)
    for _ in range(2):
        got, moved = show(COMPLEX[name], torch.complex64, remat)
        _assert_the_same(plain, got)
        assert moved == WIDE * 8
    remat.close()


LAZY: dict[str, Callable[[Tensor], Tensor]] = {
    "conjugate": torch.conj,
    "negative": torch._neg_view,
    "imaginary part of a conjugate": lambda z: z.conj().imag,
}
CHANGES: dict[str, Callable[[Tensor], Any]] = {"scaled": lambda z: z.mul_(2), "drawn": lambda z: z.normal_()}


@pytest.mark.parametrize("lazy", LAZY.values(), ids=LAZY)
@pytest.mark.parametrize("first", ["plain", "lazy"])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("policy", ["offload_only", recompute_all], ids=named)
def test_a_lazy_view_that_was_made_before_the_step(
    lazy: Callable[[Tensor], Tensor], first: str, change: Callable[[Tensor], Any], policy: Any
) -> None:
    """The step never sees the op that sets its bit, and writes into what it shows: the content may leave, or be
    dropped."""

    def saved(remat: Remat | None) -> list[Tensor]:
        z = torch.complex(torch.linspace(-1, 1, 8), torch.linspace(0, 2, 8))
        both = [z, lazy(z)]
        if first == "lazy":
            both.reverse()
        x = torch.ones(3, requires_grad=True)
        torch.manual_seed(0)
        if remat is None:
            change(z)
            loss = Keeps.apply(x, *both).sum()
        else:
            with remat:
                change(z)
                loss = Keeps.apply(x, *both).sum()
        loss.backward()
        seen, Keeps.seen = Keeps.seen, []
        return seen

    plain = saved(None)
    remat = Remat(policy=policy, offload=EVERYTHING)
    for _ in range(2):
        _assert_the_same(plain, saved(remat))
    remat.close()


def test_what_is_empty_or_has_no_bytes_stays() -> None:
    remat = Remat(policy="offload_only", offload=EVERYTHING)
    x = torch.ones(0, 4, requires_grad=True)
    for _ in range(2):
        with remat:
            y = x * 2
            loss = (y * y.sin()).sum()
        loss.backward()
        assert x.grad is not None
        assert x.grad.shape == (0, 4)
        assert _bytes_out(remat) == 0
    remat.close()


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # PyTorch's own forward mode uses it
@pytest.mark.parametrize("policy", ["offload_only", recompute_all], ids=["offload_only", "recompute all"])
def test_zeros_without_memory_stay(policy: Any) -> None:
    """Forward mode has zeros of any size that take no memory: there is nothing at their address."""

    def step(net: nn.Module) -> Tensor:
        hidden = net(torch.linspace(-1, 1, 32).reshape(8, 4))
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(hidden, hidden.detach() * 0.1)
            tangent = forward_ad.unpack_dual(dual.sin() * net(dual)).tangent
        assert tangent is not None
        return tangent.sum() + (hidden * torch._efficientzerotensor((8, 4))).sum()

    assert_exact(nn.Linear(4, 4), step, policy, offload=EVERYTHING).close()


@pytest.mark.parametrize("policy", ["offload_only", recompute_all, "selective"], ids=named)
def test_a_channels_last_network_keeps_its_layouts(policy: Any) -> None:
    """Bits of a convolution's gradient depend on the layout of what it saved; so what is restored must have it."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(
        torch.nn.Conv2d(3, 4, 3, padding=1),
        torch.nn.BatchNorm2d(4),
        torch.nn.ReLU(inplace=True),
        torch.nn.Conv2d(4, 4, 3, padding=1, stride=2),
        torch.nn.GELU(),
    ).to(memory_format=torch.channels_last)
    x = torch.randn(2, 3, 8, 8).contiguous(memory_format=torch.channels_last)

    def gradients(remat: Remat | None) -> list[Tensor]:
        net.zero_grad()
        if remat is None:
            loss = net(x).square().sum()
        else:
            with remat:
                loss = net(x).square().sum()
        loss.backward()
        return [p.grad for p in net.parameters() if p.grad is not None]

    plain = gradients(None)
    remat = Remat(policy=policy, offload=EVERYTHING)
    for _ in range(3):
        got = gradients(remat)
        assert all(a.stride() == b.stride() and same_bits(a, b) for a, b in zip(plain, got, strict=True))
    remat.close()


def test_what_is_made_from_nothing_stays() -> None:
    """Code that nobody sees may fill it after autograd has saved it."""

    class Filled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, kept):
            kept.append(torch.zeros(64))
            ctx.save_for_backward(kept[-1])
            return x * 1

        @staticmethod
        def backward(ctx, grad):
            return grad * ctx.saved_tensors[0], None

    def gradient(remat: Remat | None) -> Tensor:
        x = torch.ones(64, requires_grad=True)
        kept: list[Tensor] = []
        with remat or nullcontext():
            y = Filled.apply(x, kept)
        kept[0].numpy()[:] = 3  # as a kernel would that the dispatcher does not show
        y.sum().backward()
        return x.grad

    remat = Remat("offload_only", offload=EVERYTHING)
    assert torch.equal(gradient(remat), gradient(None))
    assert gradient(None).eq(3).all()
    remat.close()
