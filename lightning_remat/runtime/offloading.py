"""Offload for one engine: the place that its option names, the mover, and what becomes of failures."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import fields, replace
from weakref import WeakMethod

import torch

from lightning_remat.engine.eviction import Eviction
from lightning_remat.engine.offload.disk import DiskPlace
from lightning_remat.engine.offload.host import HostPlace
from lightning_remat.engine.offload.mover import Mover
from lightning_remat.engine.offload.place import Place, Traffic
from lightning_remat.engine.offload.streams import host_refusal
from lightning_remat.engine.tape import Tape
from lightning_remat.errors import ConfigurationError, OffloadError
from lightning_remat.offload_option import Offload
from lightning_remat.runtime.counters import Counters
from lightning_remat.runtime.room import free_memory
from lightning_remat.runtime.saying import Once

_MOST_FAILURES = 3
"""Steps that had to be run again for want of what had left; then nothing leaves any more."""


class Offloading:
    """Offload for the tapes of one engine.

    Args:
        option: where to, within which limits.
        counters: where it is counted.
        eviction: of the engine; it may move as well, and knows how lost contents are computed again.

    Attributes:
        mover: None until the device is known.
        given_up: it has failed too often.
    """

    def __init__(self, option: Offload, counters: Counters, eviction: Eviction) -> None:
        self.option = option
        self.counters = counters
        self.eviction = eviction
        self.mover: Mover | None = None
        self.given_up = False
        self._say = Once("offload")
        self._device: torch.device | None = None
        self._failed_steps = 0
        self._without = False  # the step to come
        self._counted = Traffic()

    def on(self, device: torch.device) -> Mover:
        """The mover for contents of a device.

        Raises:
            ConfigurationError: from there nothing can be moved to the place that the option names.
        """
        if self.mover is None or self._device != device:
            self.close()
            self._device = device
            self.mover = Mover(self._place(device), self.option.least_bytes, self.option.in_flight_bytes, self._say)
            self.mover.rebuild = WeakMethod(self.eviction.rebuild)
            self.eviction.mover = self.mover
            self._counted = Traffic()
        return self.mover

    def _place(self, device: torch.device) -> Place:
        option = self.option
        if option.place == "cpu":
            refusal = host_refusal(device)
            if refusal is not None:
                raise ConfigurationError(f"offload={option.to!r}: {refusal}")
            whole = free_memory(torch.device("cpu")).free_bytes or 0
            return HostPlace(device, budget=option.budget_bytes(whole))
        directory = option.directory
        assert directory is not None  # of every disk
        whole = shutil.disk_usage(directory).free
        return DiskPlace(directory, budget=option.budget_bytes(whole), checksum=option.checksum)

    # ------------------------------------------------------------------ steps

    def begin(
        self,
        tape: Tape,
        order: Sequence[int] | None = None,
        window: int | None = None,
        ahead: int | None = None,
    ) -> None:
        """A step begins under a tape; see :meth:`~lightning_remat.engine.offload.mover.Mover.begin`."""
        mover = self.mover
        if mover is None:
            return
        self.count()
        self.counters.step_begins()
        mover.begin(order, window, ahead)
        mover.halted = self.given_up or self._without
        self._without = False

    def run_without(self, error: OffloadError) -> str:
        """A step lost what had left, and was undone: the next one, moves nothing; how that is called."""
        self._without = True
        self._failed_steps += 1
        if self._failed_steps >= _MOST_FAILURES and not self.given_up:
            self.given_up = True
            self._say("given up", f"{error} This was the {_MOST_FAILURES}rd time: from now on nothing is moved.")
        return "without offload"

    def count(self) -> None:
        """Take over what has been moved since the last time."""
        if self.mover is None:
            return
        now, before = self.mover.place.traffic, self._counted
        self._counted = replace(now)
        some = {f.name: getattr(self._counted, f.name) - getattr(before, f.name) for f in fields(Traffic)}
        self.counters.moved(Traffic(**some))

    def close(self) -> None:
        """Give everything back. It may go on later."""
        self.count()
        mover, self.mover = self.mover, None
        self.eviction.mover = None
        if mover is not None:
            mover.place.close()
