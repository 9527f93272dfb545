"""The README's Python is run as it stands, block by block."""

import re
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import nn

from lightning_remat import Remat, RematCallback

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


class MyLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).relu())


class Lit(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(MyLayer() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        return self(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


@pytest.fixture
def names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the README's reader is assumed to have: a model, data, an optimizer, a layer class."""
    monkeypatch.chdir(tmp_path)
    quiet = {"accelerator": "cpu", "devices": 1, "max_steps": 2, "logger": False, "enable_checkpointing": False}

    class Trainer(L.Trainer):
        def __init__(self, **options: Any) -> None:
            super().__init__(**{**quiet, "enable_progress_bar": False, "enable_model_summary": False, **options})

    monkeypatch.setattr(L, "Trainer", Trainer)
    model = Lit()
    batches = [torch.randn(4, 8) for _ in range(2)]
    return {
        "model": model,
        "data": torch.utils.data.DataLoader(torch.stack(batches), batch_size=None),
        "batches": batches,
        "f": lambda m, b: m(b).square().mean(),
        "optimizer": model.configure_optimizers(),
        "MyLayer": MyLayer,
        "Remat": Remat,
        "RematCallback": RematCallback,
        "L": L,
    }


@pytest.mark.filterwarnings("ignore:.*does not have many workers")  # Lightning's advice on the README's data
@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.splitlines()[0][:40])
def test_the_readme_runs(block: str, names: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    """Every block of Python, in order of its lines."""
    exec(compile(block, "README.md", "exec"), names)
    if "print(remat.report())" in block:
        expected = "Recomputation plan" if "budget=" in block else "recomputation policy full"
        assert expected in capsys.readouterr().out


def test_the_readme_has_blocks() -> None:
    assert len(BLOCKS) >= 4
