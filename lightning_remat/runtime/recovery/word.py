"""How processes that train together learn that one of them has ended, and why, so that all of them can say the same.

The only thing that one which waits in a collective is told is that a connection is closed. So whoever ends by an error
leaves word before, in the store through which the processes have found each other. The first word holds: those that end
since another has ended say what that one has said.

While steps run, a thread of each process looks into the store now and then. It reads words as soon as they are there,
since the store goes with the process of rank zero; and when a process has gone without a word, it answers a roll call,
by which the others find out which one that was.
"""

from __future__ import annotations

import atexit
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from time import monotonic, sleep
from typing import Any
from uuid import uuid4

import torch.distributed as dist

from lightning_remat.errors import NoMemoryLeft, OffloadError, RematError
from lightning_remat.runtime.recovery.company import is_distributed
from lightning_remat.runtime.recovery.exhausted import with_note

_KEY = "lightning_remat/ended"
_CALL = "roll call "
_EVERY = 0.2  # seconds between two looks
_LONGEST = 8000  # characters of an error that others are told
_PATIENCE = 2.0  # seconds until those that have not answered are taken for gone

_WITHOUT_A_WORD = (
    "without a word, as one does that the system has killed (the host's memory may have run out) or whose machine was "
    "lost. Its own output and the system's log may say more; training can go on from its last checkpoint."
)
_NOBODY_TO_ASK = (
    "and rank zero, which has the store of all processes and would know why, has ended too: its own output says more, "
    "or the system's log if it was killed (the host's memory may have run out). Training can go on from its last "
    "checkpoint."
)

_CLOSED = ("connection closed by peer", "connection reset by peer", "remote process exited", "broken pipe")
_LOST = (
    *_CLOSED,
    "socket closed",
    "heartbeat",
    "timed out waiting",
    "communicator was aborted",
    "gloo/transport/",
)


def is_lost_connection(error: BaseException) -> bool:
    """Whether a collective failed, probably since another process is gone."""
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and _says(error, _LOST))


def _says(error: BaseException, phrases: tuple[str, ...]) -> bool:
    text = _text(error).lower()
    return any(phrase in text for phrase in phrases)


def _text(error: BaseException) -> str:
    try:
        return str(error).strip()
    except Exception:  # a class of the user's own may fail at this
        return ""


class _Listener:
    """Looks into the store while steps run, on a thread of its own."""

    def __init__(self) -> None:
        self.word = ""
        self._mine = ""  # what this process has left
        self._users = 0
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self._number = 0  # of trainings and steps so far
        self._at_exit = False

    # ------------------------------------------------------------------ while steps run

    def begin(self) -> None:
        """A step or a training begins; what this process has said of an earlier one does not hold any more."""
        self._users += 1
        if self._users > 1:
            return
        self.word = ""
        if self._mine:
            mine, self._mine = self._mine, ""
            try:
                _store().compare_set(_KEY, mine, "")
            except (RuntimeError, ValueError):  # the store is gone
                return
        if self._thread is None:
            atexit.register(self._stop)
        self._number += 1
        self._over = threading.Event()
        self._thread = threading.Thread(
            target=self._listen, args=(self._over,), name="lightning-remat-ranks", daemon=True
        )
        self._thread.start()

    def end(self) -> None:
        """It is over."""
        self._users -= 1
        if not self._users:
            self._over.set()

    def _listen(self, over: threading.Event) -> None:
        answered = ""
        while not over.wait(_EVERY):
            try:
                store = _store()
                said = _read(store)
                if said != answered:
                    answered = said
                    if not said.startswith(_CALL):
                        self.word = said
                    store.set(_place(dist.get_rank()), _short(said))
            except (RuntimeError, ValueError):  # the store is gone, or the group was destroyed
                return

    def _stop(self) -> None:
        """The process ends, and with it what a thread would need."""
        self._over.set()
        if self._thread is not None:
            self._thread.join(_PATIENCE)

    # ------------------------------------------------------------------ when one has ended

    def leave(self, text: str, gone: frozenset[int] = frozenset(), *, at_exit: bool = False) -> str:
        """Leave word, and see to it that the others can read it; the word that holds.

        Args:
            text: why this process ends, or, after a roll call, who has ended.
            gone: ranks that are known to read nothing any more.
            at_exit: the others get their time when this process ends, which it may not do.

        Raises:
            RuntimeError: the store is gone.
        """
        store = _store()
        said = _read(store)
        while not said or said.startswith(_CALL):
            found = store.compare_set(_KEY, said, text).decode()
            if found == text:
                self._mine = text
            said = found
        store.set(_place(dist.get_rank()), _short(said))
        if dist.get_rank() == 0:  # which takes the store with it
            if not at_exit:
                _wait_for_answers(store, said, gone)
            elif not self._at_exit:
                self._at_exit = True
                atexit.register(self._give_time)
        return said

    def _give_time(self) -> None:
        """The process ends, and may have left word."""
        try:
            if self._mine and is_distributed():
                _wait_for_answers(_store(), self._mine, frozenset())
        except RuntimeError:  # the store is gone
            return

    def cause(self, closed: bool) -> str | None:
        """Who has ended and why, when a collective has failed; None: all others still answer.

        Args:
            closed: it failed since a connection was closed, so that one has certainly gone.
        """
        try:
            store = _store()
            said = _read(store)
            while not said or said.startswith(_CALL):
                call = said or f"{_CALL}{uuid4()}"
                said = said or store.compare_set(_KEY, "", call).decode()
                if said != call:
                    continue
                store.set(_place(dist.get_rank()), _short(call))
                others = frozenset(range(dist.get_world_size())) - {dist.get_rank()}
                known = closed and len(others) == 1
                gone = others if known else _wait_for_answers(store, call, frozenset())
                said = _read(store)
                if said == call and not gone:
                    store.compare_set(_KEY, call, "")
                    return None
                if said == call:
                    return self.leave(f"{_names(gone)}, {_WITHOUT_A_WORD}", gone)
            return self.leave(said)
        except (RuntimeError, ValueError):  # the store is gone
            return self.word or _NOBODY_TO_ASK

    def all_interrupted(self, seconds: float) -> bool:
        """Whether training ends by an error in all processes."""
        store, place, text = _store(), f"{_KEY}/interrupted", str(self._number)
        store.set(f"{place}/{dist.get_rank()}", text)
        return not _wait_for(store, place, text, frozenset(), seconds)


