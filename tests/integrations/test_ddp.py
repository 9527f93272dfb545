"""Two processes with gloo on the CPU: per tensor and bit for bit what Lightning's DDP gives."""

import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import pytest

from tests.helpers.forks import run_ranks
from tests.integrations.ddp_worker import SCENARIOS

ROOT = Path(__file__).parents[2]
SECONDS = 150  # until all of a run's processes are ended, whatever they wait for


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def finish(processes: list[subprocess.Popen[bytes]], seconds: float = SECONDS) -> bool:
    """Wait until all have ended, or one has failed, or time is up; then end them with everything that they started.

    Returns whether all went well. One that waits for a peer that has failed would wait for half an hour.
    """
    deadline = monotonic() + seconds
    try:
        while monotonic() < deadline:
            codes = [process.poll() for process in processes]
            if any(codes) or None not in codes:
                return not any(codes)
            sleep(0.1)
        return False
    finally:
        for process in processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def start(output: Path, *arguments: str, **environment: str) -> subprocess.Popen[bytes]:
    """Python with the repository on its path, in a process group of its own, printing into a file."""
    settings = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **environment}
    with output.open("wb") as file:
        return subprocess.Popen(
            [sys.executable, "-W", "ignore", *arguments],
            cwd=ROOT,
            env=os.environ | settings,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two ranks has found, by scenario: all in one pair of processes, since imports take longer than the
    trainings."""
    return run_ranks("tests.integrations.ddp_worker", tmp_path_factory.mktemp("ddp"))


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("name", SCENARIOS)
def test_each_rank_gives_what_plain_ddp_gives(results: list[dict[str, Any]], name: str, rank: int) -> None:
    """Losses, reduced gradients, weights, buffers, optimizer state and random streams of every rank."""
    found = results[rank][name]
    assert found["difference"] == []
    assert found["ddp"]
    assert found["world"] == 2
    assert found["gradients"] == 4 * found["epochs"]
    assert not found["wrapped"]
    if found["policy"] != "none":
        assert (found["replayed"] > 0) is SCENARIOS[name].replays


def test_each_rank_may_have_a_policy_of_its_own(results: list[dict[str, Any]]) -> None:
    assert [found["another policy on each rank"]["policy"] for found in results] == ["full", "selective"]


SPAWN = """
import torch
from lightning_remat import RematStrategy
from tests.helpers.bits import difference_in_bits
from tests.helpers.training import Lit, Net, regression, regression_data, trainer_for
from tests.helpers import seed_everything

def weights(strategy):
    seed_everything(3)
    module = Lit(Net(), regression)
    trainer_for(strategy, devices=2).fit(module, regression_data(8))
    return module.state_dict()

if __name__ == "__main__":
    plain, ours = weights("ddp_spawn"), weights(RematStrategy(base="ddp_spawn", policy="full"))
    assert difference_in_bits(plain, ours) == []
"""


@pytest.mark.slow
def test_spawned_processes_get_the_strategy(tmp_path: Path) -> None:
    """There the strategy travels as a pickle."""
    script = tmp_path / "spawn.py"
    script.write_text(SPAWN)
    output = tmp_path / "output.txt"
    assert finish([start(output, str(script))]), output.read_text()[-3000:]
