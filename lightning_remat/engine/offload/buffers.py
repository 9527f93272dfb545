"""Between a tensor's memory and a file: chunks of host memory that direct I/O and accelerators can work with."""

from __future__ import annotations

import ctypes
import mmap
from typing import Any, Protocol

import torch
from torch import Tensor

from lightning_remat.engine.offload.extents import BLOCK


def memory_of(address: int, nbytes: int) -> memoryview:
    """Host memory as bytes, without a copy; it is the caller who keeps it alive."""
    return memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B")


class Chunk(Protocol):
    """One piece of host memory, used by one thread at a time.

    Attributes:
        view: its bytes; the first lies at a multiple of :data:`BLOCK`.
    """

    view: memoryview

    def fill(self, tensor: Tensor, begin: int, nbytes: int, ready: Any) -> None:
        """Copy a part of a flat tensor of bytes here; when this returns, it is here.

        Args:
            tensor: where from.
            begin: its first byte.
            nbytes: at most as much as the chunk holds.
            ready: what :func:`moment` gave when the tensor was handed over.
        """

    def spill(self, tensor: Tensor, begin: int, nbytes: int, ready: Any) -> None:
        """The other direction."""


class HostChunk:
    """For tensors in host memory.

    Private memory: Python's ``mmap`` is shared if not told otherwise, and a fork would write into its parent's.
    ``memmove`` lets other threads run meanwhile; assigning to slices of a ``memoryview`` does not.
    """

    def __init__(self, nbytes: int) -> None:
        self._room = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.view = memoryview(self._room)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._room))

    def fill(self, tensor: Tensor, begin: int, nbytes: int, ready: Any) -> None:
        """See :class:`Chunk`."""
        ctypes.memmove(self._address, tensor.data_ptr() + begin, nbytes)

    def spill(self, tensor: Tensor, begin: int, nbytes: int, ready: Any) -> None:
        """See :class:`Chunk`."""
        ctypes.memmove(tensor.data_ptr() + begin, self._address, nbytes)


class DeviceChunk:
    """For tensors on an accelerator: pinned memory, and a stream of its own.

    To be made on a thread that runs steps, since it allocates by PyTorch; then used by the threads that do I/O.
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        with torch._C._DisableTorchDispatch():  # whoever records ops need not see this one
            held = torch.empty(nbytes + BLOCK, dtype=torch.uint8, device="cpu", pin_memory=_pins(device))
            skipped = -held.data_ptr() % BLOCK
            self._tensor = held[skipped : skipped + nbytes]
        self.view = memory_of(self._tensor.data_ptr(), nbytes)
        self._module = torch.get_device_module(device)
        self._stream = self._module.Stream(device=device)

    def fill(self, tensor: Tensor, begin: int, nbytes: int, ready: Any) -> None:
        """See :class:`Chunk`."""
        self._copy(self._tensor[:nbytes], tensor[begin : begin + nbytes], ready)

    def spill(self, tensor: Tensor, begin: int, nbytes: int, ready: Any) -> None:
        """See :class:`Chunk`."""
        self._copy(tensor[begin : begin + nbytes], self._tensor[:nbytes], ready)

    def _copy(self, to: Tensor, source: Tensor, ready: Any) -> None:
        with torch.no_grad(), self._module.stream(self._stream):
            # Kernels that write the source, or had the memory of the target before it, may still be running.
            self._stream.wait_event(ready)
            to.copy_(source, non_blocking=True)
            done = self._module.Event()
            done.record(self._stream)
        # Only this thread waits, without the interpreter's lock. Once it has, no kernel of this stream uses the
        # tensor, so the caching allocator need not be told of the stream (record_stream).
        done.synchronize()


def moment(tensor: Tensor) -> Any:
    """Where the current stream of a tensor's device is now; None for host memory, which has none."""
    if not on_device(tensor):
        return None
    module = torch.get_device_module(tensor.device)
    event = module.Event()
    event.record(module.current_stream(tensor.device))
    return event


def on_device(tensor: Tensor) -> bool:
    """Whether its bytes cannot be read through its address."""
    return tensor.device.type != "cpu"


def _pins(device: torch.device) -> bool:
    return device.type != "cpu" and torch.accelerator.is_available()
