"""When repeated retries are worth a warning."""

from lightning_remat.runtime.alarm import RetryAlarm


def rings(retried: set[int], batches: int = 400, **options: int) -> list[int]:
    alarm = RetryAlarm(**options)
    return [i for i in range(1, batches + 1) if alarm.batch(i in retried)]


def test_it_rings_at_the_third_within_a_hundred() -> None:
    assert rings({1, 2}) == []
    assert rings({1, 50, 100}) == [100]
    assert rings({1, 50, 101}) == []
    assert rings({1, 50, 101, 149}) == [149]


def test_it_is_silent_for_a_while() -> None:
    """Not at every batch where all of them are retried, but again if that goes on."""
    assert rings(set(range(1, 401))) == [3, 103, 203, 303]
    assert rings({1, 2, 3, 4, 5}) == [3]
