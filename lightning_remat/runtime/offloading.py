"""Offload for one engine: the place that its option names, the mover, and what becomes of failures."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import fields, replace
from statistics import median
from weakref import WeakMethod

import torch

from lightning_remat.engine.eviction import Eviction
from lightning_remat.engine.offload.disk import DiskPlace
from lightning_remat.engine.offload.extents import BLOCK
from lightning_remat.engine.offload.host import HostPlace
from lightning_remat.engine.offload.mover import Mover
from lightning_remat.engine.offload.place import Place, Traffic
from lightning_remat.engine.offload.streams import host_refusal
from lightning_remat.engine.planned import PlannedTape
from lightning_remat.engine.tape import Tape
from lightning_remat.errors import ConfigurationError, OffloadError
from lightning_remat.offload_option import Offload
from lightning_remat.planning.trace import Trace
from lightning_remat.planning.transfer import Transfer
from lightning_remat.runtime.bandwidth import (
    CONTENT_BYTES,
    TINY_BYTES,
    TOTAL_BYTES,
    Bandwidth,
    bandwidth_of,
    device_name,
    key_of_disk,
    key_of_host,
)
from lightning_remat.runtime.counters import Counters
from lightning_remat.runtime.room import free_memory
from lightning_remat.runtime.saying import Once

_IN_FLIGHT = 2  # contents of the largest size, in each direction, where nobody says how many bytes
_IN_A_ROW = 4  # steps in which transfers are slower than measured
_SLOWER = 2.0  # by more than this factor, until that is believed
_WORTH_A_LOOK = 1 << 24  # bytes in a step, for its speed to say anything

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
        self._without = False  # until the step that is run again is over
        self._counted = Traffic()
        self._bandwidth: Bandwidth | None = None
        self._cap: int | None = None
        self._slower: list[float] = []

    def on(self, device: torch.device) -> Mover:
        """The mover for contents of a device.

        Raises:
            ConfigurationError: from there nothing can be moved to the place that the option names.
        """
        if self.mover is None or self._device != device:
            self.close()
            self._device = device
            self.mover = Mover(
                self._place(device), self.option.least_bytes, self.option.in_flight_bytes, self._say, device
            )
            self.mover.rebuild = WeakMethod(self.eviction.rebuild)
            self.eviction.mover = self.mover
            self._counted = Traffic()
        return self.mover

    def check(self, device: torch.device) -> None:
        """See whether contents can leave a device for the place.

        Raises:
            ConfigurationError: they cannot, or it would free nothing.
        """
        refusal = host_refusal(device) if self.option.place == "cpu" else None
        if refusal is not None:
            raise ConfigurationError(f"offload={self.option.to!r}: {refusal}")

    def _place(self, device: torch.device) -> Place:
        option = self.option
        self.check(device)
        if option.place == "cpu":
            whole = free_memory(torch.device("cpu")).free_bytes or 0
            self._cap = option.budget_bytes(whole)
            return HostPlace(device, budget=self._cap)
        directory = option.directory
        assert directory is not None  # of every disk
        try:
            whole = shutil.disk_usage(directory).free
        except OSError as error:
            raise ConfigurationError(
                f"offload={option.to!r}: {str(directory)!r} could be used when the option was given, and cannot any "
                f"more ({error.strerror}). Create it again, or name another directory."
            ) from error
        self._cap = option.budget_bytes(whole)
        return DiskPlace(directory, budget=self._cap, checksum=option.checksum)

    # ------------------------------------------------------------------ steps

    def begin(
        self,
        tape: Tape,
        order: Sequence[int] | None = None,
        window: int | None = None,
        ahead: int | None = None,
    ) -> None:
        """A step begins under a tape; see :meth:`~lightning_remat.engine.offload.mover.Mover.begin`."""
        if isinstance(tape, PlannedTape) and window is not None and tape.mover is not self.mover:
            tape.mover = self.mover
            self.eviction.attach(tape)  # which knows how to compute again what is lost
        mover = self.mover
        if mover is None:
            return
        self.count()
        self._hold_against_measured()
        self.counters.step_begins()
        mover.begin(order, window, ahead)
        mover.halted = self.given_up or self._without

    @property
    def moved_less(self) -> bool:
        """Whether something stayed in the last step that would have left, had nothing gone wrong."""
        return self.mover is not None and (self.mover.failed or self.mover.halted)

    def run_without(self, error: OffloadError) -> str:
        """A step lost what had left, and was undone: the next try moves nothing; how that is called."""
        self._without = True
        self._failed_steps += 1
        if self._failed_steps >= _MOST_FAILURES and not self.given_up:
            self.given_up = True
            said = error.__cause__ if isinstance(error.__cause__, OffloadError) else error
            self._say(
                "given up",
                f"{said} {_MOST_FAILURES} steps had to be run again for that: from now on nothing is moved, and steps "
                "take the more memory.",
            )
        return "without offload"

    def step_over(self) -> None:
        """The step that was run again has gone well, or has failed for good: the next one moves again."""
        self._without = False

    def count(self) -> None:
        """Take over what has been moved since the last time."""
        if self.mover is None:
            return
        now, before = self.mover.place.traffic, self._counted
        self._counted = replace(now)
        some = {f.name: getattr(self._counted, f.name) - getattr(before, f.name) for f in fields(Traffic)}
        self.counters.moved(Traffic(**some))

    # ------------------------------------------------------------------ how fast

    def transfer(self, trace: Trace, device: torch.device) -> Transfer | None:
        """What is known of the place, for plans of a trace; measured the first time. None: nothing moves there."""
        if self.given_up:
            return None
        try:
            mover = self.on(device)
            if self._bandwidth is None:
                self._bandwidth = self._measured(mover.place, device)
        except OffloadError as error:
            self.given_up = True
            self._say("measuring", f"{error} Nothing is moved.")
            return None
        rates = self._bandwidth
        largest = max(trace.nbytes, default=0)
        in_flight = self.option.in_flight_bytes
        bound = _IN_FLIGHT * largest if in_flight is None else in_flight
        return Transfer(
            out_bytes_per_second=rates.out_bytes_per_second,
            in_bytes_per_second=rates.in_bytes_per_second,
            latency_seconds=rates.latency_seconds,
            # Elsewhere the processor has time while the device computes.
            cpu_seconds_per_byte=rates.delay_seconds_per_byte if device.type == "cpu" else 0.0,
            min_bytes=self.option.least_bytes,
            window_bytes=bound,
            ahead_bytes=bound,
            cap_bytes=self._cap,
            adjustable=in_flight is None,
        )

    def _measured(self, place: Place, device: torch.device) -> Bandwidth:
        option = self.option
        if option.directory is None:
            key, where = key_of_host(device), device_name(device)
        else:
            key, where = key_of_disk(option.directory, option.checksum), str(option.directory)
        cap = TOTAL_BYTES if self._cap is None else max(self._cap // BLOCK * BLOCK, TINY_BYTES)
        total, content = (
            min(TOTAL_BYTES, cap),
            min(CONTENT_BYTES, cap),
        )  # what the budget is too small for would be refused
        found = bandwidth_of(place, key, where, device=device, total_bytes=total, content_bytes=content)
        self._counted = replace(place.traffic)
        if self.mover is not None:
            self.mover.seconds_per_byte = 1 / found.out_bytes_per_second + 1 / found.in_bytes_per_second
        return found

    def _hold_against_measured(self) -> None:
        """See whether the last step's transfers were as fast as measured before; if not for a while, believe it."""
        rates, counters = self._bandwidth, self.counters
        moved_out, moved_in = counters.last_bytes_out, counters.last_bytes_in
        if rates is None or min(moved_out, moved_in) < _WORTH_A_LOOK:
            return
        expected = moved_out / rates.out_bytes_per_second + moved_in / rates.in_bytes_per_second
        slower = counters.last_transfer_seconds / expected
        self._slower = [*self._slower[1 - _IN_A_ROW :], slower]
        if len(self._slower) == _IN_A_ROW and min(self._slower) > _SLOWER:
            factor = median(self._slower)
            self._slower = []
            self._bandwidth = replace(
                rates,
                out_bytes_per_second=rates.out_bytes_per_second / factor,
                in_bytes_per_second=rates.in_bytes_per_second / factor,
            )
            self.counters.note(f"transfers take {factor:.1f} times as long as was measured: plans are made anew")

    def close(self) -> None:
        """Give everything back. It may go on later."""
        self.count()
        mover, self.mover = self.mover, None
        self.eviction.mover = None
        if mover is not None:
            mover.place.close()
