"""What a process does that training ends in by an error, while the others may still train.

Callbacks may save a checkpoint then (``ModelCheckpoint(save_on_exception=True)``), which waits for all processes: for
ever, where the others wait in a collective of their step. So it is found out first whether all have been interrupted.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from lightning_remat.runtime.recovery.company import is_distributed
from lightning_remat.runtime.recovery.exhausted import with_note
from lightning_remat.runtime.recovery.word import all_interrupted, is_lost_connection

_NOT_SAVED = (
    "lightning-remat: no checkpoint was saved at this error: parameters are spread over all processes, and not all of "
    "them have come to it. Training can go on from the checkpoint before."
)
_TOGETHER = ("FSDPStrategy", "ModelParallelStrategy")


class Parting:
    """Looks after the communication of one strategy when training is interrupted.

    Args:
        explain: is told of the error that ends training, before anything else is done.
    """

    def __init__(self, explain: Callable[[BaseException], None]) -> None:
        self._explain = explain
        self._known: tuple[int, bool] | None = None  # of which error it is known whether all have met one

    def alone(self, strategy: Any) -> BaseException | None:
        """The error that ends training in this process, and not in all of them."""
        trainer = getattr(strategy.lightning_module, "_trainer", None)
        error = sys.exc_info()[1]
        if error is None or trainer is None or trainer.state.status != "interrupted" or not is_distributed():
            return None
        if self._known is None or self._known[0] != id(error):
            self._explain(error)
            self._known = id(error), not is_lost_connection(error) and all_interrupted()
        return None if self._known[1] else error

    def before_state(self, strategy: Any) -> None:
        """The state of something is asked for, which may take all processes.

        Raises:
            BaseException: the error that ends training, again: not all would take part.
        """
        if any(c.__name__ in _TOGETHER for c in type(strategy).__mro__):
            error = self.alone(strategy)
            if error is not None:
                raise with_note(error, _NOT_SAVED)
