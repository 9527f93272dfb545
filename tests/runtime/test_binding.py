"""One engine for several models, and copies of it."""

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn

from lightning_remat import Remat


def model(depth: int) -> nn.Sequential:
    return nn.Sequential(*[nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4)) for _ in range(depth)])


def step(remat: Remat, net: nn.Module) -> None:
    with remat:
        loss = net(torch.randn(2, 4)).square().mean()
    loss.backward()


def test_a_model_bound_later_takes_the_place_of_the_first() -> None:
    """Its blocks are found, and the report is about its first step."""
    remat = Remat("full")
    remat.bind(model(2))
    assert remat.blocks == ["0", "1"]
    net = model(3)
    remat.bind(net)
    assert remat.blocks == ["0", "1", "2"]
    step(remat, net)
    assert remat.ledger is not None
    assert {line.module for line in remat.ledger.lines.values()} == {
        "",
        *(f"{i}.{j}" for i in range(3) for j in range(3)),
    }


def test_a_budget_is_judged_for_each_model() -> None:
    """The first step of each is a lean one, and is traced."""
    remat = Remat(budget="1GiB")
    for depth in (2, 3):
        net = model(depth)
        remat.bind(net)
        assert remat.plan is None
        step(remat, net)
        assert remat.stats.recorded_ops > 0
        net.zero_grad()
        step(remat, net)
        assert remat.plan is not None
        assert {op.module for op in remat.plan.trace.ops} >= {f"{i}.{j}" for i in range(depth) for j in range(3)}
        assert remat.stats.recorded_ops == 0


def test_the_same_model_may_be_bound_again() -> None:
    """Strategies do so when plugins have replaced some of its modules."""
    remat, net = Remat("full"), model(2)
    remat.bind(net)
    net[1] = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    remat.bind(net)
    step(remat, net)
    assert remat.ledger is not None
    assert sum(line.replayed_ops for line in remat.ledger.lines.values() if line.module.startswith("1")) > 0


def test_half_a_step_is_no_report() -> None:
    """The books are those of the first step that ran through."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = model(2)
            self.fail = True

        def forward(self, x: Tensor) -> Tensor:
            x = self.net(x)
            if self.fail:
                raise ArithmeticError
            return x

    net, remat = Net(), Remat("full")
    with pytest.raises(ArithmeticError):
        step(remat, net)
    net.fail = False
    step(remat, net)
    assert remat.ledger is not None
    assert sum(line.replayed_ops for line in remat.ledger.lines.values()) > 0


def test_a_copy_has_the_options_and_nothing_else() -> None:
    """A deep copy or a pickle is an engine that has seen no model; the original goes on."""
    remat, net = Remat({"0": "full"}, verify=True), model(2)
    remat.bind(net)
    step(remat, net)
    for made in (copy.deepcopy(remat), pickle.loads(pickle.dumps(remat))):
        assert made.policy == remat.policy
        assert made.blocks == []
        assert made.ledger is None
        assert made.verifier is not None
        other = model(1)
        made.bind(other)
        step(made, other)
        assert made.stats.replayed_ops > 0
    step(remat, net)
    assert remat.stats.replayed_ops > 0
