"""``lightning-remat quiz`` as a program of its own, on terminals and streams that lack something."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lightning_remat import cli
from lightning_remat.quiz.words import words


def started(folder: Path, before: str, language: str, input: bytes = b"") -> Any:
    """What came of it; ``before`` is shell that stands before the command."""
    environment = {
        "PYTHONPATH": str(Path(cli.__file__).parent.parent),
        "XDG_DATA_HOME": str(folder),
        "TERM": "dumb",
        "LANG": "C.UTF-8",
        "OMP_NUM_THREADS": "1",
    }
    command = f'{before} "$0" -m lightning_remat quiz --topic recomputation --lang {language}'
    return subprocess.run(
        ["sh", "-c", command, sys.executable],
        cwd=folder,
        env=environment,
        input=input,
        capture_output=True,
        timeout=120,
        check=True,
    )


def test_a_dumb_terminal(tmp_path: Path) -> None:
    """Where input is a pipe and TERM knows nothing."""
    found = started(tmp_path, "", "hi", b"a\n")
    assert found.stderr == b""
    assert b"\x1b" not in found.stdout
    assert words("terminal", "hi")["left"] in found.stdout.decode().replace("\n", " ")


@pytest.mark.parametrize("closed", ["<&-", ">&-"])
def test_streams_that_are_closed(tmp_path: Path, closed: str) -> None:
    """As cron and some launchers start programs: it ends as at the end of input."""
    assert started(tmp_path, closed, "en").stderr == b""


def test_input_that_is_no_text(tmp_path: Path) -> None:
    """It is no answer, and nothing to stop for."""
    found = started(tmp_path, "", "en", b"\xff\xfe\n\xff\n")
    assert found.stderr == b""
    assert words("terminal", "en")["left"] in found.stdout.decode().replace("\n", " ")


def test_a_terminal_without_the_letters(tmp_path: Path) -> None:
    found = started(tmp_path, "PYTHONUTF8=0 PYTHONIOENCODING=ascii", "hi", b"x\n")
    assert found.stderr == b""
    assert b"???" in found.stdout
