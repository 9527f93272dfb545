"""``offload=`` and Offload: what is accepted, what it comes to, and what is refused in which words."""

from __future__ import annotations

import dataclasses
import pickle
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_remat import ConfigurationError, Offload, Remat, RematCallback, RematStrategy
from lightning_remat.engine.offload import directory as directories
from lightning_remat.offload_option import offload_from
from lightning_remat.runtime.settings import Settings, checked

GIB = 2**30


def settings(**options: Any) -> Settings:
    given: dict[str, Any] = {"policy": "auto", "budget": None, "blocks": None, "offload": None, "verify": False}
    return checked(**(given | options))


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)


def test_three_ways_to_say_where(tmp_path: Path) -> None:
    for given in ("disk", Offload("disk")):
        parsed = offload_from(given)
        assert parsed == Offload("disk")
        assert parsed is not None
        assert (parsed.place, parsed.directory) == ("disk", Path(tempfile.gettempdir()))
    for given in (str(tmp_path), tmp_path, Offload(tmp_path), Offload(str(tmp_path))):
        parsed = offload_from(given)
        assert parsed == Offload(str(tmp_path))
        assert parsed is not None
        assert (parsed.place, parsed.directory) == ("disk", tmp_path)
    assert offload_from(None) is None


def test_host_memory(accelerator: None) -> None:
    parsed = offload_from("cpu")
    assert parsed is not None
    assert (parsed.place, parsed.directory) == ("cpu", None)


def test_a_relative_directory_is_made_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For a copy in a process that is in another folder; also one that is named like a place."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cpu").mkdir()
    assert offload_from("./cpu") == Offload(str(tmp_path / "cpu"))
    (tmp_path / "spill").mkdir()
    assert offload_from(Offload("spill", checksum=False)) == Offload(str(tmp_path / "spill"), checksum=False)


def test_the_home_directory_has_its_short_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "spill").mkdir()
    assert offload_from("~/spill") == Offload(str(tmp_path / "spill"))


def test_sizes_as_everywhere() -> None:
    """Bytes, sizes, and shares of what there is."""
    assert Offload("disk").budget_bytes(1000) is None
    assert Offload("disk", disk_budget="20GiB").budget_bytes(1000) == 20 * GIB
    assert Offload("disk", disk_budget=7).budget_bytes(1000) == 7
    assert Offload("disk", disk_budget="50%").budget_bytes(1000) == 500
    assert Offload("cpu", host_budget="25%").budget_bytes(1000) == 250
    option = Offload("disk", min_bytes="1MiB", in_flight="64MiB")
    assert (option.least_bytes, option.in_flight_bytes) == (2**20, 2**26)
    assert (Offload("disk").least_bytes, Offload("disk").in_flight_bytes) == (2**16, None)
    assert Offload("disk", min_bytes=0).least_bytes == 0


