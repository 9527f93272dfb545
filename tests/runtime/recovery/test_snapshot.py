"""A step that fails half-way, put back and run again, against one that never failed."""

from __future__ import annotations

import gc
import weakref
from collections import deque
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torchmetrics import Metric
from torchmetrics.aggregation import CatMetric

from lightning_remat.errors import RestoreError
from lightning_remat.runtime.recovery.snapshot import Snapshot
from lightning_remat.runtime.recovery.snapshot_parts.tensors import SMALL
from tests.helpers.bits import difference_in_bits
from tests.helpers.seed import seed_everything
from tests.helpers.snapshots import Net, X, look


@pytest.mark.parametrize("tries", [1, 3])
def test_everything_that_forward_changes_is_put_back_and_the_next_try_gives_the_same(tries: int) -> None:
    def made() -> Net:
        seed_everything()
        model = Net()
        for _ in range(2):
            model(X)
        return model

    twin = made()
    expected_out = twin(X)
    expected = look(twin)

    model = made()
    before = look(model)
    kinds = (list, dict, set, deque, Tensor)
    objects = {k: id(v) for k, v in model.__dict__.items() if isinstance(v, kinds) and not k.startswith("_")}
    snapshot = Snapshot([model])
    snapshot.take()
    for _ in range(tries):
        with torch.no_grad():
            model(X), model(X[:3]), model(X)  # an odd number, since some things alternate
        snapshot.restore()
        assert difference_in_bits(before, look(model)) == []
        assert {k: id(v) for k, v in model.__dict__.items() if k in objects} == objects
    out = model(X)
    snapshot.release()
    assert difference_in_bits(expected_out, out) == []
    assert difference_in_bits(expected, look(model)) == []


def test_shared_storage_stays_shared() -> None:
    model = Net()
    snapshot = Snapshot([model])
    snapshot.take()
    model(X)
    snapshot.restore()
    model.base.fill_(7)
    assert model.part.tolist() == [7, 7]


