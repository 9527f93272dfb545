"""PyTorch's operator database under the tape: two samples of every op here, the whole of it with `-m slow`.

`python -m tests.engine.opdb` is the same as a command, with figures; see there for what is compared.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.testing._internal.opinfo.core import OpInfo

from lightning_remat.engine import tape
from lightning_remat.engine.replay import restore
from lightning_remat.engine.values import Value
from tests.engine import opdb
from tests.engine.opdb import EXCEPTIONS, READS_UNINITIALISED, VARIANTS, Finding, Runner, differentiable, name_of

OPS = [(op, dtype) for dtype in opdb.DTYPES for op in differentiable(dtype)]
IDS = [f"{name_of(op)}-{str(dtype).removeprefix('torch.')}" for op, dtype in OPS]
# Ops in the suite in complex64, too: those that conjugate, and their neighbours.
COMPLEX_STEMS = ("linalg.", "fft.", "conj", "mul", "mm", "matmul", "einsum", "pinverse", "view_as", "real", "imag")
SUITE = [
    pytest.param(op, dtype, id=label)
    for (op, dtype), label in zip(OPS, IDS, strict=True)
    if not dtype.is_complex or name_of(op).startswith(COMPLEX_STEMS)
]


@pytest.fixture(scope="module")
def sampling() -> Runner:
    return Runner(both=False)


@pytest.fixture(scope="module")
def thorough() -> Runner:
    return Runner()


@pytest.fixture(scope="module")
def moving() -> Iterator[Runner]:
    runner = Runner(both=False, moving=True)
    yield runner
    runner.close()


@pytest.fixture(scope="module")
def moving_all() -> Iterator[Runner]:
    runner = Runner(moving=True)
    yield runner
    runner.close()


def hold(finding: Finding) -> None:
    assert not finding.problems, "\n".join(finding.problems)
    assert not finding.idle, f"nothing was replayed in {finding.idle}"
    assert finding.passed + finding.raising + finding.excepted.total() > 0


@pytest.mark.parametrize(("op", "dtype"), SUITE)
def test_an_op_with_everything_dropped_gives_the_bits_of_plain_pytorch(
    op: OpInfo, dtype: torch.dtype, sampling: Runner
) -> None:
    """As a function, in place, and in place on a view of a dropped tensor whose base lives on."""
    hold(sampling.check(op, dtype, limit=2))


@pytest.mark.parametrize(
    ("op", "dtype"),
    [p for p in SUITE[::4] if "max_pool" not in str(p.id)],  # whose samples alone take seconds to make
)
def test_an_op_whose_arguments_have_left_gives_the_bits_of_plain_pytorch(
    op: OpInfo, dtype: torch.dtype, moving: Runner
) -> None:
    """All that autograd saves leaves for a disk, or the op is computed again from arguments that come back."""
    finding = moving.check(op, dtype, limit=1)
    assert not finding.problems, "\n".join(finding.problems)


@pytest.mark.slow
@pytest.mark.parametrize(("op", "dtype"), [pytest.param(*p, id=i) for p, i in zip(OPS, IDS, strict=True)])
def test_every_sample_of_an_op_whose_arguments_have_left(op: OpInfo, dtype: torch.dtype, moving_all: Runner) -> None:
    finding = moving_all.check(op, dtype, variants=VARIANTS)
    assert not finding.problems, "\n".join(finding.problems)


@pytest.mark.slow
@pytest.mark.parametrize(("op", "dtype"), [pytest.param(*p, id=i) for p, i in zip(OPS, IDS, strict=True)])
def test_every_sample_of_an_op_in_every_variant(op: OpInfo, dtype: torch.dtype, thorough: Runner) -> None:
    hold(thorough.check(op, dtype, variants=VARIANTS))


@pytest.mark.parametrize("key", EXCEPTIONS)
def test_an_exception_is_one(key: str, sampling: Runner) -> None:
    """An op that agrees with plain PyTorch after all must leave the list, and every entry names an op and a variant."""
    (variant,) = [v for v in VARIANTS if key.endswith(f" {v}") and not key.removesuffix(f" {v}").endswith("in place")]
    (op,) = [op for op in differentiable(torch.float32) if name_of(op) == key.removesuffix(f" {variant}")]
    finding = sampling.check(op, torch.float32, limit=2, variants=[variant])
    assert finding.excepted[key] > 0
    assert EXCEPTIONS[key]


def test_ops_that_read_uninitialised_memory_are_in_the_database() -> None:
    assert {name_of(op) for op, _ in OPS} >= READS_UNINITIALISED


def test_the_runner_sees_what_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A runner that finds nothing proves nothing: where replay gives other bits, it says so."""

    def spoilt(value: Value, *args: Any) -> None:
        restore(value, *args)
        assert value.tensor is not None
        value.tensor = value.tensor.nextafter(torch.tensor(torch.inf))

    monkeypatch.setattr(tape, "restore", spoilt)
    (op,) = [op for op in differentiable(torch.float32) if name_of(op) == "exp"]
    finding = Runner().check(op, torch.float32, limit=1)
    assert finding.passed == 0
    assert "gradient 0" in finding.problems[0]
