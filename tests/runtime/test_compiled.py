"""Compiled regions under a budget: their memory falls, results stay, and few compilations are made."""

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_remat import ConfigurationError, Remat
from lightning_remat.runtime.memory import measure_peak
from lightning_remat.runtime.tuning.shares import GRID

STEPS = 14
QUIET = pytest.mark.filterwarnings(
    # Of the compiler's own, which it raises itself while it compiles.
    "ignore:The .grad attribute of a Tensor:UserWarning",
    "ignore::DeprecationWarning:torch",
    "ignore::FutureWarning:torch",
)


class Net(nn.Module):
    """Wide, so that what is saved counts, with random operations in it."""

    def __init__(self, draws: str) -> None:
        super().__init__()
        self.up, self.down, self.draws = nn.Linear(8, 64), nn.Linear(64, 8), draws

    def forward(self, x: Tensor) -> Tensor:
        h = F.gelu(self.up(x)).sin().exp()
        if self.draws == "dropout":
            h = F.dropout(h, 0.25, True)
        elif self.draws == "multinomial":
            h = h * torch.multinomial(torch.ones(2, 64), 32)[0].sum()
        return x + self.down(h.sigmoid())


def trained(remat: Remat | None, draws: str, backend: Any = "inductor") -> tuple[list[Tensor], int]:
    """Losses, gradients and the random stream of some steps; the peak of the last one."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    net = Net(draws)
    net.compile(backend=backend)
    x = torch.randn(256, 8)
    found: list[Tensor] = []

    def step() -> None:
        if remat is None:
            loss = net(x).square().mean()
        else:
            with remat:
                loss = net(x).square().mean()
        loss.backward()
        found.append(loss.detach())

    peak = 0
    if remat is not None:
        remat.bind(net)
    for i in range(STEPS):
        if i == STEPS - 1:
            peak = measure_peak(step).peak_bytes
        else:
            step()
        found += [p.grad.clone() for p in net.parameters() if p.grad is not None]
        net.zero_grad()
    found.append(torch.get_rng_state())
    if remat is not None:
        remat.close()
    torch._dynamo.reset()
    return found, peak


@QUIET
@pytest.mark.parametrize("draws", ["dropout", "multinomial"])
def test_memory_falls_and_results_stay(draws: str) -> None:
    """As compiled without us, bit for bit, random operations included, whose results the compiler would not save."""
    plain, peak = trained(None, draws)
    parameters = sum(p.nbytes for p in Net(draws).parameters())
    remat = Remat(budget=parameters + int(0.95 * peak), compiled="budget")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*is not feasible|.*no plan was measured to fit")
        got, less = trained(remat, draws)
    assert all(torch.equal(a, b) for a, b in zip(plain, got, strict=True))
    counters = remat.counters
    print(draws, peak, less, counters.activation_budget, counters.compilations, counters.notes)
    assert counters.activation_budget in GRID
    assert less < peak
    assert 2 <= counters.compilations <= 2 * (1 + len(GRID))
    assert f"activation budget {counters.activation_budget:g}" in str(remat.report())


@QUIET
def test_other_backends_are_left_alone() -> None:
    """Where the compiler would draw new random numbers, nothing is compiled again, and it is said that none fits."""
    plain, peak = trained(None, "dropout", "aot_eager")
    remat = Remat(budget=int(0.8 * peak), compiled="budget")
    with pytest.warns(UserWarning, match="budget=.* is not feasible|smallest peak"):
        got, _ = trained(remat, "dropout", "aot_eager")
    assert all(torch.equal(a, b) for a, b in zip(plain, got, strict=True))
    assert remat.counters.activation_budget == 1.0
    assert any("Inductor has compiled none" in note for note in remat.counters.notes)


def test_what_contradicts_itself_is_refused() -> None:
    """Before the first step, with the ways out."""
    with pytest.raises(ConfigurationError, match="compiled='maybe' is unknown; give 'leave'"):
        Remat(compiled="maybe")
    with pytest.raises(ConfigurationError, match="compiled='budget' and policy='full' contradict"):
        Remat(policy="full", compiled="budget")
