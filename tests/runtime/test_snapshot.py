"""A step that fails half-way, put back and run again, against one that never failed."""

from __future__ import annotations

import gc
import random
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torchmetrics import MeanMetric, Metric, MetricCollection
from torchmetrics.aggregation import CatMetric
from torchmetrics.classification import MulticlassAccuracy, MulticlassPrecision

from lightning_remat.errors import RestoreError
from lightning_remat.runtime.snapshot import Snapshot
from lightning_remat.runtime.snapshot_parts.tensors import SMALL
from tests.helpers.bits import difference_in_bits, random_streams
from tests.helpers.seed import seed_everything


class Meter:
    """Somebody's average meter."""

    def __init__(self) -> None:
        self.sum, self.count, self.values = 0.0, 0, []

    def update(self, value: float) -> None:
        self.sum += value
        self.count += 1
        self.values.append(value)


class Net(nn.Module):
    """Has one of everything that a forward pass may change."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6)
        self.drop = nn.Dropout(0.3)
        self.last = torch.nn.utils.spectral_norm(nn.Linear(6, 3))
        self.register_buffer("replaced", torch.zeros(2))
        self.register_buffer("base", torch.zeros(4))
        self.register_buffer("part", self.base[1:3])
        self.calls, self.name, self.maybe = 0, "a", None
        self.plain = torch.zeros(3)
        self.bound = torch.zeros(3)
        self.history: list[Any] = []
        self.table: dict[str, Any] = {"n": 0, "inner": {"m": [1]}}
        self.seen: set[int] = set()
        self.recent: deque[float] = deque(maxlen=2)
        self.meter = Meter()
        self.generator = torch.Generator().manual_seed(3)
        self.numpy_generator = np.random.default_rng(3)
        self.array = np.zeros(2)
        self.hidden = [nn.BatchNorm1d(6)]
        self.metrics = MetricCollection({"acc": MulticlassAccuracy(3, average=None), "prec": MulticlassPrecision(3)})
        self.mean, self.cat = MeanMetric(), CatMetric()

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.name += "b"
        self.maybe = x.shape[0]
        self.new = "new"
        self.norm.also_new = 1
        x = self.hidden[0](self.drop(torch.relu(self.norm(self.first(x)))))
        with torch.no_grad():
            self.base.add_(1)
            self.part.mul_(3)
            self.replaced = self.replaced + 1
            self.plain += x.mean()
            self.bound = self.bound + x.std()
            self.array += 1
        out = self.last(x)
        self.history.append(self.calls)
        self.table["n"] += 1
        self.table["inner"]["m"].append(2)
        self.table[self.name] = 1
        self.seen.add(self.calls)
        self.recent.append(float(out.detach().sum()))
        self.meter.update(random.random() + np.random.randn())
        noise = torch.randn(1, generator=self.generator) + float(self.numpy_generator.normal())
        self.metrics(out.detach(), torch.arange(len(out)) % 3)
        self.mean.update(out.detach().mean())
        self.cat(out.detach().flatten())
        self.eval() if self.calls % 2 else self.train()
        self.first.bias.requires_grad_(self.calls % 2 == 0)
        return out + noise


def state(model: nn.Module, optimizers: Any = ()) -> dict[str, Any]:
    """All that can be seen of a model, in comparable form."""
    found: dict[str, Any] = {"streams": random_streams()}
    for name, m in [("", model), *((f"hidden{i}", h) for i, h in enumerate(getattr(model, "hidden", ())))]:
        for inner, module in m.named_modules():
            for key, value in module.__dict__.items():
                if key in ("_parameters", "_buffers"):
                    found[f"{name}.{inner}.{key}"] = {
                        k: None if v is None else [v, v.grad, v.requires_grad, v._base is None]
                        for k, v in value.items()
                    }
                elif not key.startswith("_") or key in ("_update_count", "_computed", "_forward_cache"):
                    found[f"{name}.{inner}.{key}"] = _plain(value)
    for i, o in enumerate(optimizers):
        found[f"optimizer {i}"] = o.state_dict()
    # Attributes that are put back may come in another order.
    return {k: found[k] for k in sorted(found)}


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Generator):
        return value.get_state()
    if isinstance(value, np.random.Generator):
        return str(value.bit_generator.state)
    if isinstance(value, Meter):
        return dict(value.__dict__)
    if isinstance(value, (set, deque)):
        return list(value)
    if isinstance(value, (Tensor, np.ndarray, dict, list, tuple, int, float, str, type(None))):
        return value
    return type(value).__name__


def frozen(found: Any) -> Any:
    """A copy that later changes do not reach."""
    if isinstance(found, Tensor):
        return found.detach().clone()
    if isinstance(found, np.ndarray):
        return found.copy()
    if isinstance(found, dict):
        return {k: frozen(v) for k, v in found.items()}
    if isinstance(found, (list, tuple)):
        return [frozen(v) for v in found]
    return type(found).__name__ if isinstance(found, nn.Module) else found


def look(model: nn.Module, optimizers: Any = ()) -> Any:
    return frozen(state(model, optimizers))


class Stop(Exception):
    """Stands for out of memory."""


def fail_in_backward(x: Tensor) -> Tensor:
    class Fail(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            raise Stop

    return Fail.apply(x)


X = torch.randn(5, 6, generator=torch.Generator().manual_seed(0))


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


class Stack(nn.Module):
    """Three layers; backward can be made to fail between them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 6) for _ in range(3)])
        self.drop = nn.Dropout(0.3)

    def forward(self, x: Tensor, fail_at: int | None = None) -> Tensor:
        for i, layer in enumerate(self.layers):
            x = layer(x)
            if i == fail_at:
                x = fail_in_backward(x)
            x = self.drop(torch.tanh(x))
        return x.square().sum()


