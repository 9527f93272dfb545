"""What the tests of ``lightning-remat plan`` name: modules, batches, steps, data."""

from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningDataModule, LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

WIDTH = 256


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x)).square())


class Net(nn.Module):
    def __init__(self, depth: int = 4) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*[Block() for _ in range(depth)])

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x)


class Lit(LightningModule):
    def __init__(self, depth: int = 4) -> None:
        super().__init__()
        self.net = Net(depth)

    def training_step(self, batch: Any, index: int) -> Tensor:
        x, y = batch
        loss = F.mse_loss(self.net(x), y)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1)}


class WithExample(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = Net(1)
        self.example_input_array = torch.zeros(3, 64, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


class Data(LightningDataModule):
    def train_dataloader(self) -> Any:
        x = torch.randn(8, 64, WIDTH)
        return DataLoader(TensorDataset(x, x), batch_size=2)


class ByHand(Lit):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class Curious(Net):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.relu() if x.sum() > 0 else x)


class Attached(Lit):
    """Needs its trainer."""

    def training_step(self, batch: Any, index: int) -> Tensor:
        return super().training_step(batch, index) / self.trainer.num_training_batches


class Normed(nn.Module):
    """Cannot be trained on one sample."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


def pair(count: int) -> tuple[Tensor, Tensor]:
    return torch.randn(count, 64, WIDTH), torch.randn(count, 64, WIDTH)


def one(count: int) -> Tensor:
    return torch.randn(count, 64, WIDTH)


def rows(count: int) -> Tensor:
    return torch.randn(count, WIDTH)


def broken(count: int) -> Tensor:
    raise OSError("no such data")


def squared(module: nn.Module, batch: Tensor) -> Tensor:
    return module(batch).square().mean()


def needs_arguments(width: int) -> nn.Module:
    return nn.Linear(width, width)


nothing = 3
