"""Where contents go that leave the device: what every place can do, and what is counted there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass
class Traffic:
    """What a place has moved so far.

    Attributes:
        bytes_out: bytes that have left the device.
        bytes_in: bytes that have come back.
        seconds_out, seconds_in: for how long transfers ran in each direction, whether anybody waited or not.
        waited_seconds: for how long the training step stood still for them.
        failures: contents that could not be written or read, or did not come back as they were.
        refused: contents that were not taken since there was no room.
    """

    bytes_out: int = 0
    bytes_in: int = 0
    seconds_out: float = 0.0
    seconds_in: float = 0.0
    waited_seconds: float = 0.0
    failures: int = 0
    refused: int = 0

    @property
    def hidden(self) -> float | None:
        """Share of the transfers' time in which the step went on; None: nothing was moved."""
        busy = self.seconds_out + self.seconds_in
        return max(0.0, 1.0 - self.waited_seconds / busy) if busy > 0 else None


class Content(Protocol):
    """The bytes of one storage: on their way to a place, there, or on their way back.

    Held by one owner, who calls the methods in this order: ``finish_out``, then any number of times ``begin_back`` and
    ``finish_back``, and ``release`` at any time.
    """

    nbytes: int

    def is_out(self) -> bool:
        """Whether all bytes have arrived at the place; never waits and never raises."""

    def finish_out(self) -> None:
        """Wait until they have; from then on the source may be written to or freed.

        On an accelerator it is the current stream that waits, not the caller.

        Raises:
            OffloadError: they could not be written. The source is as it was, and the content is released.
        """

    def begin_back(self, into: Tensor) -> None:
        """Begin to copy them back; to be called after ``finish_out``, and not twice without ``finish_back``.

        Args:
            into: flat, ``torch.uint8``, ``nbytes`` elements, on the device they came from. Nobody else touches it
                before ``finish_back`` has returned; it is held until then.
        """

    def finish_back(self) -> None:
        """Wait until ``into`` is filled; on an accelerator it is the current stream that waits.

        Raises:
            OffloadError: they could not be read, or are not what was written.
        """

    def release(self) -> None:
        """Nobody wants them any more: give their room back.

        From any thread, at any time (also while a transfer is running: then as soon as it has ended), any number of
        times; never waits and never raises.
        """


class Place(Protocol):
    """Host memory or a disk.

    Attributes:
        name: ``"cpu"`` or ``"disk"``.
        traffic: what was moved.
        used_bytes: what the contents that are there take now.
        peak_bytes: the most that they took.
    """

    name: str
    traffic: Traffic
    used_bytes: int
    peak_bytes: int

    def take(self, source: Tensor) -> Content:
        """Begin to copy a storage's bytes out.

        Args:
            source: flat, ``torch.uint8``, over the whole storage. It is held, and must not change, until
                ``finish_out`` of the content has returned.

        Raises:
            OffloadError: there is no room (the cap is reached, or the place is full or closed), said at once and
                without waiting; nothing has changed.
        """

    def close(self) -> None:
        """Let running transfers end, give back everything and end all threads; safe to repeat.

        Contents that are still held raise ``OffloadError`` when they are asked for.
        """
