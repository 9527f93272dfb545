"""Gradients of earlier batches, after tries that added to some of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_remat.errors import RestoreError
from lightning_remat.runtime.recovery.snapshot import Snapshot
from tests.helpers.bits import difference_in_bits
from tests.helpers.seed import seed_everything
from tests.helpers.snapshots import Stack, Stop, X, look, no_hooks, run


@pytest.mark.parametrize("told", [False, True])
@pytest.mark.parametrize("fails", [[0], [1], [2], [3], [2, 1, 0, 3], [3, 0, 1, 2], [1, 1]])
@pytest.mark.parametrize("way", ["none", "accumulate", "to None", "twice", "set_to_none=False"])
def test_gradients_after_a_failure_in_backward(way: str, fails: list[int], told: bool) -> None:
    def train(fails: list[int] | None) -> Any:
        seed_everything()
        model = Stack()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        snapshot = Snapshot([model], [optimizer], told=told) if fails is not None else None

        def backward(loss: Tensor) -> None:
            if snapshot is not None and told:
                snapshot.backward_begins()
            loss.backward()

        def step(fail: int | None) -> None:
            loss = model(X, fail)
            if way == "to None":
                optimizer.zero_grad()
            if way == "set_to_none=False":
                optimizer.zero_grad(set_to_none=False)
            backward(model(X) if way == "twice" else loss)
            if way == "twice":
                backward(loss)
            if fail == 3:
                raise Stop

        for _ in range(3):
            if way == "none":
                optimizer.zero_grad()
            run(step, fails or [], snapshot)
            assert no_hooks(model)
        return look(model)

    assert difference_in_bits(train(None), train(fails)) == []


def test_a_gradient_that_was_there_is_added_to_once_and_its_object_stays() -> None:
    model = Stack()
    model(X).backward()
    weight = model.layers[2].weight
    gradient = weight.grad
    snapshot = Snapshot([model])
    snapshot.take()
    with pytest.raises(Stop):
        model(X, 1).backward()
    snapshot.restore()
    assert weight.grad is None  # aside
    model(X).backward()
    snapshot.release()
    assert weight.grad is gradient


def test_a_gradient_that_was_put_aside_comes_back_if_no_try_follows() -> None:
    model = Stack()
    model(X).backward()
    snapshot = Snapshot([model])
    snapshot.take()
    model(X).backward()
    snapshot.restore()
    snapshot.release()
    assert all(p.grad is not None for p in model.parameters())


def test_gradients_that_grad_reads_are_not_taken_for_added_ones() -> None:
    """autograd.grad runs hooks on parameters without adding to their gradients."""

    def train(fails: list[Any]) -> Any:
        seed_everything()
        model = Stack()
        model(X).backward()
        snapshot = Snapshot([model])

        def step(fail: Any) -> None:
            loss = model(X)
            torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
            if fail == "grad":
                raise Stop
            loss.backward()
            if fail:
                raise Stop

        run(step, fails, snapshot)
        return look(model)

    plain = train([])
    assert difference_in_bits(plain, train(["grad"])) == []
    assert difference_in_bits(plain, train(["end", "grad", "end"])) == []


def test_sparse_gradients() -> None:
    def train(fails: list[Any]) -> Any:
        seed_everything()
        model = nn.Sequential(nn.Embedding(5, 3, sparse=True), nn.Linear(3, 2))
        snapshot = Snapshot([model])
        ids = torch.tensor([1, 3, 3])

        def step(fail: Any) -> None:
            model(ids).square().sum().backward()
            if fail:
                raise Stop

        for _ in range(3):
            run(step, fails, snapshot)
        return model[0].weight.grad.to_dense(), model[1].weight.grad

    assert difference_in_bits(train([]), train([True, True])) == []


@pytest.mark.filterwarnings("ignore:Using backward:UserWarning")  # about a cycle, which the test undoes
def test_create_graph_over_a_gradient_is_refused() -> None:
    model = nn.Linear(3, 1)
    model(torch.ones(2, 3)).sum().backward()
    snapshot = Snapshot([model])
    snapshot.take()
    model(torch.ones(2, 3)).square().sum().backward(create_graph=True)
    with pytest.raises(RestoreError, match="create_graph"):
        snapshot.restore()
    snapshot.release()
    model.zero_grad()  # PyTorch's advice: gradient and parameter would hold one another


def test_a_gradient_changed_by_others_is_refused() -> None:
    model = Stack()
    model(X).backward()
    for told in (False, True):
        snapshot = Snapshot([model], told=told)
        snapshot.take()
        snapshot.backward_begins()
        model(X).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        before = look(model)
        with pytest.raises(RestoreError, match="earlier batch"):
            snapshot.restore()
        assert difference_in_bits(before, look(model)) == []
        snapshot.release()


def test_a_backward_that_was_not_told_of_is_refused() -> None:
    model = Stack()
    model(X).backward()
    snapshot = Snapshot([model], told=True)
    snapshot.take()
    model(X).backward()
    with pytest.raises(RestoreError, match="earlier batch"):
        snapshot.restore()


def test_an_optimizer_in_backward_is_refused() -> None:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: optimizer.step())
    snapshot = Snapshot([model], [optimizer])
    snapshot.take()
    model(torch.ones(2, 3)).sum().backward()
    with pytest.raises(RestoreError, match="a parameter"):
        snapshot.restore()
    snapshot.release()
