"""The command line finds its parts and hands arguments over."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lightning_remat import cli, shipped
from lightning_remat.__about__ import __version__


def test_version() -> None:
    result = CliRunner().invoke(cli.app, ["--version"])
    assert result.exit_code == 0
    assert result.output == f"lightning-remat {__version__}\n"


def test_without_a_command_the_help_is_shown() -> None:
    assert "demo" in CliRunner().invoke(cli.app, []).output


def test_the_module_is_the_command(tmp_path: Path) -> None:
    """``python -m lightning_remat`` from any folder, with the demo's own help behind ``demo --help``."""
    command = [sys.executable, "-m", "lightning_remat", "demo", "--help"]
    root = str(Path(cli.__file__).parent.parent)
    result = subprocess.run(
        command, cwd=tmp_path, env={"PYTHONPATH": root}, capture_output=True, text=True, timeout=120, check=True
    )
    assert "lightning-remat demo" in result.stdout
    assert "--policy" in result.stdout


def test_arguments_of_the_demo_are_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Options that the command line does not know reach the demo as they are; so does its exit status."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    result = CliRunner().invoke(cli.app, ["demo", "--policy", "every:0"])
    assert result.exit_code == 2
    assert "every:0" in result.output


def test_what_goes_along_is_found_in_a_wheel_and_in_a_checkout(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The installed copy comes first; where there is neither, both places are named."""
    package = tmp_path / "site" / "lightning_remat"
    monkeypatch.setattr(shipped, "__file__", str(package / "shipped.py"))
    with pytest.raises(FileNotFoundError, match=r"_examples nor in .*examples"):
        shipped.shipped_folder("examples", holds="demo_gpt.py")

    for place in (package.parent / "examples", package / "_examples"):
        place.mkdir(parents=True)
        (place / "demo_gpt.py").touch()
        assert shipped.shipped_folder("examples", holds="demo_gpt.py") == place
