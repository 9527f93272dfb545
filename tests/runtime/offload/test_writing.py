"""A disk that is full, gone or silent when a training writes to it, and what comes of it."""

import os
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.bits import difference_in_bits
from tests.helpers.disk import BROKEN, FULL, Held, broken, small_disk
from tests.helpers.offloaded import MODELS, POLICIES, Smooth, Training, everything, place_of, plainly, recorded
from tests.helpers.training import Net


@POLICIES
@MODELS
@pytest.mark.parametrize("number", [FULL, BROKEN])
def test_writes_that_fail(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, engines: Any, policy: Any, make: Any, number: int
) -> None:
    """From the third step on none succeeds: what cannot leave is kept, which is said once, and training goes on."""
    plain = plainly(make, 8)
    remat = engines(policy, offload=everything(tmp_path))
    training = Training(make, remat)
    for _ in range(2):
        training.step()
    before = remat.counters.bytes_out
    assert before > 0
    broken(monkeypatch, "pwritev", lambda call: number)
    texts = recorded(lambda: [training.step() for _ in range(6)])
    assert difference_in_bits(plain, training.left) == []
    assert len(texts) == 1
    assert os.strerror(number) in texts[0]
    assert "Name another directory" in texts[0]
    assert "What could not be moved is kept" in texts[0]
    assert remat.counters.offload_failures >= 5
    assert (remat.counters.retries, remat.counters.steps) == (0, 8)
    assert place_of(remat).used_bytes == 0
    monkeypatch.undo()
    training.step()  # there is room again
    remat.close()
    assert remat.counters.bytes_out > before


@POLICIES
@pytest.mark.parametrize("when", ["from the start", "later"])
def test_a_small_disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, engines: Any, policy: Any, when: str) -> None:
    """It has room for a part of a step; ``later``, others take it."""
    make = lambda: Smooth(width=256, depth=24)  # noqa: E731 - a model in a line
    plain = plainly(make, 4)
    with small_disk(monkeypatch, tmp_path, 1 << 18 if when == "from the start" else 1 << 22):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it is memory, where it could be mounted
            remat = engines(policy, offload=everything(tmp_path))
        training = Training(make, remat)
        if when == "later":
            training.step()
            taken = place_of(remat)._depot.file.allocated()  # type: ignore[union-attr]  # which it has by now
            (tmp_path / "others").write_bytes(bytes((1 << 22) - taken - (1 << 16)))
        texts = recorded(lambda: [training.step() for _ in range(4 - len(training.losses))])
        assert difference_in_bits(plain, training.left) == []
        if when == "from the start" and policy == "offload_only":
            assert len(texts) == 1
            assert "cannot go to the disk" in texts[0]
            assert "the disk is full" in texts[0]
            assert "What cannot leave is kept" in texts[0]
            assert remat.counters.offload_refused > 0
        assert remat.counters.bytes_out > 0
        remat.close()


def test_a_cap(tmp_path: Path, engines: Any) -> None:
    plain = plainly(Smooth, 4)
    remat = engines("offload_only", offload=everything(tmp_path, disk_budget=8192))
    training = Training(Smooth, remat)
    texts = recorded(lambda: [training.step() for _ in range(4)])
    assert difference_in_bits(plain, training.left) == []
    (text,) = texts
    assert "8.0 KiB of disk_budget=8.0 KiB are taken" in text
    assert "Raise disk_budget=" in text
    assert remat.counters.offload_refused >= 4
    assert 0 < place_of(remat).peak_bytes <= 8192


@pytest.mark.parametrize("what", ["removed", "closed to everybody"])
def test_what_becomes_of_the_directory_does_not_matter(tmp_path: Path, engines: Any, what: str) -> None:
    directory = tmp_path / "spill"
    directory.mkdir()
    plain = plainly(Net, 3)
    remat = engines("offload_only", offload=everything(directory))
    training = Training(Net, remat)
    training.step(lambda: shutil.rmtree(directory) if what == "removed" else directory.chmod(0))
    for _ in range(2):
        training.step()
    assert difference_in_bits(plain, training.left) == []
    assert remat.counters.offload_failures == remat.counters.offload_refused == 0
    if directory.exists():
        directory.chmod(0o700)


@MODELS
@pytest.mark.parametrize("name", ["preadv", "pwritev"])
def test_a_disk_that_does_not_answer(tmp_path: Path, engines: Any, make: Any, name: str) -> None:
    """Nothing hangs; it is as if it had failed."""
    plain = plainly(make, 4)
    remat = engines("offload_only", offload=everything(tmp_path))
    place_of(remat).patience = 0.2
    training = Training(make, remat, guarded=True)
    training.step()
    held = []

    def silence(patch: pytest.MonkeyPatch) -> None:
        if not held:
            held.append(Held(patch, name))

    def steps(patch: pytest.MonkeyPatch) -> None:
        if name == "pwritev":
            silence(patch)
        training.step(lambda: silence(patch))
        for _ in range(2):
            training.step()

    try:
        with pytest.MonkeyPatch.context() as patch:
            texts = recorded(lambda: steps(patch))
            assert difference_in_bits(plain, training.left) == []
            assert any("the disk has not answered for 0.2 s" in text for text in texts) or make is Net
            assert remat.counters.retries == (make is Net and name == "preadv")
            remat.close()
    finally:
        held[0].open.set()
