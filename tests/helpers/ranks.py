"""Several processes that train together: forks of one process that has done imports and nothing else.

The forks find each other through the usual variables of the environment, and write what they have found as JSON.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from time import monotonic, sleep
from typing import Any

from lightning_remat import Remat
from lightning_remat.runtime.tuning.pilot import Pilot


def rank() -> int:
    """Which of them this is."""
    return int(os.environ.get("LOCAL_RANK", "0"))


_worlds = [1]


def world() -> int:
    """How many there are. (Lightning removes the variable when a training ends.)"""
    return _worlds[-1]


def free_port() -> int:
    """One that nobody listens at now."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def peaks_of(remat: Remat) -> list[dict[str, int]]:
    """Bytes for each kind of step (by sizes, with gradients or without) that was traced, and measured under a plan."""
    return [
        {
            "static": known.static,
            "plain": known.static + known.result.plain.peak_bytes,
            "predicted": known.static + known.result.chosen.peak_bytes,
            "measured": known.static + known.measured.peak_bytes,
        }
        for known in (remat.pilot.known.all if isinstance(remat.pilot, Pilot) else [])
        if known.traced and known.result is not None and known.measured is not None
    ]


def together(folder: Path, count: int, job: Callable[[], Any], seconds: float, *, naturally: bool = False) -> list[Any]:
    """Run a job in ``count`` processes.

    Args:
        folder: for what they write.
        count: of processes.
        job: returns something that JSON can carry.
        seconds: until those that still run are killed.
        naturally: processes end as programs do that an error ends: Python is wound up, exit handlers run. One that
            does not come to an end is ``"late"``, whatever it has written.

    Returns:
        For each process what its job returned; or a dictionary with ``"error"`` (a traceback), ``"signal"`` (what ended
        it) or ``"late"`` (it was killed since time was up).
    """
    folder.mkdir(parents=True, exist_ok=True)
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(count), "NODE_RANK": "0"}
    sys.stdout.flush()
    sys.stderr.flush()
    if naturally:
        # Or else each process that is wound up looks through all that was imported, and gets a copy of its memory.
        gc.collect()
        gc.freeze()
    children: dict[int, int] = {}
    for number in range(count):
        child = os.fork()
        if child == 0:
            _end_with_parent()
            os.environ.update(place, LOCAL_RANK=str(number))
            _worlds.append(count)
            _run(folder / f"{number}.json", job, naturally)
        children[child] = number
    deadline = monotonic() + seconds
    ended: dict[int, Any] = {}
    while len(ended) < count:
        late = monotonic() > deadline
        for child, number in children.items():
            if number in ended:
                continue
            if late:
                with suppress(ProcessLookupError):
                    os.kill(child, signal.SIGKILL)
            found, status = os.waitpid(child, 0 if late else os.WNOHANG)
            if found:
                path = folder / f"{number}.json"
                if path.exists() and not (late and naturally):
                    ended[number] = json.loads(path.read_text())
                elif late:
                    ended[number] = {"late": True, "written": path.exists()}
                else:
                    ended[number] = {"signal": signal.Signals(os.WTERMSIG(status)).name}
        sleep(0.05)
    return [ended[number] for number in range(count)]


def _end_with_parent() -> None:
    """Whoever kills the parent, since it took too long, does not know of its forks. Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_DIES_WITH_PARENT, signal.SIGKILL)


_DIES_WITH_PARENT = 1  # PR_SET_PDEATHSIG in <sys/prctl.h>


def _run(path: Path, job: Callable[[], Any], naturally: bool) -> None:
    """Never returns."""
    try:
        answer = job()
    except BaseException:
        answer = {"error": traceback.format_exc()}
    # All at once: a process may be killed at any time.
    part = path.with_suffix(".part")
    part.write_text(json.dumps(answer))
    part.replace(path)
    if naturally:
        raise SystemExit(1)
    os._exit(0)  # as an error ends a process: without waiting for the others, or for the parent's handlers
