"""What was written does not come back, and what comes of it."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_remat import Offload, OffloadError, Remat
from tests.helpers.bits import difference_in_bits
from tests.helpers.disk import BROKEN, broken, damage_all
from tests.helpers.offloaded import POLICIES, Smooth, Training, everything, place_of, plainly, recorded
from tests.helpers.training import Net


@POLICIES
@pytest.mark.parametrize("how", ["damaged", "unreadable"])
def test_what_can_be_computed_again_is(tmp_path: Path, engines: Any, policy: Any, how: str) -> None:
    """The same bits, without a retry; said once."""
    plain = plainly(Smooth, 6)
    remat = engines(policy, offload=everything(tmp_path))
    training = Training(Smooth, remat)

    def steps() -> None:
        for index in range(6):
            with pytest.MonkeyPatch.context() as patch:
                if index % 2 == 0:
                    training.step()
                elif how == "damaged":
                    training.step(lambda: damage_all(place_of(remat)))
                else:
                    training.step(lambda patch=patch: broken(patch, "preadv", lambda call: BROKEN))

    texts = recorded(steps)
    assert difference_in_bits(plain, training.left) == []
    (text,) = texts
    assert ("what was read is not what was written" if how == "damaged" else "Input/output error") in text
    assert "It was computed again instead" in text
    assert remat.counters.retries == 0
    remat.close()
    assert remat.counters.offload_failures >= 3
    assert remat.counters.bytes_in > 0


def test_a_long_chain_is_computed_again(tmp_path: Path, engines: Any) -> None:
    """From the first batch on: all that was written is lost, in a model that is deeper than calls may be."""

    def make() -> nn.Module:
        return Smooth(width=4, depth=400)

    plain = plainly(make, 2)
    remat = engines("offload_only", offload=everything(tmp_path))
    training = Training(make, remat)
    (text,) = recorded(lambda: [training.step(lambda: damage_all(place_of(remat))) for _ in range(2)])
    assert "It was computed again instead" in text
    assert difference_in_bits(plain, training.left) == []


def test_what_cannot_be_computed_again_is_an_error_in_a_plain_loop(tmp_path: Path, engines: Any) -> None:
    """It says what to do; after that, training goes on."""
    remat = engines("offload_only", offload=everything(tmp_path))
    training = Training(Net, remat)
    training.step()
    with pytest.raises(OffloadError, match="what was read is not what was written") as caught:
        training.step(lambda: damage_all(place_of(remat)))
    text = str(caught.value)
    for part in ("Name another directory", "Nor can it be computed again", "clear them and run the batch again"):
        assert part in text
    assert "Remat.attempt" in text
    assert caught.value.__cause__ is not None
    training.step()


@POLICIES
def test_a_step_that_lost_something_is_run_again(tmp_path: Path, engines: Any, policy: Any, caplog: Any) -> None:
    plain = plainly(Net, 5)
    remat = engines(policy, offload=everything(tmp_path))
    training = Training(Net, remat, guarded=True)
    tries = []

    def damage() -> None:
        tries.append(1)
        if len(tries) == 1:
            damage_all(place_of(remat))

    texts = recorded(lambda: [training.step(damage if index == 2 else lambda: None) for index in range(5)])
    assert difference_in_bits(plain, training.left) == []
    counters = remat.counters
    if policy == "offload_only":
        assert (len(tries), counters.retries, counters.retried_batches) == (2, 1, 1)
        assert all("It was computed again instead" in text for text in texts)
        (record,) = caplog.records
        assert record.message.endswith("A training step needs it: the same batch is run again, without offload.")
        assert "could not be read from the disk" in record.message
        assert "Nor can it" not in record.message
        assert any("run again without offload" in note for note in counters.notes)
    assert counters.steps == 5
    assert counters.out_of_memory == 0
    remat.close()
    assert counters.offload_failures > 0


def test_after_the_third_time_nothing_is_moved_any_more(tmp_path: Path, engines: Any) -> None:
    plain = plainly(Net, 8)
    remat = engines("offload_only", offload=everything(tmp_path))
    training = Training(Net, remat, guarded=True)

    def steps() -> None:
        for _ in range(8):
            training.step(lambda: damage_all(place_of(remat)))

    (text,) = recorded(steps)
    assert "3 steps had to be run again" in text
    assert "from now on nothing is moved" in text
    assert difference_in_bits(plain, training.left) == []
    assert (remat.counters.retries, remat.counters.retried_batches) == (3, 3)
    moved = remat.counters.bytes_out
    training.step()
    remat.close()
    assert remat.counters.bytes_out == moved


def test_a_plan_that_moves(tmp_path: Path, engines: Any) -> None:
    """The same bits; where nothing is moved any more, there is another plan."""

    def trained(remat: Remat | None) -> Training:
        def make() -> nn.Module:
            return nn.Sequential(*[nn.Sequential(nn.Linear(128, 128), nn.GELU(), nn.Dropout(0.1)) for _ in range(6)])

        training = Training(make, remat, guarded=True)
        training.batches = torch.randn(1, 1024, 128).expand(50, -1, -1)
        for index in range(12):
            training.step((lambda: damage_all(place_of(remat))) if remat and 5 <= index < 8 else lambda: None)
            if remat and index in (4, 11):
                assert remat.plan is not None
                assert bool(remat.plan.chosen.moves) is (index == 4)
        return training

    plain = trained(None).left
    # Less than it takes to keep all, and more than it takes to move all.
    remat = engines("offload_only", budget="6MiB", offload=Offload(tmp_path, min_bytes=0))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ours = trained(remat).left
    assert difference_in_bits(plain, ours) == []
    assert sum("from now on nothing is moved" in str(w.message) for w in caught) == 1
    assert remat.counters.retries == 3


def test_one_retry_is_enough_for_a_step_of_several_parts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, engines: Any
) -> None:
    """The step that is run again moves nothing to its end, and the next one does."""
    plain = plainly(Net, 2, parts=3)
    remat = engines("offload_only", offload=everything(tmp_path), retries=1)
    training = Training(Net, remat, guarded=True, parts=3)
    broken(monkeypatch, "preadv", lambda call: BROKEN)
    for count in (1, 2):
        training.step()
        assert remat.counters.retries == count
    assert difference_in_bits(plain, training.left) == []


def test_an_error_of_the_users_ends_a_try_as_ever(tmp_path: Path, engines: Any) -> None:
    """The next step moves again."""
    remat = engines("offload_only", offload=everything(tmp_path))
    training = Training(Net, remat, guarded=True)
    tries = []

    def fail() -> None:
        tries.append(1)
        if len(tries) == 2:
            raise ZeroDivisionError
        damage_all(place_of(remat))

    with pytest.raises(ZeroDivisionError):
        training.step(fail)
    training.step()
    before = remat.counters.bytes_out
    training.step()
    remat.close()
    assert remat.counters.bytes_out > before


def test_without_retries_the_error_goes_up(tmp_path: Path, engines: Any) -> None:
    remat = engines("offload_only", offload=everything(tmp_path), retries=0)
    training = Training(Net, remat, guarded=True)
    with pytest.raises(OffloadError, match="clear them and run the batch again"):
        training.step(lambda: damage_all(place_of(remat)))


class Twice(nn.Module):
    """What has left is computed from what is written in place, and both are asked for by one replay."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        h = h.mul(2).sin_().mul_(0.5)
        kept = torch.matmul(h, self.linear.weight)
        return (h * h.exp()).cos() + (h.exp() * kept).sin() * kept.cos()


@pytest.mark.parametrize("kept", ["mm", "mm addmm", "mul sin_", "exp mm", "sin cos mm"])
def test_writes_are_run_once_though_two_chains_need_them(tmp_path: Path, engines: Any, kept: str) -> None:
    """What is fetched comes after all that its recipe needs, so that one chain goes on where the other has failed."""

    def policy(op: Any) -> str:
        return "keep" if op.name.split(".")[1] in kept.split() else "recompute"

    plain = plainly(Twice, 3)
    remat = engines(policy, offload=everything(tmp_path))
    training = Training(Twice, remat, guarded=True)
    recorded(lambda: [training.step(lambda: damage_all(place_of(remat))) for _ in range(3)])
    assert difference_in_bits(plain, training.left) == []
