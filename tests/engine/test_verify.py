"""verify=True: the user's proof on the user's own model."""

import pytest
import torch
from torch import nn

from lightning_remat import Remat
from lightning_remat.engine import replay
from lightning_remat.engine.verify import same_bits
from tests.helpers.exact import assert_exact, outcome, recompute_all

X = torch.linspace(-1, 1, 32).reshape(4, 8)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)


def step(net: Net) -> torch.Tensor:
    return net.b(torch.dropout(net.a(X).sin(), 0.5, True)).cos().sum()


def test_what_has_been_checked() -> None:
    """Kinds of op whose replay was compared, and changes nothing."""
    remat = assert_exact(Net(), step, recompute_all, verify=True)
    verifier = remat.verifier
    assert verifier is not None
    assert {"aten.addmm.default", "aten.sin.default", "aten.bernoulli_.float"} <= verifier.checked
    assert verifier.values > 0
    assert not verifier.different


def test_an_op_that_differs_from_run_to_run_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is found, named in a warning, and its results are kept from then on: gradients are right."""
    calls = [0]
    original = replay.run

    def noisy(op: object) -> None:
        original(op)  # type: ignore[arg-type]
        if op.func is torch.ops.aten.sin.default:  # type: ignore[attr-defined]
            calls[0] += 1
            for _, reference in op.outs:  # type: ignore[attr-defined]
                value = reference()
                if value is not None:
                    value.tensor.add_(1e-3)

    monkeypatch.setattr(replay, "run", noisy)
    torch.manual_seed(0)
    net = Net()
    plain = outcome(net, step, None)
    remat = Remat(policy=recompute_all, verify=True)
    with pytest.warns(UserWarning, match=r"aten\.sin\.default.*other bits"):
        found = outcome(net, step, remat)
    assert remat.verifier is not None
    assert "aten.sin.default" in remat.verifier.different
    for name, grad in plain.grads.items():
        assert grad is not None
        assert same_bits(grad, found.grads[name])  # type: ignore[arg-type]
    assert calls[0] > 0


def test_same_bits() -> None:
    """NaN equals NaN of the same bits; the zeros differ."""
    nan = torch.tensor([float("nan"), 1.0])
    assert same_bits(nan, nan.clone())
    assert not same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert not same_bits(torch.zeros(2), torch.zeros(3))
    assert not same_bits(torch.zeros(2), torch.zeros(2, dtype=torch.float64))
    assert same_bits(torch.tensor(1 + 2j).conj(), torch.tensor(1 - 2j))
    assert same_bits(torch.empty(0), torch.empty(0))
