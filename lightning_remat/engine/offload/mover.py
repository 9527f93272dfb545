"""Who decides when contents leave the device and come back.

What leaves is copied out in the background, and stays *resident* in a window, first in, first out; what is pushed out
of the window is let go of. In backward, contents are read ahead in the order of the last step, or in one that a plan
gives. Both are bounded by bytes and not by time: how much memory a step takes does not depend on how fast its disk is,
so that it can be foreseen, and what leaves last, just before backward begins, never has to be read.
(Write-behind and read-ahead, as file systems do it; for activations, vDNN, Rhu et al., 2016.)

Known weakness: a content is written even if it is asked for while it is in the window.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from weakref import WeakMethod
from weakref import ref as weakref

import torch
from torch import Tensor

from lightning_remat.engine.offload.moved import Moved
from lightning_remat.engine.offload.place import Place
from lightning_remat.engine.out_of_memory import is_out_of_memory
from lightning_remat.engine.values import Value
from lightning_remat.errors import OffloadError

LEAST_WINDOW = 16 << 20
"""Bytes in flight in each direction, at least, where nobody says how many."""
_LARGEST = 2  # contents that may be in flight: the largest so far, times this

_SECONDS_PER_BYTE = 2e-9  # as long as nobody has measured it: 1 GB/s each way

Rebuild = Callable[[Value], bool]
"""Compute a value again from its recipe; whether that could be done."""


class Mover:
    """Moves the contents of one engine; one step at a time, though contents of earlier ones may be asked for.

    Args:
        place: where they go.
        min_bytes: what is smaller stays.
        in_flight: bytes of the window, and of what is read ahead; None: twice the largest content so far.
        say: called with a topic and a sentence, where something did not work.
        device: from which they leave; contents of others stay. None: from any.

    Attributes:
        window, ahead: the two bounds, in bytes.
        resident_bytes: bytes in the window.
        moved: contents that have left in this step.
        halted: nothing leaves any more in this step.
        failed: something could not be written or read in this step.
        short: nothing is read ahead any more in this step.
        seconds_per_byte: what it takes to write and read a byte, where somebody has to wait for both.
    """

    def __init__(
        self,
        place: Place,
        min_bytes: int,
        in_flight: int | None = None,
        say: Callable[[str, str], None] = lambda topic, text: None,
        device: torch.device | None = None,
    ) -> None:
        self.device = device
        self.place = place
        self.min_bytes = min_bytes
        self.in_flight = in_flight
        self.window = self.ahead = LEAST_WINDOW if in_flight is None else in_flight
        self.resident_bytes = 0
        self.moved = 0
        self.halted = self.failed = self.short = False
        self.seconds_per_byte = _SECONDS_PER_BYTE
        self.rebuild: WeakMethod[Rebuild] | None = None
        self._say = say
        self._step = 0
        self._largest = 0
        self._adapts = in_flight is None
        self._window: deque[weakref[Moved]] = deque()
        self._numbered: list[weakref[Moved]] = []
        self._given: list[int] | None = None
        self._learned: list[int] = []
        self._order: list[int] | None = None
        self._next = 0
        self._outstanding = 0
        self._asked: list[int] = []

    # ------------------------------------------------------------------ the ends of a step

    def begin(self, order: Sequence[int] | None = None, window: int | None = None, ahead: int | None = None) -> None:
        """A step begins.

        Args:
            order: numbers of the contents that will leave, in the order in which they will be asked for; None: as in
                the last step if as many leave, else the last one first.
            window: bytes that are resident; None: as the settings say.
            ahead: bytes that are read ahead; None: likewise.
        """
        default = self.in_flight if self.in_flight is not None else max(LEAST_WINDOW, _LARGEST * self._largest)
        self._adapts = self.in_flight is None and window is None
        self._window = deque(reference for reference in self._window if reference() is not None)
        self.window = default if window is None else window
        self.ahead = default if ahead is None else ahead
        if self._asked:
            self._learned = _completed(self._asked, self.moved)
        self._given = list(order) if order is not None else None
        self._step += 1
        self.moved = 0
        self.halted = self.failed = self.short = False
        self._numbered = []
        self._asked = []
        self._order = None

    # ------------------------------------------------------------------ out

    def leave(self, tensor: Tensor, expected: bool = True) -> Moved | None:
        """Have a content leave; None if it stays.

        Args:
            tensor: without history; sees the storage to be moved. To be called without dispatch modes.
            expected: it leaves in every step, and is to be read ahead.
        """
        storage = tensor.untyped_storage()
        nbytes = storage.nbytes()
        if nbytes < self.min_bytes or self.halted or not nbytes or self.device not in (None, tensor.device):
            return None
        flat = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage, 0, (nbytes,), (1,))
        if not flat.data_ptr():
            return None  # zeros of forward mode, which have a size and no memory
        try:
            content = self.place.take(flat)
        except OffloadError as error:
            self._say("room", f"{error} What cannot leave is kept.")
            return None
        number, step = (self.moved, self._step) if expected else (-1, -1)
        moved = Moved(self, number, step, tensor, content)
        self.resident_bytes += nbytes
        reference = weakref(moved)
        self._window.append(reference)
        if expected:
            self.moved += 1
            self._numbered.append(reference)
            self._order = None
        if nbytes > self._largest:
            self._largest = nbytes
            if self._adapts:
                self.window = self.ahead = max(self.window, _LARGEST * nbytes)
        self._trim(self.window)
        return moved

    def give_way(self) -> int:
        """Memory is short: let go of everything in the window, and read nothing ahead in this step; bytes let go of."""
        self.short = True
        before = self.resident_bytes
        self._trim(0)
        return before - self.resident_bytes

    def _trim(self, window: int) -> None:
        while self.resident_bytes > window and self._window:
            moved = self._window.popleft()()
            if moved is not None:
                moved.let_out()

    # ------------------------------------------------------------------ back

    def pump(self) -> None:
        """Read ahead; to be called in backward, after each request."""
        if self.short:
            return
        if self._order is None:
            self._order = self._expected()
            self._next = 0
        order = self._order
        while self._next < len(order):
            moved = self._numbered[order[self._next]]()
            if moved is None or moved.resident is not None or moved.coming is not None or moved.content is None:
                self._next += 1
                continue
            if self._outstanding and self._outstanding + moved.nbytes > self.ahead:
                return
            self._next += 1
            try:
                moved.begin_back()
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                self.short = True  # from here on what is needed is read when it is
                return
            self._outstanding += moved.nbytes

    def _expected(self) -> list[int]:
        if self._given is not None:
            return [number for number in self._given if number < self.moved]
        if len(self._learned) == self.moved:
            return self._learned
        return list(range(self.moved - 1, -1, -1))

    # ------------------------------------------------------------------ what becomes of a content

    def is_out(self, moved: Moved) -> None:
        """It is no longer resident."""
        self.resident_bytes -= moved.nbytes

    def stays(self, moved: Moved, error: OffloadError) -> None:
        """It could not be written, and is kept as it is."""
        self.resident_bytes -= moved.nbytes
        self.halted = self.failed = True
        self._say("out", f"{error} What could not be moved is kept, and nothing more is moved in this step.")

    def asked_for(self, moved: Moved) -> None:
        """What was read ahead is no longer ahead."""
        self._outstanding -= moved.nbytes

    def fetched(self, moved: Moved) -> None:
        """It is being asked for."""
        if moved.step == self._step:
            self._asked.append(moved.number)

    def recompute(self, value: Value, error: OffloadError) -> bool:
        """It cannot be had back: compute it again, if that is possible."""
        self.halted = self.failed = True
        rebuild = self.rebuild() if self.rebuild is not None else None
        if rebuild is None or not rebuild(value):
            return False
        self._say("in", f"{error} It was computed again instead, and nothing more is moved in this step.")
        return True


def _completed(asked: Sequence[int], count: int) -> list[int]:
    """The numbers in the order in which they were asked for, and then those that were not."""
    found = list(dict.fromkeys(asked))
    rest = set(range(count)) - set(found)
    return found + sorted(rest, reverse=True)
