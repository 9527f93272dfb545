"""When retries are frequent enough to say something."""

from __future__ import annotations

from collections import deque


class RetryAlarm:
    """Rings when batches have to be run again often, and then is silent for a while.

    Args:
        batches: so many batches that were run again ...
        window: ... within so many ring; it is also for how many it is silent afterwards.

    Example:
        >>> alarm = RetryAlarm(batches=2, window=10)
        >>> [alarm.batch(retried) for retried in (True, False, True, True)]
        [False, False, True, False]
    """

    def __init__(self, batches: int = 3, window: int = 100) -> None:
        self.batches = batches
        self.window = window
        self._now = 0
        self._when: deque[int] = deque(maxlen=batches)
        self._silent_until = 0

    def batch(self, retried: bool) -> bool:
        """Count a batch; True if it is time to speak."""
        self._now += 1
        if not retried:
            return False
        self._when.append(self._now)
        often = len(self._when) == self.batches and self._now - self._when[0] < self.window
        if not often or self._now < self._silent_until:
            return False
        self._silent_until = self._now + self.window
        return True