_listener = _Listener()


@contextmanager
def listening() -> Iterator[None]:
    """What others leave word of in the meantime is heard."""
    if not is_distributed():
        yield
        return
    _listener.begin()
    try:
        yield
    finally:
        _listener.end()


def tell_others(why: str, error: BaseException, *, at_exit: bool = False) -> None:
    """Leave word for the other processes, whose collectives are about to fail: why this one ends.

    Args:
        why: in a few words.
        error: what it ends by.
        at_exit: it may also go on, so that nothing is waited for now.
    """
    if is_distributed():
        try:
            _listener.leave(f"{why}. rank {dist.get_rank()}: {_words(error)}", at_exit=at_exit)
        except RuntimeError:  # the store is gone, and with it everybody who could have read it
            return


def explain(error: BaseException, *, at_exit: bool = False) -> None:
    """An error ends a training: add to it how another process has ended, if it comes from that; else leave word of it.

    Args:
        error: a note is added to it, or nothing.
        at_exit: this process may also go on.
    """
    if not is_distributed():
        return
    if isinstance(error, NoMemoryLeft):
        tell_others("since it was out of memory", error)
    elif isinstance(error, OffloadError):
        tell_others("since what had left its device could not be had back", error)
    elif is_lost_connection(error) and (cause := _listener.cause(_says(error, _CLOSED))) is not None:
        with_note(error, f"lightning-remat: another process has ended, {cause}")
    else:
        tell_others("by an error", error, at_exit=at_exit)


def all_interrupted(seconds: float = 3.0) -> bool:
    """Whether training has ended by an error in all processes, within that time."""
    try:
        return _listener.all_interrupted(seconds)
    except RuntimeError:  # the store is gone, and rank zero with it
        return False


def _words(error: BaseException) -> str:
    text = _text(error)[:_LONGEST]
    return text if text and isinstance(error, RematError) else f"{type(error).__name__}: {text}".rstrip(": ")


def _store() -> Any:
    return dist.distributed_c10d._get_default_store()


def _place(rank: int) -> str:
    return f"{_KEY}/{rank}"


def _read(store: Any) -> str:
    said: str = store.get(_KEY).decode() if store.check([_KEY]) else ""
    return said


def _short(said: str) -> str:
    return sha256(said.encode()).hexdigest()[:16]


def _wait_for_answers(store: Any, said: str, gone: frozenset[int]) -> frozenset[int]:
    """Wait until all others have read something; who has not within a bounded time."""
    return _wait_for(store, _KEY, _short(said), gone, _PATIENCE)


def _wait_for(store: Any, place: str, text: str, gone: frozenset[int], seconds: float) -> frozenset[int]:
    """Wait until each of the others has put down this text in its place; who has not in that time."""
    waiting = set(range(dist.get_world_size())) - {dist.get_rank()} - gone
    until = monotonic() + seconds
    while waiting:
        for rank in sorted(waiting):
            own = f"{place}/{rank}"
            if store.check([own]) and store.get(own).decode() == text:
                waiting.discard(rank)
        if monotonic() > until:
            break
        sleep(0.02)
    return frozenset(waiting)


def _names(ranks: frozenset[int]) -> str:
    if not ranks:
        return "another process"
    return " or ".join(f"rank {rank}" for rank in sorted(ranks))
