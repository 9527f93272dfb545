"""Counting what one step takes, from its beginning to the end of its backward."""

from __future__ import annotations

import threading
from collections.abc import Callable
from weakref import ref as weakref

import torch

from lightning_remat.engine.plain import watch_backward
from lightning_remat.runtime.memory import PeakResult, Recorder


class StepWatch:
    """Counts allocations of one step, until the step has been left and all of its backward has run.

    When that is, nobody says. It is seen at the end of a backward pass, or when an optimizer begins its step, or at the
    latest when the next step begins.

    Args:
        device: where memory is counted.

    Attributes:
        recorder: the count.
        left: the step has been left.
        passes: backward passes that have run to their end.
        failed: a pass did not.
    """

    _running = False

    def __init__(self, device: torch.device) -> None:
        self.recorder = Recorder(device)
        self.left = False
        self.passes = 0
        self.failed = False
        self._thread = threading.get_ident()
        self._unwatch: Callable[[], None] = lambda: None

    def start(self) -> None:
        """Begin to count."""
        self.recorder.start()
        self._running = True
        # The list of watchers is global and must not keep us alive.
        me = weakref(self)

        def ended(whole: bool) -> None:
            watch = me()
            if watch is not None:
                watch._backward_ended(whole)

        self._unwatch = watch_backward(ended)

    def stop(self) -> None:
        """End the count; safe to repeat."""
        if self._running:
            self._running = False
            self._unwatch()
            self.recorder.stop()

    def __del__(self) -> None:
        self.stop()

    @property
    def running(self) -> bool:
        """Whether there is still something to count."""
        return self._running

    def leave(self) -> None:
        """The step has been left; backward may have run already, or is still to come."""
        self.left = True
        if self.passes and self._is_over():
            self.stop()

    def update(self) -> None:
        """An optimizer begins its step: whatever comes now is none of the step's that was left before."""
        if self.left and threading.get_ident() == self._thread:
            self.stop()

    def _backward_ended(self, whole: bool) -> None:
        if threading.get_ident() != self._thread:
            return
        self.passes += whole
        self.failed = self.failed or not whole
        # Not from inside the engine: there the profiler cannot be switched off for the thread that called.
        if self.left and self._is_over():
            self.stop()

    def _is_over(self) -> bool:
        """Whether no backward is to come, as far as one can see."""
        return True

    @property
    def complete(self) -> bool:
        """Whether the whole step was seen, backward included."""
        return self.passes > 0 and not self.failed and self.recorder.complete


class Measurement(StepWatch):
    """The peak of an ordinary step.

    Args:
        device: where memory is counted.
        passes: how many backward passes such a step has.
    """

    def __init__(self, device: torch.device, passes: int = 1) -> None:
        super().__init__(device)
        self.expected = passes
        self.start()
        self.recorder.mark()

    def _is_over(self) -> bool:
        return self.passes >= self.expected

    def result(self) -> PeakResult:
        """What was counted, above what was there at the beginning."""
        return self.recorder.result()
