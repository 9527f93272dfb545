"""A budget in a plain loop: whatever the steps are like, every bit is that of plain training, and plans are found."""

from typing import Any

import pytest
from torch import Tensor, nn

from lightning_remat import Remat
from lightning_remat.runtime.memory import measure_peak
from lightning_remat.runtime.tuning.pilot import MOST_SEQUENCES
from tests.helpers.loops import Loop, assert_same_training, run, usual
from tests.helpers.pilots import (
    BUDGETS,
    MANY,
    NOTHING,
    PLENTY,
    SCARCE,
    Translating,
    Varying,
    batch,
    infeasible,
    net,
    pilot_of,
    planned,
    usual_without_copies,
)

# ---------------------------------------------------------------------- budgets


def plain_peak() -> int:
    """Of a step in which the optimizer has its state, with all that is there between steps."""
    loop = run(net, [batch(MANY)] * 2)
    x = batch(MANY)
    step = measure_peak(lambda: usual_without_copies(loop, x)).peak_bytes
    return step + sum(4 * p.numel() for p in loop.model.parameters()) * 3


@pytest.mark.parametrize("bind", [False, True], ids=["met", "bound"])
@pytest.mark.parametrize("share", [1.0, 0.6, 0.35])
@infeasible
def test_every_bit_and_the_peak(share: float, bind: bool) -> None:
    """With dropout, BatchNorm and an in-place activation; as long as there is a plan for it the budget holds."""
    budget = int(share * plain_peak())
    remat = Remat(budget=budget)
    loop = assert_same_training(net, [batch(MANY)] * 7, remat=remat, bind=bind)
    assert planned(remat)
    assert remat.plan is not None
    assert remat.plan.budget_bytes == budget
    assert remat.stats.replayed_ops == remat.stats.recorded_ops
    feasible = remat.plan.peak_bytes <= budget
    assert feasible == (share > 0.5)
    x = batch(MANY)
    measured = measure_peak(lambda: usual_without_copies(loop, x)).peak_bytes
    assert measured <= 1.02 * remat.plan.chosen.peak_bytes + 1024


@pytest.mark.parametrize("budget", ["100%", PLENTY])
def test_with_room_enough_nothing_is_dropped(budget: str) -> None:
    remat = Remat(budget=budget)
    assert_same_training(net, [batch()] * 4, remat=remat)
    assert remat.stats.recorded_ops == remat.stats.replayed_ops == 0
    assert planned(remat)


def test_an_infeasible_budget_is_named_once_and_training_goes_on() -> None:
    """With the least that a plan takes, what that consists of, and the way out."""
    remat = Remat(budget="20KiB")
    with pytest.warns(UserWarning, match="not feasible") as caught:
        assert_same_training(net, [batch()] * 6, remat=remat)
    assert len(caught) == 1
    message = str(caught[0].message)
    for part in ("budget=20.0 KiB is not feasible", "parameters", "optimizer state", "activations", "smaller batch"):
        assert part in message
    assert remat.plan is not None
    assert remat.plan.chosen.peak_bytes == remat.plan.smallest.peak_bytes
    assert planned(remat)
    # It points at the line that begins the step, not at one of ours.
    assert caught[0].filename.endswith("loops.py")


def test_the_memory_between_steps_counts_as_soon_as_it_is_there() -> None:
    """The optimizer's state comes with its first step, after the first plan maybe."""

    def rare(loop: Loop, x: Any) -> None:
        loop.backward(loop.loss(x))
        loop.note()
        if loop.steps % 4 == 0:
            loop.update()

    remat = Remat(budget=2 * SCARCE)
    loop = assert_same_training(net, [batch()] * 14, rare, remat=remat)
    state = sum(t.numel() * 4 for s in loop.optimizer.state.values() for t in s.values())
    for known in pilot_of(remat).known.roots.values():
        assert known.parts["optimizer state"] == state
        assert known.parts["gradients"] == (known.parts["parameters"] if known is remat_root(remat, True) else 0)


def remat_root(remat: Remat, accumulating: bool) -> Any:
    return pilot_of(remat).known.roots[accumulating]


# ---------------------------------------------------------------------- shapes and sequences

SHAPES = {
    "smaller last": [64, 64, 64, 20, 64, 64, 20],
    "larger later": [20, 20, 20, 64, 20, 64, 64],
    "alternating": [64, 32, 64, 32, 64, 32, 64],
    "another each time": [64, 8, 10, 32, 65, 12, 90, 40],
    "one row more": [2, 2, 3, 2, 3, 3],
}


