"""Autocast and low precision: what autocast chose in forward is what runs again, and its cache of cast weights is as it
was."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_remat import Remat
from lightning_remat.errors import ReplayError
from lightning_remat.runtime.memory import measure_peak
from tests.helpers.bits import difference_in_bits
from tests.helpers.exact import EVERYTHING, assert_exact, recompute_all
from tests.helpers.loops import Loop, assert_same_training
from tests.helpers.names import named

# Asked for on purpose: the plan that needs least.
pytestmark = pytest.mark.filterwarnings("ignore:policy='auto'. budget=1 B is not feasible")

DTYPES = [torch.bfloat16, torch.float16]
X = torch.linspace(-2, 2, 6 * 16).reshape(6, 16)


class Block(nn.Module):
    """Matrix products, a norm that autocast leaves in float32 or not, and dropout."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.drop = nn.Dropout(0.1)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.drop(F.gelu(self.up(self.norm(x)))))


class Net(nn.Module):
    """Blocks, some of which are called twice: their weights are cast once and read twice."""

    def __init__(self, width: int = 16, depth: int = 3, rounds: int = 1) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(width) for _ in range(depth)])
        self.rounds = rounds

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.rounds):
            for layer in self.layers:
                x = layer(x)
        return x


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("cached", [True, False], ids=["cached", "not cached"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_weights_that_are_read_several_times(dtype: torch.dtype, cached: bool) -> None:
    def step(net: nn.Module) -> Tensor:
        with torch.autocast("cpu", dtype=dtype, cache_enabled=cached):
            out = net(X)
        return out.float().square().mean()

    assert_exact(Net(rounds=2), step)
    assert_exact(Net(rounds=2), step, "sqrt", "every:2", "auto", {"*.0": "full"})
    assert_exact(Net(rounds=2), step, "auto", budget=1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_regions_inside_regions(dtype: torch.dtype) -> None:
    """Switched off inside, on again inside of that, with another dtype, and a loss in float32."""
    other = torch.float16 if dtype is torch.bfloat16 else torch.bfloat16

    def step(net: Any) -> Tensor:
        first, second, third = net.layers
        with torch.autocast("cpu", dtype=dtype):
            h = first(X)
            with torch.autocast("cpu", enabled=False):
                h = second(h.float())
                # Of this layer only: PyTorch's cache does not tell casts to different dtypes apart.
                with torch.autocast("cpu", dtype=other):
                    h = h + third(h).float() + third(h)
            h = first(h) + torch.mm(h, h.t()) @ h
            with torch.autocast("cpu", enabled=False):
                h = second(h)
            return F.mse_loss(h, torch.zeros(()).expand_as(h)) + torch.softmax(h, -1).prod(0).sum()

    assert_exact(Net(), step)


def test_a_region_that_is_left_by_an_exception() -> None:
    def step(net: Any) -> Tensor:
        h = X
        with torch.autocast("cpu", dtype=torch.bfloat16):
            try:
                with torch.autocast("cpu", enabled=False):
                    h = net.layers[0](h)
                    raise KeyError
            except KeyError:
                h = net.layers[1](h)
        return net.layers[2](h.float()).sin().sum()

    assert_exact(Net(), step)


def test_casts_that_were_cached_without_gradients() -> None:
    """A teacher's pass of the same weights comes first: the cache is not to hand out what has no history."""

    def step(net: nn.Module) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            with torch.no_grad():
                target = net(X).float()
            out = net(X)
            with torch.no_grad():
                target = target + net(X)
        return F.mse_loss(out.float(), target.float())

    assert_exact(Net(), step)


def test_functions_that_bring_their_own_casts() -> None:
    """``custom_fwd`` and ``custom_bwd``: with and without ``cast_inputs``."""

    class Casting(torch.autograd.Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.float32)
        def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
            ctx.save_for_backward(x, w)
            return (x @ w.t()).sin()

        @staticmethod
        @torch.amp.custom_bwd(device_type="cpu")
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
            x, w = ctx.saved_tensors
            grad = grad * (x @ w.t()).cos()
            return grad @ w, grad.t() @ x

    class Following(torch.autograd.Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type="cpu")
        def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
            out = F.relu(x @ w.t())
            ctx.save_for_backward(x, w, out)
            return out

        @staticmethod
        @torch.amp.custom_bwd(device_type="cpu")
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
            x, w, out = ctx.saved_tensors
            grad = grad * (out > 0)
            return grad @ w.to(grad.dtype), grad.t() @ x.to(grad.dtype)

    def step(net: Any) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            h = net.layers[0](X)
            h = Casting.apply(h * 1.5, net.layers[1].up.weight)
            h = Following.apply(h.cos(), net.layers[2].down.weight)
        return net.layers[0](h.float()).sin().sum()

    assert_exact(Net(), step)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_models_of_one_dtype(dtype: torch.dtype) -> None:
    def step(net: nn.Module) -> Tensor:
        return net(X.to(dtype)).square().mean()

    assert_exact(Net().to(dtype), step)
    assert_exact(Net().to(dtype), step, "auto", budget=1)


def test_a_model_of_several_dtypes() -> None:
    """Parts in bfloat16, parts in float32 and float64, joined by casts."""
    net = Net()
    net.layers[0].bfloat16()
    net.layers[2].double()

    def step(net: Any) -> Tensor:
        first, second, third = net.layers
        h = second(first(X.bfloat16()).float())
        return (third(h.double()) + second(h)).sin().sum().float()

    assert_exact(net, step)


def products() -> nn.Module:
    """Autograd saves casts of its weights, and no weight: plainly these may change before backward."""
    return nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(3)))


def step_around(remat: Remat | None) -> Any:
    return nullcontext() if remat is None else remat


@pytest.mark.parametrize("policy", ["full", "selective", recompute_all, "auto"], ids=named)
def test_one_region_around_several_steps(policy: Any) -> None:
    """Casts live as long as the region: the second step reads those of the first, whose tape is gone."""

    def run(remat: Remat | None) -> Any:
        torch.manual_seed(0)
        net = Net()
        losses = []
        with torch.autocast("cpu", dtype=torch.bfloat16):
            for _ in range(3):
                with step_around(remat):
                    loss = net(X).float().square().mean()
                loss.backward()
                losses.append(loss.detach())
        return losses, [p.grad for p in net.parameters()]

    assert difference_in_bits(run(None), run(Remat(policy=policy))) == []
    if policy == "auto":
        assert difference_in_bits(run(None), run(Remat(policy=policy, budget=1))) == []


@pytest.mark.parametrize("policy", ["full", recompute_all], ids=named)
def test_weights_that_are_changed_while_their_casts_wait(policy: Any) -> None:
    """Plainly, backward reads the cast. It is not there any more, and cannot be made again: refused, never wrong."""

    def step(remat: Remat | None) -> None:
        net = products()
        with step_around(remat), torch.autocast("cpu", dtype=torch.bfloat16):
            loss = net(X).float().square().mean()
        with torch.no_grad():
            for p in net.parameters():
                p.mul_(0.9)
        loss.backward()

    step(None)
    with pytest.raises(ReplayError, match="changed"):
        step(Remat(policy=policy))


@pytest.mark.parametrize("policy", ["full", recompute_all, "selective"], ids=named)
def test_weights_that_are_changed_inside_the_step(policy: Any) -> None:
    """Two optimizer steps in one: there the change is seen, and what was there before is kept."""

    def run(remat: Remat | None) -> Any:
        torch.manual_seed(0)
        net = products()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        with step_around(remat):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                first = net(X).float().square().mean()
                second = net(X + 1).float().square().mean()
            first.backward()
            optimizer.step()
            second.backward()
        return first.detach(), second.detach(), [(p.detach(), p.grad) for p in net.parameters()]

    assert difference_in_bits(run(None), run(Remat(policy=policy))) == []


def test_casts_are_dropped_with_the_rest() -> None:
    """The cache holds them until its region ends, and then nothing does: they are cast again, block by block."""
    net = Net(width=256, depth=6)
    weights = sum(p.numel() * 2 for layer in net.layers for p in (layer.up.weight, layer.down.weight))

    def held(policy: str, cached: bool) -> int:
        remat = Remat(policy=policy)
        losses: list[Tensor] = []

        def forward() -> None:
            with remat, torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=cached):
                losses.append(net(X.repeat(1, 16)).float().square().mean())

        for _ in range(2):
            forward()
            losses.pop().backward()
        return measure_peak(forward).left_bytes

    plain = held("none", True)
    assert plain > weights, "autograd holds every cast"
    for cached in (True, False):
        assert held("full", cached) < plain - 0.95 * weights


