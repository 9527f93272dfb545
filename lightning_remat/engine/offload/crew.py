"""Threads that do what they are given: what is urgent first, and otherwise in order.

``concurrent.futures`` would do but for two things. Python waits for the threads of its executors before it ends, so a
disk that does not answer would keep a failed training from ending; these are daemons. And it has one queue.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from time import monotonic

Job = Callable[[], None]


class Crew:
    """Threads that live until :meth:`end`.

    :meth:`end` and :meth:`put` take no lock, so they may be called from anywhere, also by the garbage collector in the
    middle of something else. The threads hold no reference to this object, nor to a job when they wait for the next.

    Args:
        size: how many threads.
        farewell: called by the last one when it ends.
    """

    def __init__(self, size: int, farewell: Callable[[], None]) -> None:
        self._urgent: deque[Job] = deque()
        self._waiting: deque[Job] = deque()
        # One True for each job, and in the end one False for each thread.
        self._tokens: SimpleQueue[bool] = SimpleQueue()
        present = [True] * size
        arguments = (self._tokens, self._urgent, self._waiting, present, farewell)
        self._threads = [
            threading.Thread(target=_work, args=arguments, name=f"lightning-remat-offload-{index}", daemon=True)
            for index in range(size)
        ]
        for thread in self._threads:
            thread.start()

    def put(self, job: Job, urgent: bool = False) -> None:
        """Have a job done; it must not raise."""
        (self._urgent if urgent else self._waiting).append(job)
        self._tokens.put(True)

    def drop(self) -> None:
        """Forget the jobs that nobody has begun."""
        self._urgent.clear()
        self._waiting.clear()

    def end(self) -> None:
        """Let the threads end when the jobs that they have are done; does not wait for that."""
        for _ in self._threads:
            self._tokens.put(False)

    def join(self, seconds: float) -> None:
        """Wait for the threads after :meth:`end`, for so many seconds at most."""
        until = monotonic() + seconds
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, until - monotonic()))


def _work(
    tokens: SimpleQueue[bool],
    urgent: deque[Job],
    waiting: deque[Job],
    present: list[bool],
    farewell: Callable[[], None],
) -> None:
    while tokens.get():
        job = None
        for jobs in (urgent, waiting):
            try:
                job = jobs.popleft()
            except IndexError:  # none there, or dropped
                continue
            break
        if job is not None:
            job()
        del job
    present.pop()
    if not present:
        farewell()