@BUDGETS
@pytest.mark.parametrize("rows", SHAPES.values(), ids=SHAPES)
@infeasible
def test_batches_of_several_sizes(rows: list[int], budget: Any) -> None:
    """A new size is learned in one step; from the next time on it has a plan of its own, without being traced."""
    remat = Remat(budget=budget)
    assert_same_training(net, [batch(n) for n in rows], remat=remat)
    pilot = pilot_of(remat)
    assert len(pilot.known.all) == len(set(rows)) - (0 if planned(remat) else 1)
    assert sum(known.traced for known in pilot.known.all) == 1
    assert planned(remat) == (rows[-1] in rows[:-1])


@pytest.mark.parametrize("first", [0, 1])
@infeasible
def test_a_first_batch_that_says_little(first: int) -> None:
    """Nothing can be foreseen from an empty batch, and little from a small one: a larger one is traced as well."""
    remat = Remat(budget=SCARCE)

    def make() -> nn.Module:
        return nn.Sequential(*[nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 8)) for _ in range(3)])

    assert_same_training(make, [batch(n) for n in (first, 64, 64, 64, first, 64)], remat=remat)
    assert planned(remat)
    assert [known.traced for known in pilot_of(remat).known.all] == [True, True]
    assert remat.stats.recorded_ops > 0


@pytest.mark.parametrize("budget", [PLENTY, NOTHING])
@infeasible
def test_two_lengths_that_vary(budget: Any) -> None:
    def pair(source: int, target: int) -> tuple[Tensor, Tensor]:
        return batch(2 * source).reshape(2, source, 8), batch(2 * target).reshape(2, target, 8)

    lengths = [(4, 5), (4, 5), (4, 7), (6, 5), (6, 7), (4, 7), (6, 7), (4, 5)]
    remat = Remat(budget=budget)
    assert_same_training(Translating, [pair(*both) for both in lengths], remat=remat)
    assert planned(remat)
    assert len(pilot_of(remat).known.all) == 4


@BUDGETS
@infeasible
def test_two_sequences_of_ops_in_turn(budget: Any) -> None:
    """As in adversarial training: both get plans, also if they alternate strictly."""
    remat = Remat(budget=budget)
    assert_same_training(lambda: Varying(2), [batch()] * 9, remat=remat)
    pilot = pilot_of(remat)
    assert [known.traced for known in pilot.known.all] == [True, True]
    assert planned(remat)
    assert not pilot._to_trace


def test_another_sequence_at_intervals() -> None:
    """Too rare to come up in the next few steps; it is waited for."""
    remat = Remat(budget=PLENTY)

    class Fifth(Varying):
        def forward(self, x: Tensor) -> Tensor:
            self.period = 2 if self.calls % 10 == 9 else 1
            return super().forward(x)

    assert_same_training(lambda: Fifth(1), [batch(4)] * 40, remat=remat)
    assert len(pilot_of(remat).known.all) == 2
    assert planned(remat)


def test_a_sequence_that_comes_up_once_is_not_looked_for_for_ever() -> None:
    """A few steps are traced in the hope for it, a few times."""
    remat = Remat(budget=PLENTY)

    class Rarely(Varying):
        def forward(self, x: Tensor) -> Tensor:
            self.period = 2 if self.calls in range(3, 200, 10) else 1
            return super().forward(x)

    traced = []
    loop = Loop(Rarely(1), remat)
    for _ in range(70):
        usual(loop, batch(4))
        traced.append(pilot_of(remat)._active is None)
    assert 4 < sum(traced) < 20
    assert not any(traced[-10:])


def test_another_sequence_in_every_step() -> None:
    """It is given up, which is said once; what follows is a fixed policy."""
    remat = Remat(budget=PLENTY)
    with pytest.warns(UserWarning, match=f"{MOST_SEQUENCES + 1} different sequences.*fixed policy") as caught:
        assert_same_training(lambda: Varying(100), [batch(8)] * 18, remat=remat)
    assert len(caught) == 1
    assert pilot_of(remat).given_up
    assert "no plan" in remat.summary
    assert remat.plan is None
    assert remat.stats.recorded_ops > 0
    assert str(remat.report())
