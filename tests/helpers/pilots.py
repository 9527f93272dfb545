"""What tests of budgets in plain loops share: models, budgets, and a look into the pilot."""

import pytest
import torch
from torch import Tensor, nn

from lightning_remat import Remat
from lightning_remat.runtime.tuning.pilot import Pilot
from tests.helpers.loops import Loop
from tests.helpers.training import Net

PLENTY = "1GiB"
SCARCE = 150_000
"""Less than what the models here take if all is kept, and more than the least they need."""
NOTHING = 1
MANY = 256
"""Rows of a batch whose activations are most of what a step takes."""

BUDGETS = pytest.mark.parametrize("budget", [PLENTY, SCARCE, NOTHING])
# Asked for on purpose: the plan with the smallest peak is what is tested.
infeasible = pytest.mark.filterwarnings("ignore:policy='auto'. budget=.* is not feasible")
"""Said where a test is about something else."""


def net() -> nn.Module:
    return Net(width=16, depth=3)


def batch(rows: int = 64) -> Tensor:
    return torch.linspace(-1, 1, rows * 8).sin().reshape(rows, 8)


def pilot_of(remat: Remat) -> Pilot:
    assert isinstance(remat._pilot, Pilot)
    return remat._pilot


def planned(remat: Remat) -> bool:
    """Whether the last step followed a plan to its end."""
    pilot = pilot_of(remat)
    return pilot._active is not None and not pilot.tape.lost and pilot._learning is None


class Translating(nn.Module):
    """Two lengths that vary for themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 16)
        self.encoder = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.decoder = nn.TransformerDecoderLayer(16, 2, 32, batch_first=True)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        return self.decoder(self.embed(target), self.encoder(self.embed(source)))


class Varying(nn.Module):
    """Runs other ops in every one of ``period`` steps."""

    def __init__(self, period: int) -> None:
        super().__init__()
        self.net = Net(16, 2)
        self.other = nn.Sequential(*[nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.1), nn.Linear(16, 8)) for _ in "ab"])
        self.period = period
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        turn = self.calls % self.period
        self.calls += 1
        if not turn:
            return self.net(x)
        for _ in range(turn):
            x = x.sin()
        return self.other(x)


def usual_without_copies(loop: Loop, x: Tensor | None = None) -> None:
    loop.backward(loop.loss(batch() if x is None else x))
    loop.update()


def never(loop: Loop, x: Tensor) -> None:
    loop.loss(x)


def inside(loop: Loop, x: Tensor) -> None:
    with loop.recorded():
        loss = loop.model(x).square().mean()
        loss.backward()
        loop.optimizer.step()
        loop.optimizer.zero_grad()
    loop.losses.append(loss.detach())
