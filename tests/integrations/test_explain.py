"""What is said of an out-of-memory error that ends training: where it was, and what to do about it."""

import lightning as L
import pytest
import torch
from torch import nn

from lightning_remat import RematStrategy


class Failing(L.LightningModule):
    """Runs out of memory in one place."""

    def __init__(self, where: str, automatic: bool = True) -> None:
        super().__init__()
        self.where = where
        self.automatic_optimization = automatic
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))

    def _fail(self, where):
        if where == self.where:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    def training_step(self, batch, index):
        loss = self.layers(batch).sum()
        self._fail("step")
        if self.where == "backward":
            loss.register_hook(lambda _: self._fail("backward"))
        if not self.automatic_optimization:
            self.manual_backward(loss)
            self.optimizers().step()
        return loss

    def validation_step(self, batch, index):
        self._fail("validation")

    def on_train_batch_start(self, batch, index):
        self._fail("hook")

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        optimizer.register_step_pre_hook(lambda *_: self._fail("optimizer"))
        return optimizer


@pytest.mark.parametrize(
    ("where", "automatic", "retries", "place", "advice"),
    [
        ("step", True, 0, "a training step", "Leave out retries=0"),
        ("backward", True, 0, "a training step", "Leave out retries=0"),
        ("step", False, 0, "a training step", "Leave out retries=0"),
        ("optimizer", True, 0, "the optimizer step", "a smaller budget="),
        ("optimizer", False, 0, "the optimizer step", "a smaller budget="),
        ("optimizer", True, 3, "the optimizer step", "a smaller budget="),
        ("validation", True, 3, "validation", "Give validation smaller batches"),
        ("hook", True, 3, "a hook or loop around the training step", "a smaller budget="),
    ],
)
def test_the_note_says_where_and_what_to_do(where, automatic, retries, place, advice, tmp_path):
    trainer = L.Trainer(
        strategy=RematStrategy(retries=retries),
        accelerator="cpu",
        devices=1,
        max_steps=2,
        default_root_dir=tmp_path,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data = torch.utils.data.DataLoader(torch.ones(4, 4))
    with pytest.raises(torch.OutOfMemoryError) as caught:
        trainer.fit(Failing(where, automatic), data, data)
    (note,) = caught.value.__notes__
    assert f"out of memory in {place}, which is not run again" in note
    assert advice in note
