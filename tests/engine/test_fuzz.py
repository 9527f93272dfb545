"""Random programs under every policy: some here, many more with ``-m slow`` or ``python -m tests.engine.fuzz``."""

import warnings

import pytest
import torch

from tests.engine.fuzz import LENGTH, POLICIES, check


def _look(first: int, programs: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # random programs do what one is warned of; bits are compared
        faults = {seed: check(seed, range(LENGTH), list(POLICIES)) for seed in range(first, first + programs)}
    found = {seed: fault for seed, fault in faults.items() if fault is not None}
    assert not found, "\n".join(f"seed {seed}: {fault}" for seed, fault in found.items())


def test_random_programs() -> None:
    _look(0, 60)


@pytest.mark.slow
@pytest.mark.parametrize("hundred", range(20))
def test_many_random_programs(hundred: int) -> None:
    _look(10_000 + hundred * 100, 100)


def test_the_comparison_sees_a_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replay that gives something else is reported, so silence means something."""
    from lightning_remat.engine import replay

    original = replay.run

    def wrong(op: object) -> None:
        original(op)
        for _, reference in op.outs:
            value = reference()
            if value is not None and value.tensor is not None and value.tensor.is_floating_point():
                value.tensor.add_(1e-3)

    monkeypatch.setattr(replay, "run", wrong)
    assert any(check(seed, range(LENGTH), ["all"]) is not None for seed in range(3))
    assert torch.is_grad_enabled()
