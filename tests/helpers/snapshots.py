"""Models with everything that a step may change, steps that fail, and all that they leave behind."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torchmetrics import MeanMetric, MetricCollection
from torchmetrics.aggregation import CatMetric
from torchmetrics.classification import MulticlassAccuracy, MulticlassPrecision

from lightning_remat.runtime.recovery.snapshot import Snapshot
from tests.helpers.bits import random_streams


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
