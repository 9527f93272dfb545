"""Being ready for an op that runs out of memory: eviction, and the rescue of backward.

It costs host time for every op, so it begins when memory has run out for the first time, or at once where several
processes work together, since a step can then not always be undone; it ends when all has been well for a while.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from weakref import WeakMethod

from lightning_remat.engine import rescue
from lightning_remat.engine.eviction import Eviction
from lightning_remat.engine.tape import Tape
from lightning_remat.runtime.counters import Counters

_WHILE = 500
"""Steps without a failure after which it ends."""


class Readiness:
    """Eviction for the tapes of one engine.

    Args:
        counters: where it is counted.
        pressure: method that is told of every eviction, in bytes, as long as its object lives.
        seconds: method that gives the time of the op at a position of the plan in force, likewise.
        lasting: eviction stays with its tapes once it has begun.
    """

    def __init__(
        self,
        counters: Counters,
        pressure: WeakMethod[Callable[[int], None]],
        seconds: WeakMethod[Callable[[int], float]],
        lasting: bool = False,
    ) -> None:
        self._counters = counters
        self._lasting = lasting
        self.eviction = Eviction(_calling(seconds), _counting(counters, pressure))
        self._tapes: list[Tape] = []
        self._disarm: Callable[[], None] | None = None
        self._until = 0
        self._failures = 0

    @property
    def on(self) -> bool:
        """Whether tapes are looked after."""
        return bool(self._tapes)

    def begin(self, tapes: Iterable[Tape]) -> None:
        """Look after these, from their next step on; safe to repeat. To be called between steps."""
        self._until = self._counters.steps + _WHILE
        for tape in tapes:
            if tape not in self._tapes:
                self.eviction.attach(tape)
                self._tapes.append(tape)
        if self._disarm is None:
            self._disarm = rescue.arm(self.eviction)

    def step_over(self) -> None:
        """A step has ended: count, and stop after a while without a failure."""
        if not self._tapes:
            return
        failures, self._failures = self._failures, self.eviction.failures
        if self._failures != failures:
            self._counters.out_of_memory += self._failures - failures
            self._until = self._counters.steps + _WHILE
        elif self._counters.steps > self._until:
            self.end()

    def end(self) -> None:
        """Stop; what was evicted is still computed when it is asked for."""
        tapes, self._tapes = self._tapes, []
        for tape in tapes if not self._lasting else ():
            self.eviction.detach(tape)
        disarm, self._disarm = self._disarm, None
        if disarm is not None:
            disarm()

    def __del__(self) -> None:
        self.end()


# Functions and not methods: whoever lets go of an engine does not wait for the garbage collector.


def _counting(counters: Counters, pressure: WeakMethod[Callable[[int], None]]) -> Callable[[int], None]:
    def evicted(nbytes: int) -> None:
        counters.evictions += 1
        counters.evicted_bytes += nbytes
        tell = pressure()
        if tell is not None:
            tell(nbytes)

    return evicted


def _calling(method: WeakMethod[Callable[[int], float]]) -> Callable[[int], float]:
    def seconds(position: int) -> float:
        found = method()
        return found(position) if found is not None else 0.0

    return seconds
