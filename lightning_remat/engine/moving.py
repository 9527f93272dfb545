"""Tapes of fixed policies with offload: what the policy keeps may leave."""

from __future__ import annotations

from typing import Any

from lightning_remat.engine.ledger import Ledger, LedgerTape
from lightning_remat.engine.offload.mover import Mover
from lightning_remat.engine.replay import Clock
from lightning_remat.engine.spread import whose
from lightning_remat.engine.tape import Tape


class MovingTape(Tape):  # type: ignore[no-untyped-call]  # torch's __init_subclass__ has no types
    """A tape under which everything that the step makes may leave the device once something holds it.

    Args:
        clock: of replay.
        mover: moves it.
    """

    def __init__(self, clock: Clock, mover: Mover) -> None:
        super().__init__(clock)
        self.mover = mover
        self.borders = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one op as the plain tape does; note what it has made."""
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if not self.paused and not (types and whose(types)):
            self.may_leave(func, out)
        return out


class MovingLedgerTape(MovingTape, LedgerTape):  # type: ignore[no-untyped-call]  # torch's __init_subclass__ has no types
    """The same, for a first step: it keeps a ledger of everything it sees."""

    def __init__(self, clock: Clock, ledger: Ledger, mover: Mover) -> None:
        LedgerTape.__init__(self, clock, ledger)
        self.mover = mover
        self.borders = True
