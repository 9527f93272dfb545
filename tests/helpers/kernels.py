"""A step that calls code of somebody else: the same bits in every way to run it, and that code as often as plainly."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lightning_remat import Remat
from tests.helpers.exact import EVERYTHING, Step, assert_same, outcome, recompute_all

STEPS = 3
"""Under a budget, the first is traced and those after it follow the plan."""

X = torch.linspace(-1, 1, 32).reshape(4, 8)

WAYS: dict[str, Callable[[], Remat]] = {
    "full": lambda: Remat(policy="full"),
    "selective": lambda: Remat(policy="selective"),
    "recompute all": lambda: Remat(policy=recompute_all),
    "budget": lambda: Remat(budget=1),
    "offload": lambda: Remat(policy="offload_only", offload=EVERYTHING),
    "full, offload": lambda: Remat(policy="full", offload=EVERYTHING),
}


class Net(nn.Module):
    """Two linear layers; what happens in between is the test's."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)


class Calls:
    """Counts calls, one by one."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> int:
        self.count += 1
        return self.count


def every_way(step: Step, calls: Calls | None = None, make: Callable[[], nn.Module] = Net) -> dict[str, Remat]:
    """Fail unless a step gives in each way what it gives plainly, and ``calls`` goes up by as many.

    Also that ops were computed again: a step in which nothing is dropped proves nothing.
    """
    torch.manual_seed(0)
    model = make()
    calls = calls or Calls()

    def counted(remat: Remat | None) -> tuple[Any, int]:
        calls.count = 0
        return outcome(model, step, remat, steps=STEPS), calls.count

    plain, often = counted(None)
    assert_same(plain, counted(None)[0])  # otherwise nothing could be said
    found = {}
    for name, make_remat in WAYS.items():
        remat = found[name] = make_remat()
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "policy='auto'. budget=1 B is not feasible")  # asked for on purpose
                ours, again = counted(remat)
            try:
                assert_same(plain, ours)
            except AssertionError as error:
                raise AssertionError(f"{name}: {error}") from None
            assert again == often, f"{name}: called {again} times instead of {often}"
            assert name == "offload" or remat.stats.replayed_ops > 0, f"{name}: nothing was computed again"
        finally:
            remat.close()
    return found


def around(kernel: Callable[[Tensor], Tensor]) -> Step:
    """A step with ``kernel`` between ops that are dropped, on a value that is dropped, read before and after."""

    def step(net: nn.Module) -> Tensor:
        h: Tensor = net.a(X) * 1.5
        before = (h + 1).sin()
        out = kernel(h)
        after = (h * 2).cos()
        return (net.b(out * 1.25 + before * after) * h).sin().sum()

    return step
