"""Running a step again that memory ran out in: undo, tighten, once more. No batch is lost, and none is trained twice.

The same is done, without offload, for a step that has lost what had left the device.

An op that cannot be run again by itself (:mod:`~lightning_remat.engine.eviction` does what it can) fails its step. Then
everything that the step had changed is put back, the next try needs less memory, and the same batch is run again. The
number of tries is bounded; when the tightest way fails too, one error says what was needed and what there was.
"""

from __future__ import annotations

import dis
import gc
import logging
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import torch

from lightning_remat.engine.out_of_memory import bytes_asked, is_out_of_memory
from lightning_remat.errors import NoMemoryLeft, OffloadError
from lightning_remat.runtime.counters import Counters
from lightning_remat.sizes import format_bytes

log = logging.getLogger("lightning_remat")

T = TypeVar("T")


class Undo(Protocol):
    """Something that a step changes."""

    def take(self) -> None:
        """Note what it is before the step."""

    def why_not(self) -> str | None:
        """Why it cannot be put back, as the end of a sentence; None: it can."""

    def restore(self, *, leave: frozenset[str] = frozenset()) -> None:
        """Put it back; may be called several times.

        Args:
            leave: names of switches (attributes of modules) that stay as the failed try has set them.
        """

    def release(self) -> None:
        """The step went well: forget what was noted."""


class Way(Protocol):
    """What whoever runs steps can do about memory."""

    def tighten(self, asked: int | None) -> tuple[str, bool]:
        """Make the next try need less.

        Args:
            asked: bytes that could not be had; None: not known.

        Returns:
            What is tried next, in words, and whether it needs less.
        """

    def run_without(self, error: OffloadError) -> tuple[str, bool]:
        """What had left the device cannot be had back: make the next try move nothing; the rest is as above."""

    def settled(self) -> None:
        """A step that had to be run again has gone well."""

    def give_up(self, error: BaseException, tries: int, why: str | None) -> NoMemoryLeft:
        """The error to raise in the end; ``why`` says why the step cannot be run again, if it is not for memory."""


class Retry:
    """Runs steps.

    Args:
        retries: how often a step is run again; 0: never.
        counters: where it is counted.

    Attributes:
        running: a step is being run.
    """

    def __init__(self, retries: int, counters: Counters) -> None:
        self.retries = retries
        self.counters = counters
        self._undo: Sequence[Undo] = ()
        self.running = False
        self._taken = False

    def take(self) -> None:
        """Note the present state as the one to come back to; for steps that begin with something that is not theirs."""
        if self.running and not self._taken:
            for part in self._undo:
                part.take()
            self._taken = True

    def run(
        self,
        step: Callable[[], T],
        way: Way,
        undo: Sequence[Undo] = (),
        *,
        deferred: bool = False,
        ours: Callable[[BaseException], bool] = lambda error: True,
    ) -> T:
        """Run ``step``, again where need be.

        Args:
            step: forward and backward.
            way: of needing less.
            undo: all that it changes.
            deferred: it calls :meth:`take` itself, when what is not to be repeated has been done.
            ours: whether an out-of-memory error comes from something that may be run again.

        Raises:
            NoMemoryLeft: it does not fit, whatever is done, or cannot be undone; what could be put back was.
        """
        if self.running or not self.retries:
            return step()
        self.running, self._taken = True, False
        self._undo = undo
        try:
            if not deferred:
                self.take()
            return self._until_it_fits(step, way, ours)
        finally:
            for part in undo:
                part.release()
            self._undo = ()
            self.running = False

    def _until_it_fits(self, step: Callable[[], T], way: Way, ours: Callable[[BaseException], bool]) -> T:
        tries = 0
        while True:
            asked: int | None
            steps = self.counters.steps
            try:
                result = step()
            except Exception as error:
                lost = isinstance(error, OffloadError)
                if isinstance(error, NoMemoryLeft) or not (lost or is_out_of_memory(error)) or not ours(error):
                    raise
                self.counters.out_of_memory += not lost
                self.counters.steps = steps  # its forward may have counted it
                tries += 1
                asked = bytes_asked(error)
                if not self._taken or tries > self.retries:
                    why = self._restore() if self._taken else "memory ran out before the step itself had begun"
                    if lost:
                        raise  # it says itself what to do
                    raise way.give_up(error, tries, why) from error
                next_try, tighter = way.run_without(error) if isinstance(error, OffloadError) else way.tighten(asked)
                said = str(error.__cause__ if lost and isinstance(error.__cause__, OffloadError) else error)
                last = tries == self.retries and not tighter
                leave = switched_before_raising(error) if last else frozenset()
                # What is left of it holds the step's tensors: nothing is undone before it has gone.
            else:
                if tries:
                    way.settled()
                return result
            collect()
            why = self._restore(leave)
            if why is not None and lost:
                raise OffloadError(
                    f"{said} The step cannot be run again without offload: {why}. Start again from the last "
                    "checkpoint, with another place in offload= or without it. No batch was skipped: training stops at "
                    "this one."
                )
            if why is not None:
                raise way.give_up(torch.OutOfMemoryError(said), tries, why) from None
            self.counters.retries += 1
            self.counters.retried_batches += tries == 1
            if lost:
                log.warning("%s A training step needs it: the same batch is run again, %s.", said, next_try)
                continue
            wanted = f" ({format_bytes(asked)} could not be had)" if asked else ""
            log.warning("out of memory in a training step%s: the same batch is run again, %s.", wanted, next_try)

    def _restore(self, leave: frozenset[str] = frozenset()) -> str | None:
        """Leave things as they were before the step; why that cannot be, and then nothing is changed."""
        reasons = (part.why_not() for part in self._undo)
        why = next((reason for reason in reasons if reason is not None), None)
        if why is None:
            for part in self._undo:
                part.restore(leave=leave)
        return why


def collect() -> None:
    """Free what a failed step has left behind."""
    gc.collect()
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch's
        torch.cuda.empty_cache()


def switched_before_raising(error: BaseException) -> frozenset[str]:
    """Names of attributes that the function which raised an error by a statement of its own also sets.

    Code that fails on purpose "the first time" notes that in a switch; put back, it would fail for ever. An allocator's
    error comes out of a call and not out of such a statement, and then there is nothing: all is put back.
    """
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None:
        return frozenset()
    instructions = list(dis.get_instructions(trace.tb_frame.f_code))
    if not any(i.offset == trace.tb_lasti and i.opname == "RAISE_VARARGS" for i in instructions):
        return frozenset()
    return frozenset(i.argval for i in instructions if i.opname == "STORE_ATTR")


def comes_through(error: BaseException, function: str, module: str) -> bool:
    """Whether an exception passed through a function of this name, in a module whose name ends like this."""
    trace: Any = error.__traceback__
    while trace is not None:
        frame = trace.tb_frame
        if frame.f_code.co_name == function and str(frame.f_globals.get("__name__", "")).endswith(module):
            return True
        trace = trace.tb_next
    return False