def test_it_is_a_value() -> None:
    """Frozen, comparable, hashable, picklable, and its repr makes it again."""
    option = Offload(Path("/spill"), disk_budget="3GiB")
    assert option == Offload("/spill", disk_budget="3GiB") != Offload("/spill")
    assert len({option, Offload("/spill", disk_budget="3GiB")}) == 1
    assert pickle.loads(pickle.dumps(option)) == option
    assert eval(repr(option)) == option
    with pytest.raises(dataclasses.FrozenInstanceError):
        option.to = "cpu"  # type: ignore[misc]  # that it cannot be is what is tested


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "empty": ({"to": ""}, r"to='' names no place; give 'cpu'"),
    "blank": ({"to": "  "}, "names no place"),
    "no name": ({"to": 3}, "to=3 names no place"),
    "bytes": ({"to": b"disk"}, "names no place"),
    "a zero in it": ({"to": "a\0b"}, "names no place"),
    "none": ({"to": None}, "to=None names no place"),
    "zero": ({"to": "disk", "disk_budget": 0}, "disk_budget=0 is less than can be used; give bytes"),
    "negative": ({"to": "disk", "disk_budget": -1}, "disk_budget=-1 is less"),
    "no share": ({"to": "disk", "disk_budget": "0%"}, "a share is above 0%"),
    "more than all": ({"to": "cpu", "host_budget": "101%"}, "host_budget='101%': a share is above 0%"),
    "no size": ({"to": "disk", "disk_budget": "much"}, "disk_budget='much' is not a size"),
    "a fraction": ({"to": "disk", "disk_budget": 0.5}, "disk_budget=0.5 is not a size.*'50%', not 0.5"),
    "a switch": ({"to": "disk", "disk_budget": True}, "disk_budget=True is not a size"),
    "beyond counting": ({"to": "disk", "disk_budget": "9" * 400 + "GB"}, "more than can be counted"),
    "host for disk": (
        {"to": "disk", "host_budget": "1GiB"},
        "host_budget='1GiB' and to='disk' contradict.*disk_budget=",
    ),
    "host for a directory": ({"to": "/tmp", "host_budget": 1}, "host_budget=1 and to='/tmp' contradict"),
    "disk for host": ({"to": "cpu", "disk_budget": "1GiB"}, "disk_budget='1GiB' and to='cpu' contradict.*host_budget="),
    "min_bytes": ({"to": "disk", "min_bytes": -1}, "min_bytes=-1"),
    "a share of min_bytes": ({"to": "disk", "min_bytes": "5%"}, "min_bytes='5%': a share of what"),
    "min_bytes none": ({"to": "disk", "min_bytes": None}, "min_bytes=None is not a size"),
    "in_flight": ({"to": "disk", "in_flight": 0}, "in_flight=0"),
    "checksum": ({"to": "disk", "checksum": "yes"}, "checksum='yes' is not a switch"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_value_that_cannot_work_is_refused(name: str) -> None:
    options, message = WRONG[name]
    with pytest.raises(ConfigurationError, match=message) as caught:
        Offload(**options)
    assert str(caught.value).startswith("Offload: ")


@pytest.mark.parametrize("option", [True, 3, 0.5, ["disk"], {"to": "disk"}, b"disk"], ids=str)
def test_what_is_no_place_is_refused(option: Any) -> None:
    with pytest.raises(ConfigurationError, match="is no place: give 'cpu'") as caught:
        Remat(offload=option)
    assert str(caught.value).startswith(f"offload={option!r}")


@pytest.mark.parametrize("where", [Remat, RematStrategy, RematCallback])
def test_host_memory_without_an_accelerator_is_refused(where: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It says why, and names the other place; making the option alone is no error."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    with pytest.raises(ConfigurationError, match=r"no accelerator is available here.*'disk'"):
        where(offload=Offload("cpu", host_budget="1GiB"))


def test_a_directory_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigurationError):
        Remat(offload=tmp_path / "file")
    with pytest.raises(ConfigurationError):
        Remat(offload=tmp_path / "missing")


def test_a_misspelt_place_is_told_from_a_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for wrong in ("Disk", "gpu", "CPU"):
        with pytest.raises(ConfigurationError, match=f"to='{wrong}' is neither 'cpu' nor 'disk'"):
            Remat(offload=wrong)


def test_what_the_directory_is_warned_of(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One sentence, by whoever knows file systems."""
    monkeypatch.setattr(directories, "check_directory", lambda path: f"{path} is slow")
    with pytest.warns(UserWarning, match="is slow"):
        Remat(offload=tmp_path)


# ---------------------------------------------------------------------- with policies


def test_none_and_a_place_contradict_each_other() -> None:
    with pytest.raises(ConfigurationError, match=r"policy='none' and offload='disk' contradict.*offload_only"):
        Remat("none", offload="disk")


@pytest.mark.parametrize("policy", ["offload_only", {"layers.*": "offload_only", "head": "full"}], ids=str)
def test_offload_only_needs_a_place(policy: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"nothing says where to: give offload='cpu'.*policy='none'"):
        Remat(policy)
    assert settings(policy=policy, offload="disk").policy.needs_offload


def test_settings() -> None:
    """Whether plans are made, and whether they may compute anything again."""
    found = settings(offload="disk")
    assert (found.offload, found.auto, found.recompute) == (Offload("disk"), True, True)
    found = settings(policy="full", offload="disk")
    assert (found.offload, found.auto, found.recompute) == (Offload("disk"), False, True)
    found = settings(policy="offload_only", offload="disk")
    assert (found.auto, found.recompute, found.policy.off) == (False, False, False)
    found = settings(policy="offload_only", offload="disk", budget="1GiB")
    assert (found.auto, found.recompute, found.budget) == (True, False, GIB)
    found = settings(policy="full")
    assert (found.offload, found.recompute) == (None, True)
    with pytest.raises(ConfigurationError, match="contradict"):
        settings(policy="full", offload="disk", budget="1GiB")


def test_what_is_in_force(tmp_path: Path) -> None:
    """The engine and a copy of it."""
    remat = Remat("full", offload=tmp_path)
    assert remat.offload == Offload(str(tmp_path))
    assert pickle.loads(pickle.dumps(remat)).offload == remat.offload
    assert Remat("full").offload is None