def scaled(scaler: torch.amp.GradScaler) -> Callable[[Loop, Any], None]:
    """A step with a gradient scaler, gradients of two batches and clipping."""

    def step(loop: Loop, batch: Tensor) -> None:
        for part in batch:
            with torch.autocast("cpu", dtype=torch.float16):
                loss = loop.loss(part)
            loop.backward(scaler.scale(loss.float()))
        scaler.unscale_(loop.optimizer)
        nn.utils.clip_grad_norm_(loop.model.parameters(), 0.5)
        loop.note()
        scaler.step(loop.optimizer)
        scaler.update()
        loop.optimizer.zero_grad()
        loop.seen[-1]["scaler"] = dict(scaler.state_dict())

    return step


@pytest.mark.parametrize("way", ["full", "selective", "recompute all", "auto", "scarce", "offload"])
def test_scaled_gradients_overflow_alike(way: str) -> None:
    """A step that overflows is skipped, the scale goes down and up: the same steps, the same scales."""
    remat = {
        "full": lambda: Remat(policy="full"),
        "selective": lambda: Remat(policy="selective"),
        "recompute all": lambda: Remat(policy=recompute_all),
        "auto": lambda: Remat(),
        "scarce": lambda: Remat(budget=1),
        "offload": lambda: Remat(policy="full", offload=EVERYTHING),
    }[way]()
    scales: list[float] = []

    def step(loop: Loop, batch: Tensor) -> None:
        if loop.steps == 1:
            loop.model.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=2)
        scaled(loop.model.scaler)(loop, batch)
        if loop.remat is not None:
            scales.append(loop.model.scaler.get_scale())

    batches = [torch.randn(2, 6, 16) * 2 for _ in range(12)]
    assert_same_training(lambda: Net(), batches, step, remat=remat)
    ups = [b > a for a, b in pairwise(scales)]
    downs = [b < a for a, b in pairwise(scales)]
    assert any(ups), scales
    assert any(downs), scales
    remat.close()
