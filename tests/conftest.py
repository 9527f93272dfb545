"""Rules that hold for every test: known seeds, one thread, no network, and no state left behind."""

import os
from collections.abc import Iterator

# Read by libraries when they are imported, hence before the other imports.
os.environ["HF_HUB_OFFLINE"] = "1"  # models come from random configs; a test that asks a hub for one must fail
os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # its pool of threads would outlive the tests; some of them fork
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it, cuBLAS is free to differ from run to run

import hypothesis
import pytest
import torch
from torch import distributed
from tqdm import tqdm

pytest.register_assert_rewrite("tests.helpers")

from tests.helpers import difference, restore, seed_everything, snapshot
from tests.helpers.state import WATCHED

# Deadlines are timed tests, which say more about the machine than about the code; and a run must be repeatable.
hypothesis.settings.register_profile("remat", deadline=None, derandomize=True)
hypothesis.settings.load_profile("remat")

# What Lightning and torch.distributed write to the environment in ordinary use: put back, and no reason to fail.
WRITTEN_BY_LIBRARIES = {
    "CUBLAS_WORKSPACE_CONFIG",  # Trainer(deterministic=True)
    "CUDA_DEVICE_ORDER",  # Trainer on CUDA
    "PL_GLOBAL_SEED",  # Lightning's seed_everything
    "PL_SEED_WORKERS",
    "MASTER_ADDR",  # Lightning's launchers, down to WORLD_SIZE
    "MASTER_PORT",
    "NODE_RANK",
    "LOCAL_RANK",
    "RANK",
    "WORLD_SIZE",
    "OMP_NUM_THREADS",  # they, too, for their child processes
    "TORCHINDUCTOR_CACHE_DIR",  # torch.compile
    "_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR",  # likewise, for what it builds for the CPU
    "TRITON_CACHE_DIR",
}

# Not looked at: what pytest keeps there, and what Lightning sets once, when it is imported, and wants to stay.
NOT_WATCHED = {"PYTEST_CURRENT_TEST", "PYTORCH_NVML_BASED_CUDA_CHECK"}


def pytest_configure(config: pytest.Config) -> None:
    """Give PyTorch one thread before anything is collected, so that doctests have one, too.

    How a kernel splits its work, and with it the last bit, can depend on the number of threads.
    """
    torch.set_num_threads(1)
    tqdm.monitor_interval = 0  # progress bars without a thread that outlives them: some tests fork


@pytest.fixture
def one_process() -> Iterator[None]:
    """A process group of one, where what others would have sent is the process's own."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        distributed.destroy_process_group()


@pytest.fixture(autouse=True)
def _no_state_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail the test that leaves modes, hooks, flags or threads other than it found them; put them back in any case.

    This is the first fixture of a test and so the last one torn down: what a test's own fixtures undo is undone by
    then. A test of code that changes such a thing by design says so with `@pytest.mark.allow_leak("name")`.
    """
    allowed = {name for marker in request.node.iter_markers("allow_leak") for name in marker.args}
    if unknown := allowed - set(WATCHED):
        pytest.fail(f"allow_leak: {sorted(unknown)} is not among {sorted(WATCHED)}", pytrace=False)
    before = snapshot()
    yield
    changed = difference(before, snapshot())
    restore(before)
    leaked = [text for name, text in changed.items() if name not in allowed]
    if leaked:
        pytest.fail("the test left process-wide state changed:\n  " + "\n  ".join(leaked), pytrace=False)


@pytest.fixture(autouse=True)
def _no_environment_left_behind(_no_state_left_behind: None) -> Iterator[None]:
    """Fail the test that leaves other environment variables than it found; put them back in any case."""
    before = dict(os.environ)
    yield
    after = dict(os.environ)
    names = (before.keys() | after.keys()) - NOT_WATCHED
    changed = {name for name in names if before.get(name) != after.get(name)}
    for name in changed:
        if name in before:
            os.environ[name] = before[name]
        else:
            del os.environ[name]
    if leaked := sorted(changed - WRITTEN_BY_LIBRARIES):
        pytest.fail(f"the test left environment variables changed: {', '.join(leaked)}", pytrace=False)


@pytest.fixture(autouse=True)
def _known_start(_no_state_left_behind: None) -> None:
    """Start each test with one thread and the same seeds, so that its result does not depend on its place in a run.

    The random streams are not put back afterwards: the next test sets its own.
    """
    torch.set_num_threads(1)
    seed_everything()
