"""Nothing stays alive from step to step, and what was dropped goes at once: all without the garbage collector."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.module import register_module_forward_pre_hook

from lightning_remat import Remat
from lightning_remat.engine.offload.disk import DiskPlace
from tests.helpers.disk import settle
from tests.helpers.exact import EVERYTHING, recompute_all
from tests.helpers.memory import LiveBytes, live_objects, live_records, no_collector
from tests.helpers.names import named

WARM = 3


OPTIONS: dict[str, dict[str, Any]] = {
    "none": {"policy": "none"},
    "full": {"policy": "full"},
    "every:2": {"policy": "every:2"},
    "sqrt": {"policy": "sqrt"},
    "selective": {"policy": "selective"},
    "auto": {"policy": "auto"},
    "recompute all": {"policy": recompute_all},
    "by module": {"policy": {"layers.0": "full", "layers.*.act": "selective"}},
    "verify": {"policy": recompute_all, "verify": True},
    "offload": {"policy": "offload_only", "offload": EVERYTHING},
    "full, offload": {"policy": "full", "offload": EVERYTHING},
}


class Act(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        left, right = x.chunk(2, dim=-1)
        return nn.functional.gelu(left) * right.sigmoid()


class Layer(nn.Module):
    """Something of each kind: normalisation with running statistics, views, writes through views, in place, dropout.

    Attributes:
        hidden: weak references to the storages of what `act` has returned.
        fail: raise in mid-forward.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(width)
        self.up = nn.Linear(width, 4 * width)
        self.act = Act()
        self.drop = nn.Dropout(0.1)
        self.down = nn.Linear(2 * width, width)
        self.hidden: list[StorageWeakRef] = []
        self.fail = False

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.act(self.up(self.norm(x)))
        self.hidden.append(StorageWeakRef(hidden.untyped_storage()))
        hidden = self.drop(hidden)
        if self.fail:
            raise ValueError("forward fails")
        out = self.down(hidden)
        out[:, 0] += 1
        return (out + x).mul_(0.5)


class Stack(nn.Module):
    def __init__(self, width: int = 8, depth: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(width) for _ in range(depth)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Training:
    """A model in training, its engine, and one method per way in which a step can go."""

    def __init__(self, **options: Any) -> None:
        self.model = Stack()
        self.remat = Remat(**options)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)
        self.batch = torch.randn(16, 8)
        self.kept: list[Any] = []

    def settle(self) -> None:
        """Transfers that nobody waits for hold bytes until they are over: after an error there may be some."""
        if self.remat.offloading is not None and self.remat.offloading.mover is not None:
            place = self.remat.offloading.mover.place
            assert isinstance(place, DiskPlace)
            settle(place)

    def loss(self) -> Tensor:
        return self.model(self.batch).square().mean()

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()
        for layer in self.model.layers:
            layer.hidden.clear()

    def backward_after(self) -> None:
        with self.remat:
            loss = self.loss()
        loss.backward()
        self.update()

    def backward_inside(self) -> None:
        with self.remat:
            self.loss().backward()
            self.update()

    def raises_in_forward(self) -> None:
        self.backward_after()
        self.model.layers[1].fail = True
        with suppress(ValueError), self.remat:
            self.loss()
        self.model.layers[1].fail = False
        self.update()

    def raises_in_backward(self) -> None:
        def fail(gradient: Tensor) -> Tensor:
            raise ValueError("backward fails")

        def halfway(module: nn.Module, args: Any, out: Tensor) -> None:
            out.register_hook(fail)

        self.backward_after()
        with self.model.layers[1].register_forward_hook(halfway), self.remat:
            loss = self.loss()
        with suppress(ValueError):
            loss.backward()
        self.update()

    def no_backward(self) -> None:
        self.backward_after()
        with self.remat:
            self.loss()

    def keeps_the_loss(self) -> None:
        with self.remat:
            loss = self.loss()
        loss.backward()
        self.kept.append(loss.detach())
        self.update()

    def keeps_the_last_graph(self) -> None:
        with self.remat:
            loss = self.loss()
        loss.backward(retain_graph=True)
        self.kept = [loss]
        self.update()

    def gradient_penalty(self) -> None:
        batch = self.batch.clone().requires_grad_()
        with self.remat:
            loss = self.model(batch).square().mean()
            (gradient,) = torch.autograd.grad(loss, batch, create_graph=True)
            (loss + gradient.square().sum()).backward()
        self.update()


WAYS: dict[Callable[[Training], None], int] = {
    Training.backward_after: 50,
    Training.backward_inside: 50,
    Training.raises_in_forward: 50,
    Training.raises_in_backward: 50,
    Training.no_backward: 50,
    Training.keeps_the_loss: 20,
    Training.keeps_the_last_graph: 20,
    Training.gradient_penalty: 20,
}
"""How a step can go, and how many of them to make."""

EVERY_POLICY = (Training.backward_after, Training.raises_in_forward, Training.raises_in_backward, Training.no_backward)
A_FEW = ("full", "recompute all")
"""Policies for the other ways; with the rest they run as `slow`."""

RUNS = [
    pytest.param(
        way,
        options,
        id=f"{way.__name__}-{options}",
        marks=() if way in EVERY_POLICY or options in A_FEW else pytest.mark.slow,
    )
    for way in WAYS
    for options in OPTIONS
]


# A tensor that somebody holds, and what `LiveBytes` holds to watch its storage.
PER_KEPT_TENSOR = {
    "torch.Tensor",
    "torch.storage.UntypedStorage",
    "torch.multiprocessing.reductions.StorageWeakRef",
    "builtins.method",
}


@pytest.fixture
def _no_collector() -> Iterator[None]:
    with no_collector():
        yield


