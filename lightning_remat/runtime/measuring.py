"""Counting what one ordinary step takes, from its beginning to the end of its backward."""

from __future__ import annotations

from collections.abc import Callable

import torch

from lightning_remat.engine.plain import watch_backward
from lightning_remat.runtime.memory import PeakResult, Recorder


class Measurement:
    """Allocations of one step; begins when it is made, ends with :meth:`stop` or the first backward after the step.

    Attributes:
        step_over: set when the step has been left.
        complete: backward has run to its end.
        result: what was counted, once it has stopped.
    """

    def __init__(self, device: torch.device) -> None:
        self.step_over = False
        self.complete = False
        self.result: PeakResult | None = None
        self._recorder: Recorder | None = Recorder(device)
        self._recorder.start()
        self._unwatch: Callable[[], None] = watch_backward(self._backward_ended)

    @property
    def peak_bytes(self) -> int:
        """Most bytes above what was there at the beginning."""
        return self.result.peak_bytes if self.result is not None else 0

    def stop(self) -> None:
        """End the count; safe to repeat."""
        recorder, self._recorder = self._recorder, None
        if recorder is not None:
            self._unwatch()
            recorder.stop()
            self.result = recorder.result()

    def _backward_ended(self) -> None:
        self.complete = True
        if self.step_over:
            self.stop()
