"""Optimizers whose step is compiled: their state is put back when a step is undone, and they go on with it."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_remat import Remat
from tests.helpers.training import Net

# PyTorch's own, of what its compiler and its optimizers use themselves.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:torch", "ignore::FutureWarning:torch")

STEPS, FAILING = 6, 3

MAKE: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
}


def trained(remat: Remat | None, make: Callable[[Any], torch.optim.Optimizer], fails: str = "") -> list[Tensor]:
    """Losses, weights, buffers, gradients, optimizer state and the random stream.

    Args:
        fails: where a step runs out of memory once, "before" or "after" the optimizer's part of it.
    """
    torch._dynamo.reset()
    torch.manual_seed(0)
    net: nn.Module = Net()
    optimizer = make(net.parameters())
    compiled = torch.compile(optimizer.step, backend="aot_eager")
    batches = torch.randn(STEPS, 64, 8)
    failures = [(FAILING, fails)]
    if remat is not None:
        remat.bind(net)

    def fail(i: int, place: str) -> None:
        if (i, place) in failures:
            failures.remove((i, place))
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB.")

    def step(i: int) -> Tensor:
        optimizer.zero_grad()
        with remat or nullcontext():
            loss = net(batches[i]).square().mean()
        loss.backward()
        fail(i, "before")
        compiled()
        fail(i, "after")
        return loss.detach()

    found = []
    for i in range(STEPS):
        found.append(step(i) if remat is None else remat.attempt(lambda i=i: step(i), net, optimizer))
    if remat is not None:
        assert remat.counters.retried_batches == bool(fails)
        remat.close()
    torch._dynamo.reset()
    found += [*net.state_dict().values(), *(p.grad for p in net.parameters() if p.grad is not None)]
    found += [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    return [*found, torch.get_rng_state()]


@pytest.mark.parametrize("name", MAKE)
def test_as_without_recomputation(name: str) -> None:
    """Nothing fails, or memory runs out once, before the optimizer's step or after it."""
    plain = trained(None, MAKE[name])
    for fails in ("", "before", "after"):
        got = trained(Remat(budget="160KiB"), MAKE[name], fails)
        assert len(got) == len(plain)
        assert all(torch.equal(a, b) for a, b in zip(got, plain, strict=True)), fails
