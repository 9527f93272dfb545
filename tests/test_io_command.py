"""``lightning-remat bench-io``: what is measured where, how it is shown, what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import Result
from typer.testing import CliRunner

from lightning_remat import OffloadError, cli, io_command
from lightning_remat.runtime.bandwidth import Bandwidth


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where it is remembered; nothing is there yet."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory of which nobody knows that it is slow."""
    monkeypatch.setattr(io_command, "check_directory", lambda path: None)
    monkeypatch.setattr(io_command, "file_system", lambda path: "ext4")
    return tmp_path


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What would have been measured; the figures are made up."""
    asked: list[dict[str, Any]] = []

    def bandwidth_of(place: Any, key: str, where: str, **options: Any) -> Bandwidth:
        asked.append({"place": place.name, "key": key, "where": where, **options})
        plain = len(asked) > 1
        return Bandwidth(
            out_bytes_per_second=2e9,
            in_bytes_per_second=8e8 if plain else 1e9,
            latency_seconds=2.5e-4,
            cpu_seconds_per_byte=2e-10 if plain else 2.5e-10,
            delay_seconds_per_byte=4e-10,
            measured_at=1e12 if not options["fresh"] else 2e12,
            place=place.name,
            where=where,
        )

    monkeypatch.setattr(io_command, "bandwidth_of", bandwidth_of)
    monkeypatch.setattr(io_command.time, "time", lambda: 1.5e12)
    monkeypatch.setattr(io_command.time, "strftime", lambda form, when: "2026-11-01")
    monkeypatch.setattr(io_command.time, "localtime", lambda when: None)
    return asked


def run(*args: str) -> Result:
    return CliRunner().invoke(cli.app, ["bench-io", *args], env={"COLUMNS": "160"})


def test_a_real_disk(disk: Path) -> None:
    """It is measured once with checksums and once without, nothing is left behind, and it is known the next time."""
    first = run(str(disk), "--size", "8MiB", "--json")
    assert first.exit_code == 0, first.output
    data = json.loads(first.stdout)
    assert (data["directory"], data["file_system"]) == (str(disk), "ext4")
    assert isinstance(data["direct_io"], bool)
    assert [(one["checksum"], one["known"], one["place"]) for one in data["measured"]] == [
        (True, False, "disk"),
        (False, False, "disk"),
    ]
    assert all(one["out_bytes_per_second"] > 0 and one["in_bytes_per_second"] > 0 for one in data["measured"])
    assert list(disk.iterdir()) == []
    again = json.loads(run(str(disk), "--json").stdout)
    assert [one | {"known": False} for one in again["measured"]] == data["measured"]
    assert all(one["known"] for one in again["measured"])


def test_the_table(disk: Path, calls: list[dict[str, Any]]) -> None:
    """Rates, latency, processor time, and what they mean."""
    result = run(str(disk), "--fresh", "--size", "64MiB")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0].startswith(f"{disk}: ext4, ")
    with_sums, without = (next(line for line in lines if name in line) for name in ("with checksums", "without"))
    assert [cell.strip() for cell in with_sums.split("│")[2:6]] == ["2.00 GB/s", "1.00 GB/s", "250 µs", "0.25"]
    assert [cell.strip() for cell in without.split("│")[2:6]] == ["2.00 GB/s", "800 MB/s", "250 µs", "0.20"]
    assert "A step of 1 s hides about 0.67 GB" in result.stdout
    assert "Checksums take 0.05 s of processor time for each GB" in result.stdout
    assert "--fresh" not in result.stdout
    assert [(c["total_bytes"], c["content_bytes"], c["fresh"]) for c in calls] == [(2**26, 2**23, True)] * 2
    assert calls[0]["key"] != calls[1]["key"]


def test_it_says_when_it_was_measured_before(disk: Path, calls: list[dict[str, Any]]) -> None:
    assert "Measured here before (2026-11-01); --fresh measures again." in run(str(disk)).stdout


def test_without_a_directory_it_is_that_of_offload(
    disk: Path, calls: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(io_command, "default_directory", lambda: disk)
    assert run().exit_code == 0
    assert [c["where"] for c in calls] == [str(disk)] * 2


def test_host_memory(calls: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    """The current accelerator; nothing is said of checksums, which there are none of."""

    class Host:
        name = "cpu"
        closed = False

        def __init__(self, device: torch.device) -> None:
            assert device == torch.device("xpu", 0)

        def close(self) -> None:
            Host.closed = True

    monkeypatch.setattr(io_command, "HostPlace", Host)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("xpu"))
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    result = run("--to", "cpu")
    assert result.exit_code == 0, result.output
    assert "Host memory, from xpu and back" in result.stdout
    assert "hecksum" not in result.stdout
    assert Host.closed
    assert calls[0]["device"] == torch.device("xpu", 0)
    data = json.loads(run("--to", "cpu", "--json").stdout)
    assert data["accelerator"] == "xpu"
    assert "checksum" not in data["measured"][0]


def test_what_is_refused(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    for args, message in (
        (["--to", "cpu"], "no accelerator is available"),
        (["--to", "cpu", str(disk)], "contradict each other"),
        (["--size", "much"], "--size='much' is not a size"),
        (["--size", "0"], "--size='0' is less than can be used"),
        (["--size", "1MiB"], "8388608 at least"),  # what is measured is what plans rest on for 30 days
        (["--to", "tape"], "tape"),
    ):
        result = run(*args)
        assert result.exit_code == 2
        assert message in result.stderr
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(disk))
    result = run(str(disk / "missing"))
    assert result.exit_code == 2
    assert "missing" in result.stderr


def test_a_disk_that_fails(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one line, not as a traceback."""

    def full(*args: Any, **options: Any) -> Bandwidth:
        raise OffloadError("the disk is full")

    monkeypatch.setattr(io_command, "bandwidth_of", full)
    result = run(str(disk))
    assert result.exit_code == 1
    assert result.stderr == "lightning-remat bench-io: the disk is full\n"


def test_what_it_is_warned_of(disk: Path, calls: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the figures, so that JSON stays JSON."""
    monkeypatch.setattr(io_command, "check_directory", lambda path: "that is host memory.")
    result = run(str(disk), "--json")
    assert result.stderr == "Note: that is host memory.\n"
    assert json.loads(result.stdout)


def test_help() -> None:
    text = CliRunner().invoke(cli.app, ["bench-io", "--help"]).output
    assert all(option in text for option in ("--to", "--size", "--json", "--fresh", "Example"))
