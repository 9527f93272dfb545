"""Places that are refused or warned of before anything is lost, and copies of engines."""

import copy
import errno
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_remat import ConfigurationError, Offload, Remat, RematCallback, RematStrategy
from lightning_remat.engine.offload import directory as directories
from tests.helpers.offloaded import Smooth, Training, place_of


def test_the_place_of_a_copy_is_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engines: Any) -> None:
    """Copies and pickles have the option, with its directory, wherever they are opened."""
    (tmp_path / "spill").mkdir()
    monkeypatch.chdir(tmp_path)
    remat = engines("offload_only", offload=Offload("spill", min_bytes=0, in_flight=1))
    training = Training(Smooth, remat)
    training.step()
    strategy = RematStrategy(policy="offload_only", offload="./spill")
    callback = RematCallback(policy="offload_only", offload="./spill")
    pickled = pickle.dumps((remat, strategy, callback))
    copies = copy.deepcopy((remat, strategy, callback))
    monkeypatch.chdir("/")
    for one, its_strategy, its_callback in (copies, pickle.loads(pickled)):
        for inner in (one, its_strategy.remat, its_callback.remat):
            assert inner.offload is not None
            assert inner.offload.directory == tmp_path / "spill"
            assert inner.counters.bytes_out == 0
        other = Training(Smooth, one)
        other.step()
        assert place_of(one) is not place_of(remat)
        assert one.counters.steps == 1
        one.close()
    training.step()


THREE = pytest.mark.parametrize("way", [Remat, RematStrategy, RematCallback])


@THREE
def test_bad_input_is_refused_at_once(way: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigurationError, match=r"that is a file and not a directory.*name another directory"):
        way(policy="full", offload=tmp_path / "file")
    with pytest.raises(ConfigurationError, match="there is no such directory"):
        way(policy="full", offload=tmp_path / "missing")
    with pytest.raises(ConfigurationError, match="disk_budget=0 is less than can be used"):
        way(policy="full", offload=Offload(tmp_path, disk_budget=0))
    with pytest.raises(ConfigurationError, match="contradict each other"):
        way(policy="none", offload=tmp_path)

    def refused(*args: Any, **options: Any) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    with monkeypatch.context() as patch:
        patch.setattr(directories.tempfile, "TemporaryFile", refused)
        with pytest.raises(ConfigurationError, match=r"nothing can be written there \(Read-only file system\)"):
            way(policy="full", offload=tmp_path)


@THREE
def test_a_network_file_system_is_warned_of(way: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mounts").write_text(f"1 0 0:1 / {tmp_path} rw - nfs4 server:/ rw\n")
    monkeypatch.setattr(directories, "_MOUNTS", tmp_path / "mounts")
    with pytest.warns(UserWarning, match=r"is on a network file system \(nfs4\)"):
        way(policy="full", offload=tmp_path)


def test_a_directory_that_goes_before_the_first_step(tmp_path: Path, engines: Any) -> None:
    (tmp_path / "spill").mkdir()
    remat = engines("offload_only", offload=tmp_path / "spill")
    (tmp_path / "spill").rmdir()
    with pytest.raises(ConfigurationError, match=r"spill.*cannot any more \(No such file"):
        Training(Smooth, remat).step()


def test_a_model_on_the_cpu_has_nothing_to_move_to_host_memory(monkeypatch: pytest.MonkeyPatch, engines: Any) -> None:
    """The device is known when the first step begins."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    remat = engines("offload_only", offload="cpu")
    for _ in range(2):
        with pytest.raises(ConfigurationError, match=r'offload="cpu" makes no sense here.*use offload="disk"'):
            Training(Smooth, remat).step()