def run(step: Callable[[Any], None], fails: list[Any], snapshot: Snapshot | None) -> None:
    """Take, fail in several ways, put back each time, and run to the end."""
    if snapshot is None:
        step(None)
        return
    snapshot.take()
    for fail in fails:
        with pytest.raises(Stop):
            step(fail)
        snapshot.restore()
    step(None)
    snapshot.release()


def no_hooks(model: nn.Module) -> bool:
    return not any(p._backward_hooks or p._post_accumulate_grad_hooks for p in model.parameters())


@pytest.mark.parametrize("told", [False, True])
@pytest.mark.parametrize("fails", [[0], [1], [2], [3], [2, 1, 0, 3], [3, 0, 1, 2], [1, 1]])
@pytest.mark.parametrize("way", ["none", "accumulate", "to None", "twice", "set_to_none=False"])
def test_gradients_after_a_failure_in_backward(way: str, fails: list[int], told: bool) -> None:
    def train(fails: list[int] | None) -> Any:
        seed_everything()
        model = Stack()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        snapshot = Snapshot([model], [optimizer], told=told) if fails is not None else None

        def backward(loss: Tensor) -> None:
            if snapshot is not None and told:
                snapshot.backward_begins()
            loss.backward()

        def step(fail: int | None) -> None:
            loss = model(X, fail)
            if way == "to None":
                optimizer.zero_grad()
            if way == "set_to_none=False":
                optimizer.zero_grad(set_to_none=False)
            backward(model(X) if way == "twice" else loss)
            if way == "twice":
                backward(loss)
            if fail == 3:
                raise Stop

        for _ in range(3):
            if way == "none":
                optimizer.zero_grad()
            run(step, fails or [], snapshot)
            assert no_hooks(model)
        return look(model)

    assert difference_in_bits(train(None), train(fails)) == []


def test_a_gradient_that_was_there_is_added_to_once_and_its_object_stays() -> None:
    model = Stack()
    model(X).backward()
    weight = model.layers[2].weight
    gradient = weight.grad
    snapshot = Snapshot([model])
    snapshot.take()
    with pytest.raises(Stop):
        model(X, 1).backward()
    snapshot.restore()
    assert weight.grad is None  # aside
    model(X).backward()
    snapshot.release()
    assert weight.grad is gradient


def test_a_gradient_that_was_put_aside_comes_back_if_no_try_follows() -> None:
    model = Stack()
    model(X).backward()
    snapshot = Snapshot([model])
    snapshot.take()
    model(X).backward()
    snapshot.restore()
    snapshot.release()
    assert all(p.grad is not None for p in model.parameters())


def test_gradients_that_grad_reads_are_not_taken_for_added_ones() -> None:
    """autograd.grad runs hooks on parameters without adding to their gradients."""

    def train(fails: list[Any]) -> Any:
        seed_everything()
        model = Stack()
        model(X).backward()
        snapshot = Snapshot([model])

        def step(fail: Any) -> None:
            loss = model(X)
            torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
            if fail == "grad":
                raise Stop
            loss.backward()
            if fail:
                raise Stop

        run(step, fails, snapshot)
        return look(model)

    plain = train([])
    assert difference_in_bits(plain, train(["grad"])) == []
    assert difference_in_bits(plain, train(["end", "grad", "end"])) == []


def test_sparse_gradients() -> None:
    def train(fails: list[Any]) -> Any:
        seed_everything()
        model = nn.Sequential(nn.Embedding(5, 3, sparse=True), nn.Linear(3, 2))
        snapshot = Snapshot([model])
        ids = torch.tensor([1, 3, 3])

        def step(fail: Any) -> None:
            model(ids).square().sum().backward()
            if fail:
                raise Stop

        for _ in range(3):
            run(step, fails, snapshot)
        return model[0].weight.grad.to_dense(), model[1].weight.grad

    assert difference_in_bits(train([]), train([True, True])) == []


@pytest.mark.filterwarnings("ignore:Using backward:UserWarning")  # about a cycle, which the test undoes
def test_create_graph_over_a_gradient_is_refused() -> None:
    model = nn.Linear(3, 1)
    model(torch.ones(2, 3)).sum().backward()
    snapshot = Snapshot([model])
    snapshot.take()
    model(torch.ones(2, 3)).square().sum().backward(create_graph=True)
    with pytest.raises(RestoreError, match="create_graph"):
        snapshot.restore()
    snapshot.release()
    model.zero_grad()  # PyTorch's advice: gradient and parameter would hold one another


