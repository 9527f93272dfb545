"""What offloading to host memory needs of a device: streams, events, copies between, and pinned memory.

One thin layer over PyTorch's accelerator API (`torch.Stream`, `torch.Event`, the same for CUDA, ROCm and XPU), so that
the order in which things happen can be tested without a device (``tests/helpers/fake_streams.py``).
"""

from __future__ import annotations

from typing import Any, Protocol, cast

import torch
from torch import Tensor

_NoModes = torch._C._DisableTorchDispatch
"""Copies are made in the middle of ops and of saved-tensor hooks; they are nobody's business."""


class Event(Protocol):
    """A mark in a stream, with the time at which the stream passed it."""

    def query(self) -> bool:
        """Whether the stream has passed the mark; does not wait."""

    def synchronize(self) -> None:
        """Wait, on the host, until it has."""

    def elapsed_time(self, end: Any, /) -> float:
        """Milliseconds from this mark to a later one; both must have been passed."""


class Stream(Protocol):
    """A queue of work that a device runs in order."""

    def wait_event(self, event: Any, /) -> None:
        """Let what is queued from now on wait for a mark in another stream; the host goes on."""


class Streams(Protocol):
    """A device's queues and the memory on the other side."""

    def current(self) -> Stream:
        """The stream that ops of this thread go to at this moment; streams compare with ``==``."""

    def side(self) -> Stream:
        """A new stream."""

    def mark(self, stream: Stream) -> Event:
        """A new mark behind all that is queued in ``stream``."""

    def copy(self, stream: Stream, into: Tensor, source: Tensor) -> None:
        """Queue a copy between device and pinned memory; the host goes on. Not from two threads at once."""

    def hold(self, tensor: Tensor, stream: Stream) -> None:
        """When ``tensor`` is freed, its memory is not used again before ``stream`` has done what is queued then."""

    def pinned(self, nbytes: int) -> Tensor:
        """Flat ``torch.uint8`` in pinned memory; a power of two takes what it says, others may take more.

        When it is freed, copies that are queued still find it.

        Raises:
            RuntimeError: the driver refuses.
        """

    def trim(self) -> None:
        """Give pinned memory that has been freed back to the system."""


class DeviceStreams:
    """The streams of a CUDA, ROCm or XPU device."""

    def __init__(self, device: torch.device) -> None:
        index = cast("int | None", device.index)  # None, whatever the stubs say, for a device without a number
        index = torch.accelerator.current_device_index() if index is None else index
        self._device = torch.device(device.type, index)

    def current(self) -> Stream:
        """See `Streams`."""
        return torch.accelerator.current_stream(self._device)

    def side(self) -> Stream:
        """See `Streams`."""
        return torch.Stream(self._device)

    def mark(self, stream: Stream) -> Event:
        """See `Streams`."""
        event = torch.Event(self._device, enable_timing=True)
        event.record(cast(torch.Stream, stream))
        return event

    def copy(self, stream: Stream, into: Tensor, source: Tensor) -> None:
        """See `Streams`; the stream is an object of its own for each place, and `with` keeps its state in it."""
        with cast(torch.Stream, stream), _NoModes(), torch.no_grad():
            into.copy_(source, non_blocking=True)

    def hold(self, tensor: Tensor, stream: Stream) -> None:
        """See `Streams`: the caching allocator's own means."""
        with _NoModes():
            tensor.record_stream(cast(torch.Stream, stream))

    def pinned(self, nbytes: int) -> Tensor:
        """See `Streams`. PyTorch's host allocator rounds up to a power of two, and frees behind queued copies."""
        # A tensor that is made in inference mode could not be written to outside of it.
        with _NoModes(), torch.inference_mode(False):
            return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)

    def trim(self) -> None:
        """See `Streams`; that memory is the whole process's."""
        torch.accelerator.empty_host_cache()


def host_refusal(device: torch.device) -> str | None:
    """Why contents of a device cannot go to host memory, as a sentence that names the way out; None: they can."""
    if device.type in ("cuda", "xpu"):
        return None
    if device.type == "cpu":
        reason = "the model is on the CPU: host memory is the memory that it would leave"
    elif device.type == "mps":
        reason = "the model is on mps, whose memory is the host's: nothing would be gained"
    else:
        reason = f"pinned transfers between {device.type} and host memory have not been tried (cuda and xpu can do it)"
    return f'offload="cpu" makes no sense here, {reason}; use offload="disk".'
