"""What an ``autograd.Function`` makes belongs to no plan, but a plan that drops what reads it holds it."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_remat import Remat
from lightning_remat.runtime.tuning.pilot import Pilot


class Twice(torch.autograd.Function):
    """Memory that comes into being without gradient mode."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0] * 2


class Block(nn.Module):
    """Its last op, the border, reads what the function made; or an op that saves it does, too."""

    def __init__(self, saving: bool) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 64), nn.Linear(64, 64)
        self.saving = saving

    def forward(self, x: Tensor) -> Tensor:
        made = Twice.apply(self.down(torch.relu(self.up(self.norm(x)))))
        return x * made if self.saving else x + made


@pytest.mark.filterwarnings("ignore:.*not feasible")  # asked for on purpose
@pytest.mark.parametrize("saving", [False, True])
@pytest.mark.parametrize("rows", [(256,), (256, 384)], ids=["one size", "two sizes"])
def test_the_peak_is_the_predicted_one(saving: bool, rows: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(*[Block(saving) for _ in range(4)])
    optimizer = torch.optim.SGD(net.parameters(), 0.01)
    remat = Remat(budget=1)
    for number in range(8):
        with remat:
            loss = net(torch.ones(rows[number % len(rows)], 64)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert isinstance(remat.pilot, Pilot)
    kinds = [known for known in remat.pilot.known.all if known.result is not None and known.measured is not None]
    assert kinds
    for known in kinds:
        assert known.result is not None
        assert known.measured is not None
        assert known.measured.peak_bytes == known.result.chosen.peak_bytes < known.result.plain.peak_bytes
    remat.close()