def test_a_gradient_changed_by_others_is_refused() -> None:
    model = Stack()
    model(X).backward()
    for told in (False, True):
        snapshot = Snapshot([model], told=told)
        snapshot.take()
        snapshot.backward_begins()
        model(X).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        before = look(model)
        with pytest.raises(RestoreError, match="earlier batch"):
            snapshot.restore()
        assert difference_in_bits(before, look(model)) == []
        snapshot.release()


def test_a_backward_that_was_not_told_of_is_refused() -> None:
    model = Stack()
    model(X).backward()
    snapshot = Snapshot([model], told=True)
    snapshot.take()
    model(X).backward()
    with pytest.raises(RestoreError, match="earlier batch"):
        snapshot.restore()


def test_an_optimizer_in_backward_is_refused() -> None:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: optimizer.step())
    snapshot = Snapshot([model], [optimizer])
    snapshot.take()
    model(torch.ones(2, 3)).sum().backward()
    with pytest.raises(RestoreError, match="a parameter"):
        snapshot.restore()
    snapshot.release()


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


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("fails", [["a"], ["b"], ["c"], ["d"], ["d", "b", "a", "c", "d"]])
def test_steps_of_optimizers_inside_the_step_are_undone(fails: list[str], scaled: bool) -> None:
    def train(fails: list[str] | None) -> Any:
        seed_everything()
        model = nn.ModuleList([Stack(), Stack()])
        first = torch.optim.AdamW(model[0].parameters(), lr=0.1, weight_decay=0.1)
        second = torch.optim.SGD(model[1].parameters(), lr=torch.tensor(0.1), momentum=0.9)
        plan = torch.optim.lr_scheduler.ExponentialLR(first, 0.5)
        scaler = torch.amp.GradScaler("cpu", enabled=scaled, growth_interval=2)
        snapshot = (
            Snapshot([model], [first, second], manual=True, scalers=[scaler], schedulers=[plan])
            if fails is not None
            else None
        )

        def step(fail: str | None) -> None:
            for i, optimizer in enumerate((first, second)):
                if scaled:  # accumulated gradients that were unscaled in place are refused
                    optimizer.zero_grad()
                scaler.scale(model[i](X)).backward()
                if fail == "ab"[i]:
                    raise Stop
                scaler.step(optimizer)
                plan.step()
                second.param_groups[0]["lr"].mul_(0.9)
                if fail == "c":
                    raise Stop
                if i == 0:
                    optimizer.zero_grad()
            scaler.update()
            if fail == "d" and snapshot is not None and not snapshot._stepping._usual:
                raise Stop

        for round in range(3):
            if snapshot is None:
                step(None)
                continue
            snapshot.take()
            for fail in fails or []:
                if fail == "d" and round:
                    continue
                with pytest.raises(Stop):
                    step(fail)
                snapshot.restore()
            step(None)
            snapshot.release()
        return [look(model, [first, second]), scaler.state_dict(), plan.state_dict()]

    assert difference_in_bits(train(None), train(fails)) == []


def test_no_copy_before_the_last_step_of_a_batch_and_a_refusal_after_it() -> None:
    model = Stack()
    first, second = (torch.optim.SGD(model.layers[i].parameters(), lr=0.1) for i in (0, 1))
    snapshot = Snapshot([model], [first, second], manual=True)
    copied = []
    for _ in range(2):
        snapshot.take()
        model(X).backward()
        first.step()
        second.step()
        copied.append(len(snapshot._stepping._saved))
        if len(copied) == 1:
            snapshot.release()
    assert copied == [2, 1]
    with pytest.raises(RestoreError, match="last optimizer step"):
        snapshot.restore()
    snapshot.release()


def test_a_snapshot_that_is_dropped_leaves_no_hook() -> None:
    from torch.optim import optimizer as torch_optimizer

    model = Stack()
    model(X).backward()
    before = len(torch_optimizer._global_optimizer_pre_hooks)
    backward = torch.autograd._engine_run_backward
    snapshot = Snapshot([model], [torch.optim.SGD(model.parameters(), lr=0.1)], manual=True)
    snapshot.take()
    assert torch.autograd._engine_run_backward is not backward, "it wants to know of every backward"
    model(X).backward()
    assert not no_hooks(model)
    del snapshot
    assert no_hooks(model)
    assert torch.autograd._engine_run_backward is backward
    assert len(torch_optimizer._global_optimizer_pre_hooks) == before


@pytest.mark.parametrize("adds", [False, True])
def test_an_earlier_gradient_that_an_optimizer_used_and_let_go_of_is_there_again(adds: bool) -> None:
    def train(tries: int) -> Any:
        seed_everything()
        model = Stack()
        model(X).backward()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        snapshot = Snapshot([model], [optimizer], manual=True)

        def step(fail: Any) -> None:
            if adds:
                model(X).backward()
            optimizer.step()
            optimizer.zero_grad()
            model(X).backward()
            if fail:
                raise Stop

        run(step, [True] * tries, snapshot)
        return look(model)

    assert difference_in_bits(train(0), train(2)) == []


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
