"""A budget in a plain loop, and the many ways in which a step can go: every bit is that of plain training."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_remat import Remat
from tests.helpers.loops import Loop, assert_same_training, usual
from tests.helpers.pilots import NOTHING, PLENTY, batch, infeasible, inside, net, never, planned


def accumulated(loop: Loop, x: Tensor) -> None:
    loop.backward(loop.loss(x))
    loop.note()
    if loop.steps % 3 == 0:
        loop.update()


def zeroed(loop: Loop, x: Tensor) -> None:
    loop.backward(loop.loss(x))
    loop.note()
    loop.optimizer.step()
    loop.optimizer.zero_grad(set_to_none=False)


def two_roots(loop: Loop, x: Tensor) -> None:
    """The loop calls the parts of its model one by one."""
    with loop.recorded():
        h = loop.model.stem(x)
        for layer in loop.model.layers:
            h = layer(h)
        loss = loop.model.head(h).square().mean()
    loop.backward(loss)
    loop.note()
    loop.update()


def two_losses(loop: Loop, x: Tensor) -> None:
    with loop.recorded():
        out = loop.model(x)
        first, second = out.square().mean(), out.sin().sum()
    first.backward(retain_graph=True)
    loop.note()
    second.backward()
    loop.note()
    loop.update()


def retained(loop: Loop, x: Tensor) -> None:
    """A graph that outlives its step, with its loss."""
    loss = loop.loss(x)
    loop.backward(loss, retain_graph=True)
    loop.held = loss
    loop.note()
    loop.update()


def two_updates_inside(loop: Loop, x: Tensor) -> None:
    """Forward, backward and optimizer twice in one step."""
    with loop.recorded():
        for part in (x, x.flip(0)):
            loss = loop.model(part).square().mean()
            loss.backward()
            loop.optimizer.step()
            loop.optimizer.zero_grad()
    loop.losses.append(loss.detach())


def penalty(loop: Loop, x: Tensor) -> None:
    x = x.clone().requires_grad_()
    with loop.recorded():
        loss = loop.model(x).square().mean()
        (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
        loss = loss + gradient.square().sum()
    loop.backward(loss)
    loop.note()
    loop.update()


def penalty_after(loop: Loop, x: Tensor) -> None:
    """The gradient is taken after the step was left, with a graph, and a second backward goes through that."""
    x = x.clone().requires_grad_()
    loss = loop.loss(x)
    (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
    (loss + gradient.square().sum()).backward()
    loop.note()
    loop.update()


def now_and_then(loop: Loop, x: Tensor) -> None:
    """Every second loss is only looked at."""
    loss = loop.loss(x)
    if loop.steps % 3:
        loop.backward(loss)
        loop.note()
        loop.update()


def validated(loop: Loop, x: Tensor) -> None:
    usual(loop, x)
    loop.model.eval()
    with torch.no_grad(), loop.recorded():
        loop.losses.append(loop.model(x).sum())
    loop.model.train()


def evaluated_with_gradients(loop: Loop, x: Tensor) -> None:
    usual(loop, x)
    loop.model.eval()
    (gradient,) = torch.autograd.grad(loop.loss(x), [loop.model.head.weight])
    loop.losses.append(gradient)
    loop.model.train()


def recorded_twice(loop: Loop, x: Tensor) -> None:
    """A step inside a step is the same step."""
    with loop.recorded():
        usual(loop, x)


def autocast(loop: Loop, x: Tensor) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        loss = loop.loss(x)
    loop.backward(loss)
    loop.note()
    loop.update()


def searching(loop: Loop, x: Tensor) -> None:
    """An optimizer that runs the step itself, several times."""
    if not isinstance(loop.optimizer, torch.optim.LBFGS):
        loop.optimizer = torch.optim.LBFGS(loop.model.parameters(), lr=0.1, max_iter=3)

    def closure() -> Tensor:
        loop.optimizer.zero_grad()
        loss = loop.loss(x)
        loop.backward(loss)
        return loss

    loop.optimizer.step(closure)


WAYS = (
    accumulated, zeroed, two_roots, two_losses, retained, inside, two_updates_inside, penalty, penalty_after,
    now_and_then, never, validated, evaluated_with_gradients, recorded_twice, autocast, searching,
)  # fmt: skip


@pytest.mark.filterwarnings("ignore:policy='auto'. no backward was seen")  # that is the case
@pytest.mark.parametrize("budget", [PLENTY, NOTHING])
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@infeasible
def test_every_bit_however_a_step_goes(way: Callable[[Loop, Tensor], None], budget: Any) -> None:
    remat = Remat(budget=budget)
    assert_same_training(net, [batch(16)] * 8, way, remat=remat)
    assert planned(remat) or way is never
    assert not torch.autograd._profiler_enabled()
    remat.close()


def test_steps_whose_backward_nobody_sees() -> None:
    """Such as one on another thread: there is no plan, which is said once."""
    from threading import Thread

    def elsewhere(loop: Loop, x: Tensor) -> None:
        loss = loop.loss(x)
        thread = Thread(target=loss.backward)
        thread.start()
        thread.join()
        loop.note()
        loop.update()

    remat = Remat(budget=PLENTY)
    with pytest.warns(UserWarning, match="no backward was seen.*fixed policy") as caught:
        assert_same_training(net, [batch(16)] * 8, elsewhere, remat=remat)
    assert len(caught) == 1
    assert remat.stats.replayed_ops > 0
    remat.close()


def test_verify_under_a_budget() -> None:
    """What gives other bits is kept, in the plan as well."""
    remat = Remat(budget=NOTHING, verify=True)
    with pytest.warns(UserWarning, match="not feasible"):
        assert_same_training(net, [batch(16)] * 5, remat=remat)
    assert remat.verifier is not None
    assert remat.verifier.checked
    assert not remat.verifier.different
    assert planned(remat)


def test_an_op_that_differs_is_kept_by_every_plan() -> None:
    remat = Remat(budget=NOTHING, verify=True)
    loop = Loop(net(), remat)
    with warnings.catch_warnings():
        # Of the op that differs, and of the budget that no plan fits: both on purpose.
        warnings.simplefilter("ignore")
        for i in range(5):
            usual(loop, batch(16))
            if i == 2:
                remat._never_again("aten.addmm.default")
    assert remat.plan is not None
    dropped = {op.name for op, drop in zip(remat.plan.trace.ops, remat.plan.chosen.drop, strict=True) if drop}
    assert dropped
    assert "aten.addmm.default" not in dropped


def test_a_model_in_which_nothing_can_be_dropped() -> None:
    """There is nothing to plan, and tracing comes to an end."""
    remat = Remat(budget=PLENTY)
    assert_same_training(lambda: nn.Linear(8, 2), [batch(4)] * 4, remat=remat)
    assert planned(remat)
    assert str(remat.report())


def test_a_step_without_a_model() -> None:
    """Tensors only."""
    weight = torch.ones(8, requires_grad=True)
    plain = torch.autograd.grad(((batch() * weight).sin() * weight).sum(), weight)[0]
    remat = Remat(budget=PLENTY)
    for _ in range(4):
        with remat:
            loss = ((batch() * weight).sin() * weight).sum()
        assert torch.equal(torch.autograd.grad(loss, weight)[0], plain)
    assert planned(remat)
