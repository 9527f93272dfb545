"""Several processes, each with a replica: what of a failed step can be made right by one of them alone.

As long as a process has started no collective since its own part of the step began, the others wait for it, or are not
that far; it can undo and run its part again, and nobody notices but by the clock. After that its part in a sum may be
gone already, and nothing can be made right.

PyTorch's DistributedDataParallel has to be told: its reducer counts the gradients that are ready, and a second backward
would be one too many; its buffers have been broadcast, and must not be again. (``reducer._reset_state`` exists for
training that survives the loss of a process.)
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from lightning_remat.runtime.recovery.company import BEGUN, sequences


class Replica:
    """A DistributedDataParallel wrapper, as something that a step changes: a part of what is undone.

    Args:
        model: the wrapper.
    """

    def __init__(self, model: DistributedDataParallel) -> None:
        self.model = model
        self._sequences: dict[int, int] = {}
        self._used: torch.Tensor | None = None
        self._rebuilt_here = False  # the reducer was reset after all processes had arranged their buckets
        self._synchronised: bool | None = None
        self._reduced = False  # a whole step with reduction has been seen

    def before_forward(self) -> None:
        """The wrapper's forward is about to begin, for the first time or again."""
        if self._rebuilt_here:
            # A reducer that was reset wants to arrange its buckets anew, together with the others, who know nothing.
            self._reset()

    def take(self) -> None:
        """The wrapper has done what it does before forward."""
        self._sequences = sequences()
        reducer: Any = self.model.reducer
        self._used = reducer._get_local_used_map().clone() if self.model.find_unused_parameters else None

    def why_not(self) -> str | None:
        """A collective has been started, or the graph of the first step was to be noted."""
        if sequences() != self._sequences:
            return BEGUN
        if self.model.static_graph and not self._reduced:
            return "static_graph=True notes the graph of the first step, which cannot be done twice"
        return None

    def restore(self, *, leave: frozenset[str] = frozenset()) -> None:
        """Make it ready for another forward of the same batch."""
        model = self.model
        if model._has_rebuilt_buckets and not model.find_unused_parameters:
            self._rebuilt_here = True
        self._reset()
        if self._synchronised is None:
            self._synchronised = model.broadcast_buffers
            model.broadcast_buffers = False  # they have been; the others do not expect it again

    def release(self) -> None:
        """The step is over."""
        self._reduced = self._reduced or bool(self.model.require_backward_grad_sync)
        if self._synchronised is not None:
            self.model.broadcast_buffers = self._synchronised
            self._synchronised = None

    def _reset(self) -> None:
        reducer: Any = self.model.reducer
        reducer._reset_state()
        if self._used is not None:
            reducer._get_local_used_map().copy_(self._used)
