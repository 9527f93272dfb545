"""Which activation budget compiled regions get, by measured peaks."""

import itertools

import pytest

from lightning_remat.runtime.tuning.shares import GRID, Shares

ALL = (1.0, *GRID)


def searched(peaks: dict[float, int | None], room: int, top: float = 1.0) -> Shares:
    """A search to its end, under made-up peaks."""
    shares = Shares(top)
    for _ in range(len(ALL) + 1):
        peak = peaks[shares.now]
        moved = shares.learn(peak, peak is not None and peak <= room)
        assert moved or shares.settled
        if shares.settled:
            return shares
    raise AssertionError("the search has no end")


def test_the_compilers_own_is_kept_where_it_fits() -> None:
    """Nothing is compiled again where nothing has to be."""
    shares = searched({1.0: 10}, 10)
    assert (shares.now, shares.found) == (1.0, {1.0: (10, True)})


@pytest.mark.parametrize("room", range(4, 12))
def test_the_largest_that_fits_where_peaks_fall(room: int) -> None:
    """By bisection: never more than four of the five."""
    peaks: dict[float, int | None] = dict(zip(ALL, (11, 9, 8, 6, 5), strict=True))
    shares = searched(peaks, room)
    fitting = [s for s in ALL if (peaks[s] or 0) <= room]
    assert shares.now == (max(fitting) if fitting else 0.05)
    assert shares.fits == bool(fitting)
    assert len(shares.found) <= 4


def test_peaks_that_rise_again() -> None:
    """A fit is only taken where it was measured; if there is none, the smallest peak that was measured."""
    for peaks in itertools.permutations((11, 9, 8, 6, 5)):
        shares = searched(dict(zip(ALL, peaks, strict=True)), 6)
        if shares.fits:
            assert (shares.found[shares.now][0] or 0) <= 6
        else:
            assert shares.found[shares.now][0] == min(p or 0 for p, _ in shares.found.values())


def test_out_of_memory_and_a_user_who_has_set_less() -> None:
    """No peak counts as the largest; what the user has set is where the search begins."""
    assert searched({1.0: None, 0.5: None, 0.25: None, 0.05: 7}, 6).now == 0.05
    assert searched({0.5: 9, 0.25: 6}, 6, top=0.5).now == 0.25
    assert min(GRID) > 0  # at 0 the compiler draws random numbers anew in backward


def test_memory_that_runs_out_in_the_middle() -> None:
    """The smallest unknown share first; then what is known to have taken least; bisection goes on from there."""
    shares = Shares()
    assert shares.ran_out()
    assert shares.now == GRID[-1]
    assert shares.learn(100, True)  # and larger ones are tried
    assert GRID[-1] < shares.now < 1.0
    assert not Shares(now=GRID[-1]).ran_out()
    known = Shares()
    for share, peak in zip((1.0, *GRID), (100, 90, 60, 50, 70), strict=True):
        known.found[share] = peak, True
    assert known.ran_out()
    assert known.now == 0.25
