"""Jobs in processes of their own that need no imports: forks of a process that has done these and nothing else.

Importing PyTorch and Lightning takes longer than a short training. A process that has run nothing yet may be forked
safely: Python has one thread (this is checked), libraries have no work in theirs, and no accelerator was touched.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a job ended: with a value, with an error (its traceback), or by a signal."""

    value: Any = None
    error: str | None = None
    signal: signal.Signals | None = None


def in_fork(job: Callable[[], Any]) -> Ended:
    """Run a job in a fork of this process.

    Args:
        job: returns something that JSON can carry.
    """
    gc.collect()  # engines that nobody closed, with threads of their own
    for thread in threading.enumerate():
        if thread.name.startswith("lightning-remat-offload"):
            thread.join(10)
    others = [thread.name for thread in threading.enumerate() if thread is not threading.current_thread()]
    if others:
        raise RuntimeError(f"a process with several threads must not be forked; the others: {others}")
    read, write = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child == 0:
        os.close(read)
        try:
            answer = {"value": job()}
        except BaseException:
            answer = {"error": traceback.format_exc()}
        with os.fdopen(write, "w") as file:
            json.dump(answer, file)
        os._exit(0)  # without the parent's exit handlers
    os.close(write)
    with os.fdopen(read) as file:
        text = file.read()
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return Ended(signal=signal.Signals(os.WTERMSIG(status)))
    return Ended(**json.loads(text))


def run_module(name: str, *arguments: str, seconds: float = 280, **environment: str) -> str:
    """Run ``python -m name`` of this repository on one thread; returns what it printed.

    Raises:
        AssertionError: it failed; with the end of what it wrote.
    """
    settings = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment}
    found = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", name, *arguments],
        cwd=ROOT,
        env=os.environ | settings,
        capture_output=True,
        text=True,
        timeout=seconds,
    )
    assert found.returncode == 0, f"{found.stdout[-3000:]}\n{found.stderr[-3000:]}"
    return found.stdout


def run_ranks(name: str, folder: Path, *arguments: str, seconds: float = 280, **environment: str) -> list[Any]:
    """Run a module that starts several processes, and writes ``results.json``; what each of these has found.

    Raises:
        AssertionError: it failed, or one of them.
    """
    run_module(name, str(folder), *arguments, seconds=seconds, **environment)
    ranks: list[Any] = json.loads((folder / "results.json").read_text())
    for number, found in enumerate(ranks):
        ended = found.keys() & {"error", "signal", "late"}
        assert not ended, f"rank {number}: {found.get('error', found)}"
    return ranks
