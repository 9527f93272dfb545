"""Trainings under Lightning for the benchmarks: quiet, on one CPU device, with the processor time of each batch."""

from __future__ import annotations

import logging
import time
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader


class Lit(LightningModule):
    """A network that gives its loss, and Adam."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def training_step(self, batch: Any, index: int) -> Tensor:
        """The loss."""
        return self.net(batch)

    def configure_optimizers(self) -> Any:
        """Adam."""
        return torch.optim.Adam(self.parameters(), lr=1e-3)


class Batches(Callback):
    """Processor time of every batch, from Lightning's first hook around it to its last.

    Attributes:
        seconds: one for each batch that was trained.
    """

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._begun = 0.0

    def on_train_batch_start(self, *args: Any) -> None:
        """The clock starts."""
        self._begun = time.process_time()

    def on_train_batch_end(self, *args: Any) -> None:
        """It stops."""
        self.seconds.append(time.process_time() - self._begun)


def trainer(strategy: Any, callbacks: Sequence[Callback] = (), **options: Any) -> Trainer:
    """A trainer that says nothing."""
    quiet()
    return Trainer(
        strategy=strategy,
        callbacks=list(callbacks),
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )


def quiet() -> None:
    """No advice, no news."""
    warnings.filterwarnings("ignore")  # advice that would stand between the rows of a table
    for name in ("lightning.pytorch", "lightning.fabric", "pytorch_lightning", "lightning_remat"):
        logging.getLogger(name).setLevel(logging.ERROR)


def loader(batches: Sequence[Any]) -> DataLoader[Any]:
    """Batches as they are, in this order."""
    return DataLoader(list(batches), batch_size=None)  # type: ignore[arg-type]  # a list is a dataset


class Allocator(TorchDispatchMode):
    """An allocator that is made up: counts the bytes of what ops return, and refuses what is above a limit.

    An op is refused after it has run, and its results are freed at once; the random stream is put back, so that a
    refusal changes nothing, as a real one. (It does where an op makes something new and writes into its arguments as
    well, as BatchNorm does: use it on models without.) What kernels take for themselves is not seen.

    Args:
        limit: bytes; None: none.
        there: bytes that were there before, which count.

    Attributes:
        live, peak: bytes.
        refused: how often.
    """

    def __init__(self, limit: int | None = None, there: int = 0) -> None:
        super().__init__()
        self.limit = limit
        self.live = self.peak = there
        self.refused = 0
        self._known: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = self._storages((*args, *(kwargs or {}).values()))
        stream = torch.get_rng_state() if torch.Tag.nondeterministic_seeded in func.tags else None
        out = func(*args, **(kwargs or {}))
        new = {key: s for key, s in self._storages((out,)).items() if key not in before and key not in self._known}
        size = sum(s.nbytes() for s in new.values())
        if self.limit is not None and size and self.live + size > self.limit:
            self.refused += 1
            if stream is not None:
                torch.set_rng_state(stream)
            text = f"CUDA out of memory (made up). Tried to allocate {size} bytes; {self.limit - self.live} are free."
            del out, new, before, args, kwargs  # the error's traceback would hold on to them
            raise torch.OutOfMemoryError(text)
        for key, storage in new.items():
            # The Python object of a storage lives as long as the storage.
            self._known[key] = weakref.ref(storage, self._gone(key, storage.nbytes()))
        self.live += size
        self.peak = max(self.peak, self.live)
        return out

    def _gone(self, key: int, size: int) -> Callable[[Any], None]:
        def forget(reference: Any) -> None:
            self.live -= size
            del self._known[key]

        return forget

    def _storages(self, values: Any) -> dict[int, Any]:
        found = {}
        for value in values:
            if isinstance(value, Tensor):
                if value.layout is torch.strided:
                    storage = value.untyped_storage()
                    found[storage._cdata] = storage
            elif isinstance(value, (list, tuple)):
                found |= self._storages(value)
        return found