class Large(nn.Module):
    """A large buffer that a step writes to now and then, and a teacher that follows."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("queue", torch.zeros(SMALL // 4 + 1))
        self.teacher = nn.Linear(SMALL // 4 + 1, 1).requires_grad_(False)
        self.state = torch.zeros(SMALL // 4 + 1)

    def forward(self, name: str) -> None:
        with torch.no_grad():
            {"queue": self.queue, "teacher": self.teacher.weight, "state": self.state}[name].add_(1)


@pytest.mark.parametrize("name", ["queue", "teacher", "state"])
def test_what_is_large_is_copied_once_it_was_seen_to_change(name: str) -> None:
    model = Large()
    snapshot = Snapshot([model])
    snapshot.take()
    snapshot.restore()  # nothing has changed
    model(name)
    with pytest.raises(RestoreError, match="was written to in the step"):
        snapshot.restore()
    snapshot.release()
    for _ in range(2):
        snapshot.take()
        before = look(model)
        model(name)
        snapshot.restore()
        assert difference_in_bits(before, look(model)) == []
        model(name)
        snapshot.release()


@pytest.mark.parametrize("fails_in", [0, 1, 2])
def test_a_small_teacher_follows_exactly_whichever_step_fails(fails_in: int) -> None:
    """Also in the first step, and if an optimizer was given all parameters, frozen ones included."""

    def train(fails_in: int | None) -> Any:
        seed_everything()
        model = nn.ModuleDict({"student": nn.Linear(2, 2), "teacher": nn.Linear(2, 2).requires_grad_(False)})
        for p in model.parameters():
            nn.init.constant_(p, 0.3)
        optimizer = torch.optim.AdamW(model.parameters())

        def step() -> None:
            with torch.no_grad():
                for p, q in zip(model["teacher"].parameters(), model["student"].parameters(), strict=True):
                    p.mul_(0.9).add_(q + 1, alpha=0.1)
            (model["student"](torch.ones(1, 2)) - model["teacher"](torch.ones(1, 2))).square().sum().backward()

        snapshot = Snapshot([model], [optimizer])
        for i in range(3):
            snapshot.take()
            if i == fails_in:
                step()
                snapshot.restore()
                step()
                snapshot.restore()
            step()
            snapshot.release()
            optimizer.step()
            optimizer.zero_grad()
        return look(model, [optimizer])

    assert difference_in_bits(train(None), train(fails_in)) == []


def test_what_is_large_and_does_not_change_is_not_copied() -> None:
    model = Large()
    snapshot = Snapshot([model])
    for _ in range(3):
        snapshot.take()
        model.teacher(torch.ones(1, SMALL // 4 + 1))
        snapshot.release()
    assert sum(t.numel() for t in snapshot._guard._copied._copies) == 0


def live_bytes(model: nn.Module) -> int:
    """Of all tensors that Python knows, gradients included (which it knows once somebody has looked)."""
    gc.collect()
    gradients = [p.grad for p in model.parameters()]
    seen = {}
    for o in gc.get_objects():
        if type(o) in (Tensor, nn.Parameter):
            seen[o.untyped_storage()._cdata] = o.untyped_storage().nbytes()
    del gradients
    return sum(seen.values())


def test_a_snapshot_holds_its_copies_and_nothing_else() -> None:
    model = nn.Sequential(nn.Linear(300, 300), nn.BatchNorm1d(300))
    model.register_buffer("mask", torch.zeros(SMALL + 4))
    x = torch.ones(2, 300)
    model(x).sum().backward()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    copies = sum(b.untyped_storage().nbytes() for b in model[1].buffers())
    snapshot = Snapshot([model], [optimizer])
    before = live_bytes(model)
    for _ in range(3):
        snapshot.take()
        assert live_bytes(model) - before == copies + torch.get_rng_state().numel()
        optimizer.zero_grad()
        model(x).sum().backward()
        snapshot.release()
        assert live_bytes(model) - before == copies


@pytest.mark.parametrize("told", [False, True])
def test_a_gradient_is_gone_when_the_step_lets_go_of_it(told: bool) -> None:
    model = nn.Linear(300, 300)
    snapshot = Snapshot([model], told=told)
    for _ in range(2):
        model(torch.ones(1, 300)).sum().backward()
        alive = weakref.ref(model.weight.grad)
        snapshot.take()
        model.zero_grad()
        assert alive() is None
        snapshot.release()


def test_attributes_are_not_kept_alive() -> None:
    class Keeps(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            self.features = x * 2
            self.pair = (x * 3, x * 4)
            return self.features

    model = Keeps()
    x = torch.ones(SMALL, requires_grad=True)
    model(x)
    snapshot = Snapshot([model])
    snapshot.take()
    alive = weakref.ref(model.features), weakref.ref(model.pair[0])
    model(x)
    assert alive[0]() is None
    assert alive[1]() is None
    with pytest.raises(RestoreError, match="features"):
        snapshot.restore()
    snapshot.release()


def test_a_stored_result_with_history_comes_back_without_it_and_says_so() -> None:
    class Keeps(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            self.loss = (x * 2).sum()
            return self.loss

    model, x = Keeps(), torch.ones(3, requires_grad=True)
    model(x)
    snapshot = Snapshot([model])
    snapshot.take()
    model(x * 5)
    snapshot.restore()
    assert model.loss.detach().item() == 6
    with pytest.raises(RuntimeError, match="history"):
        (model.loss * 2).backward()
    snapshot.release()


def test_long_containers() -> None:
    model = nn.Linear(1, 1)
    model.long, model.map, model.queue = list(range(1000)), dict.fromkeys(range(1000), 0), deque(range(1000), 1000)
    snapshot = Snapshot([model])
    snapshot.take()
    model.long.append(1), model.map.update({3: 4, 2000: 1}), model.queue.append(7)
    snapshot.restore()
    assert model.long == list(range(1000))
    assert model.map == dict.fromkeys(range(1000), 0)
    assert list(model.queue) == list(range(1000))
    model.long.clear()
    with pytest.raises(RestoreError, match="long"):
        snapshot.restore()


def test_lists_of_metrics_may_be_long_and_are_cleared_in_a_step() -> None:
    metric: Metric = CatMetric()
    for i in range(600):
        metric.update(float(i))
    before = [float(v) for v in metric.value]
    snapshot = Snapshot([metric])
    snapshot.take()
    metric(3.0)
    metric.reset()
    snapshot.restore()
    assert [float(v) for v in metric.value] == before
    assert metric._update_count == 600


def test_a_new_submodule_and_a_new_parameter_are_removed() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    old = model[0].weight
    snapshot = Snapshot([model])
    snapshot.take()
    model.add_module("more", nn.Linear(2, 2))
    model[0].weight = nn.Parameter(torch.zeros(2, 2))
    snapshot.restore()
    assert list(model._modules) == ["0"]
    assert model[0].weight is old


def test_lazy_modules_are_refused() -> None:
    model = nn.LazyLinear(2)
    snapshot = Snapshot([model])
    snapshot.take()
    model(torch.ones(1, 3))
    with pytest.raises(RestoreError, match="first step"):
        snapshot.restore()


def test_a_normal_number_that_numpy_has_put_by() -> None:
    """Drawing it changes nothing in the generator's words."""
    snapshot = Snapshot([nn.Linear(1, 1)])
    np.random.randn()  # makes two
    for _ in range(2):
        snapshot.take()
        value = np.random.randn()
        snapshot.restore()
        assert np.random.randn() == value
        snapshot.release()
