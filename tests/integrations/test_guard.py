"""What the guard relies on in Lightning and PyTorch that is not public, and that it leaves nothing behind."""

import inspect
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.loops.optimization.automatic import Closure, _AutomaticOptimization
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.strategies.strategy import _ForwardRedirection
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

from lightning_remat import NoMemoryLeft, RematStrategy
from tests.helpers.training import Lit, Net, regression, regression_data, train, trainer_for


def test_what_is_private_is_as_expected() -> None:
    """A release that changes one of these has to be looked at."""
    assert list(inspect.signature(_AutomaticOptimization._make_closure).parameters) == [
        "self",
        "kwargs",
        "optimizer",
        "batch_idx",
    ]
    closure = Closure(step_fn=lambda: None)  # type: ignore[arg-type, return-value]  # only looked at
    assert "self.closure(" in inspect.getsource(type(closure).__call__)
    assert isinstance(DDPStrategy()._forward_redirection, _ForwardRedirection)
    assert "getattr(original_module, method_name)" in inspect.getsource(_ForwardRedirection.__call__)
    reducer = torch._C._distributed_c10d.Reducer
    assert {"_reset_state", "_get_local_used_map"} <= set(dir(reducer))
    assert hasattr(torch._C._distributed_c10d.ProcessGroup, "_get_sequence_number_for_group")
    assert hasattr(distributed.distributed_c10d._world, "pg_map")
    assert "_has_rebuilt_buckets" in inspect.getsource(DistributedDataParallel._pre_forward)


class Fails(Lit):
    """Runs out of memory in one batch, so many times."""

    times = 1

    def training_step(self, batch: Any, index: int) -> Any:
        loss = super().training_step(batch, index)
        if index == 1 and len(FAILED) < self.times:
            FAILED.append(index)
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB.")
        return loss


FAILED: list[int] = []


@pytest.fixture(autouse=True)
def _fresh() -> None:
    FAILED.clear()


def test_the_loop_is_as_before_when_training_has_ended() -> None:
    """And the batch that failed was trained once."""
    plain = train(lambda: Lit(Net(), regression), regression_data(4))
    ours = train(lambda: Fails(Net(), regression), regression_data(4), strategy=RematStrategy())
    assert [text for text in ours.difference(plain) if not text.startswith("gradients")] == []
    assert FAILED == [1]
    assert ours.trainer.strategy.remat.counters.retries == 1
    assert "_make_closure" not in vars(ours.trainer.fit_loop.epoch_loop.automatic_optimization)


def test_the_loop_is_as_before_when_training_has_failed() -> None:
    module: LightningModule = Fails(Net(), regression)
    Fails.times, before = 99, Fails.times
    trainer = trainer_for(RematStrategy(retries=2))
    try:
        with pytest.raises(NoMemoryLeft, match="does not fit"):
            trainer.fit(module, regression_data(4))
    finally:
        Fails.times = before
    assert len(FAILED) == 3
    assert "_make_closure" not in vars(trainer.fit_loop.epoch_loop.automatic_optimization)