@pytest.mark.usefixtures("_no_collector")
@pytest.mark.parametrize(("way", "options"), RUNS)
def test_nothing_stays_alive(way: Callable[[Training], None], options: str) -> None:
    """After the last step as many bytes and objects are alive as after step 3, and of the tape's own objects none, or
    those of one step where the user holds its graph."""
    steps = WAYS[way] - WARM
    with LiveBytes() as live:
        training = Training(**OPTIONS[options])
        for _ in range(WARM):
            way(training)
        live_objects()  # counting fills a cache or two by itself
        training.settle()
        bytes_before, objects_before, records_before = live.count(), live_objects(), live_records()
        for _ in range(steps):
            way(training)
        training.settle()
        bytes_after, objects_after, records_after = live.count(), live_objects(), live_records()
    kept = steps if way is Training.keeps_the_loss else 0
    assert bytes_after - bytes_before == kept * 4
    assert records_after == records_before
    if way is not Training.keeps_the_last_graph:
        assert not records_after
    objects_after.subtract(objects_before)
    # One per step would be a leak; a few may come with a dictionary that was rebuilt.
    grown = {name: n for name, n in objects_after.items() if n >= steps // 2 and not (kept and name in PER_KEPT_TENSOR)}
    assert not grown


@pytest.mark.usefixtures("_no_collector")
@pytest.mark.parametrize("policy", ["full", "every:2", "sqrt", recompute_all], ids=named)
def test_a_dropped_value_is_gone_when_forward_is_over(policy: Any) -> None:
    """Autograd saves the result of `act` for the product that follows it; what it holds does not keep the bytes."""
    training = Training(policy=policy)
    for _ in range(2):  # the first step keeps a ledger, the second does not
        with training.remat:
            loss = training.loss()
            alive = [not h.expired() for layer in training.model.layers for h in layer.hidden]
            assert alive == [False] * 3
        loss.backward()
        training.update()


@pytest.mark.usefixtures("_no_collector")
def test_a_dropped_value_dies_with_its_last_reference() -> None:
    """Not at the end of the block or of the step: as soon as user code lets go of it."""
    linear = nn.Linear(8, 8)
    with Remat(recompute_all):
        hidden = linear(torch.randn(4, 8)).exp()
        dropped = StorageWeakRef(hidden.untyped_storage())
        loss = hidden.sin().sum()
        assert not dropped.expired()
        del hidden
        assert dropped.expired()
    loss.backward()
    assert dropped.expired()


@pytest.mark.usefixtures("_no_collector")
def test_a_replayed_value_dies_when_its_block_is_through_backward() -> None:
    """When the gradient of a block's input is there, all that was computed again for the block is gone, and the block's
    input goes as well: bytes alive fall from block to block."""
    with LiveBytes() as live:
        training = Training(policy="full")
        training.backward_after()
        for parameter in training.model.parameters():
            parameter.grad = torch.zeros_like(parameter)  # so that gradients do not add to what is counted
        seen: list[int] = []

        def count(module: nn.Module, args: tuple[Tensor]) -> None:
            if isinstance(module, Layer) and args[0].requires_grad:
                args[0].register_hook(lambda gradient: seen.append(live.count()))

        with register_module_forward_pre_hook(count), training.remat:
            loss = training.loss()
        before = live.count()
        loss.backward()
    boundary = 16 * 8 * 4
    # The loss's own gradient and what autograd saved behind the last block are gone with the first.
    assert len(seen) == 2
    assert before - seen[0] < boundary
    assert seen[0] - seen[1] == boundary


class Doubled(torch.autograd.Function):
    """Changes its input and saves it: what is saved is the output."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        x.mul_(2)
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 2 * gradient + 0 * x


IN_PLACE: dict[str, Callable[[Tensor], Any]] = {
    "relu_": lambda h: h.relu_(),
    "view": lambda h: h.view(-1).exp_(),
    "slice": lambda h: h[:2].sigmoid_(),
    "foreach": lambda h: torch._foreach_exp_([h]),
    "function": Doubled.apply,
}


@pytest.mark.parametrize("policy", ["selective", recompute_all, lambda op: "keep"], ids=["selective", "all", "keep"])
@pytest.mark.parametrize("name", IN_PLACE)
def test_the_result_of_an_in_place_op_dies_without_backward(name: str, policy: Any) -> None:
    """Such an op saves its result itself, with its history: held by its own node it would keep itself alive."""
    weight = torch.eye(4, requires_grad=True)
    remat = Remat(policy=policy)
    with no_collector():
        for _ in range(3):
            with remat:
                hidden = weight @ weight
                storage = StorageWeakRef(hidden.untyped_storage())
                IN_PLACE[name](hidden)
            del hidden
            assert storage.expired()


SAVING: dict[str, Callable[[Tensor], Tensor]] = {
    "tanh": torch.tanh,
    "softmax": lambda h: h.softmax(-1),
    "attention": lambda h: nn.functional.scaled_dot_product_attention(h[None], h[None], h[None]),
}


@pytest.mark.parametrize("policy", ["selective", recompute_all, lambda op: "keep"], ids=["selective", "all", "keep"])
@pytest.mark.parametrize("name", SAVING)
def test_the_result_of_an_op_that_saves_it_dies_without_backward(name: str, policy: Any) -> None:
    """Of a step that failed in forward, which has no backward, nothing may stay."""
    weight = torch.eye(4, requires_grad=True)
    remat = Remat(policy=policy)
    with no_collector():
        for _ in range(3):
            with remat:
                result = SAVING[name](weight @ weight)
                storage = StorageWeakRef(result.untyped_storage())
            del result
            assert storage.expired()
