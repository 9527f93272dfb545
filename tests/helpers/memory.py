"""What is alive, counted without the garbage collector: bytes of tensor storage, and Python objects by type."""

import gc
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_remat.engine.values import Blank, Op, Value


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of every storage that an op has returned since it was entered and that is still alive.

    Enter it outside of the tape; it sees backward and replay as well, on the CPU, where they run on this thread. What
    existed before is not counted, and neither is a storage that changed its size later.
    """

    def __init__(self) -> None:
        super().__init__()
        self._known: dict[StorageWeakRef, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for one in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(one, torch.Tensor):
                storage = one.untyped_storage()
                # A weak reference keeps the storage's address from being used again, so it can stand in a dictionary.
                self._known[StorageWeakRef(storage)] = storage.nbytes()
        return out

    def count(self) -> int:
        """Bytes alive now."""
        self._known = {reference: size for reference, size in self._known.items() if not reference.expired()}
        return sum(self._known.values())


@contextmanager
def no_collector() -> Iterator[None]:
    """Run without the garbage collector; what exists at the start is no longer looked at by `live_objects`."""
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


def live_objects() -> Counter[str]:
    """How many objects of each type have been made since `no_collector` was entered and are still alive."""
    return Counter(f"{type(o).__module__}.{type(o).__qualname__}" for o in gc.get_objects())


def live_records() -> Counter[type]:
    """How many of the tape's own objects are alive: records and values."""
    return Counter(type(o) for o in gc.get_objects() if type(o) in (Value, Op, Blank))
