"""The tuner on invented devices: it ends, takes nothing that did not fit, and comes close where the device is sane."""

import json
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_remat.runtime.tuning.tuner import MOST_TRIALS, Tuner

Measure = Callable[[int], int | None]


@dataclass
class Device:
    """A front of plans (predicted peaks, rising), and what a step under one of them takes."""

    plans: list[int]
    measure: Measure
    measured: dict[int, int | None] = field(default_factory=dict)
    steps: int = 0

    def plan(self, target: int) -> int:
        """The largest plan within a target; the smallest if there is none."""
        return self.plans[max(0, bisect_right(self.plans, target) - 1)]

    def step(self, predicted: int) -> int | None:
        self.steps += 1
        self.measured[predicted] = self.measure(predicted)
        return self.measured[predicted]


def tune(tuner: Tuner, device: Device) -> int:
    """Steps until it has settled; the plan in the end."""
    for _ in range(200):
        target = tuner.target
        predicted = device.plan(target)
        if tuner.settled:
            return predicted
        if tuner.seen(predicted):
            tuner.again(target, predicted)
            continue
        tuner.learn(
            target, predicted, device.step(predicted),
            least=predicted == device.plans[0], most=predicted == device.plans[-1],
        )  # fmt: skip
    raise AssertionError("it does not end")


FRONTS = st.lists(st.integers(1_000, 1_000_000), min_size=1, max_size=60, unique=True).map(sorted)
DENSE = list(range(100_000, 1_000_001, 500))


@given(FRONTS, st.integers(1, 1_200_000), st.data())
def test_it_ends_and_takes_nothing_that_did_not_fit(plans: list[int], room: int, data: st.DataObject) -> None:
    """On a device without any sense: whatever a plan takes, or memory runs out."""
    takes = st.one_of(st.none(), st.integers(1, 1_500_000))
    device = Device(plans, lambda predicted: data.draw(takes))
    tuner = Tuner(room)
    chosen = tune(tuner, device)
    assert device.steps <= MOST_TRIALS + 1
    assert tuner.why
    measured = device.measured.get(chosen)
    fitted = [p for p, m in device.measured.items() if m is not None and m <= room]
    assert chosen == max(fitted, default=plans[0])
    assert (measured is not None and measured <= room) == bool(fitted)


@given(st.integers(110_000, 1_100_000))
def test_where_predictions_hold_one_measured_step_is_all(room: int) -> None:
    device = Device(DENSE, lambda predicted: predicted)
    chosen = tune(Tuner(room), device)
    assert device.steps == 1
    assert chosen == device.plan(room)


@given(st.integers(200_000, 900_000), st.floats(0.5, 2.0), st.integers(-40_000, 80_000))
def test_a_line(room: int, slope: float, offset: int) -> None:
    """Within 2 % of the best, in three or four steps."""
    device = Device(DENSE, lambda predicted: max(1, int(slope * predicted + offset)))
    tuner = Tuner(room)
    chosen = tune(tuner, device)
    best = max((p for p in DENSE if device.measure(p) <= room), default=DENSE[0])
    assert chosen >= best - 0.02 * room / slope - 500
    assert device.steps <= 5


@given(st.integers(200_000, 900_000), st.floats(0.8, 1.3), st.integers(0, 2**31))
def test_with_noise(room: int, slope: float, seed: int) -> None:
    """Of two per cent: what is taken was measured to fit, and is close."""

    def noisy(predicted: int) -> int:
        return int(slope * predicted * (1 + 0.02 * ((predicted * 2654435761 + seed) % 1000 / 1000)))

    device = Device(DENSE, noisy)
    chosen = tune(Tuner(room), device)
    best = max((p for p in DENSE if noisy(p) <= room), default=DENSE[0])
    assert noisy(chosen) <= room or chosen == DENSE[0]
    assert chosen >= 0.93 * best


@given(st.integers(200_000, 900_000), st.integers(100_000, 900_000), st.integers(1_000, 300_000))
def test_a_jump(room: int, at: int, height: int) -> None:
    """From a plan on, a kernel with a large workspace is taken."""
    device = Device(DENSE, lambda predicted: predicted + (height if predicted >= at else 0))
    chosen = tune(Tuner(room), device)
    best = max((p for p in DENSE if device.measure(p) <= room), default=DENSE[0])
    measured = device.measure(chosen)
    assert measured is not None
    assert measured <= room or chosen == DENSE[0]
    assert chosen >= best - 0.1 * room


def test_a_hole_below() -> None:
    """A smaller plan that takes more than a larger one that fits does not matter."""
    device = Device([100, 200, 300, 400], {100: 350, 200: 390, 300: 290, 400: 450}.__getitem__)
    tuner = Tuner(420)
    tuner.learn(200, 200, 430)
    tuner.learn(300, 300, 290)
    assert tuner.best is not None
    assert tuner.best.predicted == 300
    assert tune(tuner, device) == 300


def test_nothing_fits() -> None:
    device = Device([1000, 2000], lambda predicted: 5000)
    tuner = Tuner(2500)
    assert tune(tuner, device) == 1000
    assert "smallest peak" in tuner.why


@pytest.mark.parametrize("missing", [None, 1, 20_000, 10**9])
def test_pressure(missing: int | None) -> None:
    """The plan that was settled for is not taken again; the next is smaller, and not the smallest at once."""
    device = Device(DENSE, lambda predicted: predicted)
    tuner = Tuner(500_000)
    first = tune(tuner, device)
    tuner.pressure(missing, first)
    assert not tuner.settled
    second = tune(tuner, device)
    assert 0.7 * first < second < first
    assert second <= first - min(missing or 0, 100_000)
    for _ in range(30):
        tuner.pressure(missing, second)
        second = tune(tuner, device)
    assert second >= DENSE[0]


def test_slack_is_given_back_a_bounded_number_of_times() -> None:
    """After a shortage that passed, plans grow again; where nothing was short, nothing changes."""
    device = Device(DENSE, lambda predicted: predicted)
    tuner = Tuner(500_000)
    first = tune(tuner, device)
    assert not any(tuner.slack(100) for _ in range(20))
    tuner.pressure(200_000, first)
    small = tune(tuner, device)
    opened = 0
    sizes = [small]
    for _ in range(40):
        measured = device.measure(sizes[-1])
        assert measured is not None
        if tuner.slack(measured):
            opened += 1
            sizes.append(tune(tuner, device))
    assert 1 <= opened <= 2
    assert sizes == sorted(sizes)
    assert sizes[-1] <= first


def test_another_room() -> None:
    """What was learned of predictions is kept: one step is enough."""
    device = Device(DENSE, lambda predicted: predicted * 5 // 4)
    tuner = Tuner(500_000)
    tune(tuner, device)
    device.steps = 0
    tuner.fit_to(700_000)
    chosen = tune(tuner, device)
    assert device.steps == 1
    assert 0.98 * 560_000 <= chosen <= 560_000
    tuner.fit_to(700_100)
    assert tuner.settled


def test_its_state_goes_through_json() -> None:
    device = Device(DENSE, lambda predicted: predicted * 5 // 4)
    tuner = Tuner(500_000)
    for _ in range(2):
        target = tuner.target
        tuner.learn(target, device.plan(target), device.step(device.plan(target)))
    other = Tuner()
    other.load_state_dict(json.loads(json.dumps(tuner.state_dict())))
    assert other == tuner
    assert tune(other, device) == tune(tuner, device)
