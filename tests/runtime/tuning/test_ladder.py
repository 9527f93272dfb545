"""Fixed policies where no step can be traced: which one the next step runs under, and that it does."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from lightning_remat import Remat
from lightning_remat.runtime.tuning.ladder import GOOD, RUNGS, Ladder
from tests.helpers.loops import Loop, assert_same_training, usual
from tests.helpers.pilots import PLENTY, Varying, batch, infeasible, net, pilot_of


@given(st.lists(st.integers(1, 100), min_size=len(RUNGS), max_size=len(RUNGS)).map(sorted), st.integers(1, 100))
def test_by_measured_peaks(peaks: list[int], room: int) -> None:
    """The loosest that fits, in three measurements."""
    ladder = Ladder()
    for _ in range(4):
        if ladder.settled:
            break
        ladder.measured(peaks[ladder.at], room)
    assert ladder.settled
    assert ladder.at == max([i for i, peak in enumerate(peaks) if peak <= room], default=0)


@given(st.lists(st.integers(1, 100), min_size=len(RUNGS), max_size=len(RUNGS)), st.integers(1, 100))
def test_peaks_in_any_order(peaks: list[int], room: int) -> None:
    """What was measured not to fit is not what it stays at, unless nothing did."""
    ladder = Ladder()
    measured: dict[int, int] = {}
    for _ in range(4):
        if not ladder.settled:
            measured[ladder.at] = peaks[ladder.at]
            ladder.measured(peaks[ladder.at], room)
    assert ladder.settled
    assert measured[ladder.at] <= room or measured[0] > room


@given(st.integers(0, len(RUNGS)))
def test_by_errors(fitting: int) -> None:
    """Lean at first, looser after good steps; after a failure it goes back, and stays."""
    ladder = Ladder()
    failures = 0
    for _ in range(10 * GOOD):
        if ladder.at < fitting:
            ladder.went_well(loosen=True)
        else:
            failures += 1
            if not ladder.failed():
                break
    assert failures <= 1 or fitting == 0
    assert ladder.at < max(1, fitting)
    assert fitting < len(RUNGS) or ladder.name == "none"


def test_nobody_catches_errors() -> None:
    ladder = Ladder()
    assert not any(ladder.went_well(loosen=False) for _ in range(50))
    assert ladder.name == "full"
    assert not ladder.failed()


# ---------------------------------------------------------------------- in an engine


@pytest.fixture
def _uncountable(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device whose memory nobody can count."""
    monkeypatch.setattr("lightning_remat.runtime.tuning.pilot.device_of", lambda roots: torch.device("xla"))
    monkeypatch.setattr("lightning_remat.runtime.tuning.relief.device_of", lambda roots: torch.device("xla"))


@pytest.mark.usefixtures("_uncountable")
@pytest.mark.parametrize("make", [net, lambda: nn.Linear(8, 2)], ids=["blocks", "no blocks"])
@pytest.mark.parametrize("bind", [False, True], ids=["met", "bound"])
def test_a_device_that_cannot_be_counted(make: Any, bind: bool) -> None:
    """Without a budget, and where nobody catches errors, it is selective."""
    remat = Remat()
    with pytest.warns(UserWarning, match="'xla' cannot be counted.*fixed policy") as caught:
        assert_same_training(make, [batch(16)] * 8, remat=remat, bind=bind)
    assert len(caught) == 1
    assert remat.policy == "selective"
    assert "no plan can be followed" in remat.summary


@pytest.mark.usefixtures("_uncountable")
@pytest.mark.parametrize("bind", [False, True], ids=["met", "bound"])
def test_looser_as_long_as_errors_are_caught(bind: bool) -> None:
    """Up to no tape at all; every bit is that of plain training on the way."""
    remat = Remat(budget=PLENTY)
    remat.guarded = True
    names: list[str] = []

    def step(loop: Loop, x: Any) -> None:
        usual(loop, x)
        if loop.remat is not None:
            names.append("off" if pilot_of(remat).off else remat.policy)

    with pytest.warns(UserWarning, match="cannot be counted"):
        assert_same_training(net, [batch(16)] * (4 * GOOD + 2), step, remat=remat, bind=bind)
    assert list(dict.fromkeys(names)) == ["auto", "every:2", "selective", "keep", "off"]
    assert any("every:2" in note for note in remat.counters.notes)


@pytest.mark.usefixtures("_uncountable")
def test_back_after_a_failure() -> None:
    remat = Remat(budget=PLENTY)
    pilot = pilot_of(remat)
    remat.guarded = True
    loop = Loop(net(), remat)
    with pytest.warns(UserWarning, match="cannot be counted"):
        usual(loop, batch(16))
    for _ in range(GOOD + 1):
        usual(loop, batch(16))
    assert remat.policy == "every:2"
    loop.loss(batch(16))
    assert pilot.tighten(1000) == "under policy 'full'"
    for _ in range(3 * GOOD):
        usual(loop, batch(16))
        assert remat.policy == "auto"  # lean, as full is
    loop.loss(batch(16))
    assert pilot.tighten(1000) is None


@infeasible
@pytest.mark.parametrize(("budget", "policy"), [(PLENTY, "off"), (1, "auto")])
def test_by_measured_peaks_where_sequences_are_too_many(budget: Any, policy: str) -> None:
    """On a device whose memory can be counted."""
    remat = Remat(budget=budget)
    with pytest.warns(UserWarning, match="different sequences"):
        assert_same_training(lambda: Varying(100), [batch(8)] * 35, remat=remat)
    pilot = pilot_of(remat)
    assert pilot.given_up
    assert ("off" if pilot.off else remat.policy) == policy
    assert pilot.fallback.ladder is not None
    assert pilot.fallback.ladder.settled
