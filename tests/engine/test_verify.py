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
        original(op)
        if op.func is torch.ops.aten.sin.default:
            calls[0] += 1
            for _, reference in op.outs:
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
        assert same_bits(grad, found.grads[name])
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


def noisy_from(monkeypatch: pytest.MonkeyPatch, step_now: list[int], first: int) -> list[int]:
    """Let every replay of `sin` differ from step `first` on; gives the number of times, in a list."""
    original = replay.run
    calls = [0]

    def noisy(op: object) -> None:
        original(op)
        if step_now[0] >= first and op.func is torch.ops.aten.sin.default:
            calls[0] += 1
            for _, reference in op.outs:
                if (value := reference()) is not None:
                    value.tensor.add_(1e-3)

    monkeypatch.setattr(replay, "run", noisy)
    return calls


def gradients_by_step(remat: Remat | None, now: list[int], steps: int) -> list[dict[str, torch.Tensor]]:
    """Of each of several steps, from the same weights and with the same random numbers for all who ask."""
    torch.manual_seed(0)
    net = Net()
    found = []
    for now[0] in range(1, steps + 1):
        net.zero_grad()
        if remat is None:
            loss = step(net)
        else:
            with remat:
                loss = step(net)
        loss.backward()
        found.append({name: p.grad.clone() for name, p in net.named_parameters() if p.grad is not None})
    return found


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(same_bits(a[name], b[name]) for name in a)


@pytest.mark.parametrize("always", [False, True])
def test_what_begins_to_differ_later_is_found_in_the_next_verified_step(
    always: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every third step checks anew; `verify=True` alone would have looked at the first only."""
    now = [0]
    noisy_from(monkeypatch, now, first=5)
    plain = gradients_by_step(None, now, 9)
    remat = Remat(policy=recompute_all, verify=always, verify_every_n_steps=3)
    with pytest.warns(UserWarning, match=r"aten\.sin\.default.*other bits") as said:
        ours = gradients_by_step(remat, now, 9)
    assert len(said) == 1
    exact = [equal(a, b) for a, b in zip(plain, ours, strict=True)]
    # The fifth step shows that the noise reaches gradients; the sixth is verified, and what differs is kept from there.
    assert exact == [True] * 4 + [False] + [True] * 4
    assert remat.verifier is not None
    assert "aten.sin.default" in remat.verifier.different
    assert remat.counters.verified == remat.verifier.compared > 0
    assert remat.counters.verified_different == remat.verifier.differed == 1
    assert remat.counters.steps == 9


def test_verify_alone_does_not_look_again(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0]
    calls = noisy_from(monkeypatch, now, first=5)
    remat = Remat(policy=recompute_all, verify=True)
    gradients_by_step(remat, now, 6)
    assert calls[0] > 0
    assert remat.counters.verified_different == 0


@pytest.mark.parametrize("policy", ["full", "selective", recompute_all])
def test_steps_between_are_not_looked_at(policy: object) -> None:
    """No observer is on the tape in them, and after a verified one it is gone as well."""
    remat = Remat(policy=policy, blocks=nn.Linear if policy == "full" else None, verify_every_n_steps=4)
    seen, compared = [], []
    net = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8), nn.GELU())
    for _ in range(9):
        with remat:
            assert remat._active is not None
            seen.append(remat.verifier in remat._active.observers)
            loss = net(X).sum()
        assert remat.verifier not in remat._tape.observers
        loss.backward()
        compared.append(remat.counters.verified)
    assert seen == [i in (3, 7) for i in range(9)]
    assert compared[:3] == [0, 0, 0]
    assert compared[3] == compared[6]
    assert compared[7] == 2 * compared[3] > 0


def test_every_bit_in_verified_steps() -> None:
    """Verification changes nothing, random streams and running statistics included."""

    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)

    def normed(net: Normed) -> torch.Tensor:
        return torch.dropout(net.norm(net.a(X).sin()).relu(), 0.5, True).cos().sum()

    assert_exact(Normed(), normed, recompute_all, verify_every_n_steps=1)
    assert_exact(Net(), step, recompute_all, verify_every_n_steps=2)


def test_nothing_dropped_is_nothing_to_verify() -> None:
    remat = Remat(policy="none", verify_every_n_steps=1)
    gradients_by_step(remat, [0], 3)
    assert remat.counters.verified == 0


def test_memory_that_is_lacking_for_verification_ends_no_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rest of the step goes unverified, the next one is verified again; other errors come through."""
    plain = gradients_by_step(None, [0], 2)
    remat = Remat(policy=recompute_all, verify_every_n_steps=1)
    text = (
        "[enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to "
        "allocate 64 bytes. Error code 12 (Cannot allocate memory)"
    )
    failures = [RuntimeError(text)]

    def failing(a: torch.Tensor, b: torch.Tensor) -> bool:
        if failures:
            raise failures.pop()
        return same_bits(a, b)

    monkeypatch.setattr("lightning_remat.engine.verify.same_bits", failing)
    torch.manual_seed(0)
    ours = gradients_by_step(remat, [0], 2)
    assert all(equal(a, b) for a, b in zip(plain, ours, strict=True))
    assert remat.counters.verified > 0
    assert remat.counters.verified_different == 0
    failures.append(RuntimeError("something else"))
    with pytest.raises(RuntimeError, match="something else"):
        gradients_by_step(remat, [0], 1)
