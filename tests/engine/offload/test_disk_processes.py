"""Several processes, forks, and processes that end in the middle of something."""

import json
import os
import signal
import subprocess
import sys
import threading
import warnings
from pathlib import Path

import pytest
import torch

from lightning_remat.engine.offload.disk import DiskPlace
from lightning_remat.errors import OffloadError
from tests.helpers.disk import fetched, scratch, some_bytes, threads
from tests.helpers.forks import ROOT, in_fork


def script(text, directory, *arguments):
    """Start a process of its own; ``place`` is on the directory, and ``ready()`` tells us to go on."""
    start = (
        "import sys, os, torch\n"
        "from lightning_remat.engine.offload.disk import DiskPlace\n"
        "def ready(): print('ready', flush=True)\n"
        "place = DiskPlace(sys.argv[1], patience=5)\n"
    )
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-c", start + text, str(directory), *arguments],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def is_ready(process):
    line = process.stdout.readline()
    assert line == "ready\n", process.stderr.read()


def test_killed_in_the_middle_of_writing(tmp_path):
    text = (
        "source = torch.ones(32 << 20, dtype=torch.uint8)\n"
        "place.take(source).finish_out()\n"
        "ready()\n"
        "while True: place.take(source)\n"
    )
    with script(text, tmp_path) as process:
        is_ready(process)
        assert list(tmp_path.iterdir()) == []
        # The only way to its bytes are its descriptors.
        links = [os.readlink(path) for path in Path(f"/proc/{process.pid}/fd").iterdir()]
        assert any(link.startswith(str(tmp_path)) and link.endswith("(deleted)") for link in links)
        process.send_signal(signal.SIGKILL)
        assert process.wait(60) == -signal.SIGKILL
    # Nothing has a name, and nobody has a descriptor: that is when a file system frees a file.
    assert list(tmp_path.iterdir()) == []


SLOW = """
import threading
real = os.pwritev
os.pwritev = lambda *args: threading.Event().wait(0.05) or real(*args)
held = [place.take(torch.ones(64 << 20, dtype=torch.uint8)) for _ in range(3)]
"""

ENDS = {
    "in the middle of writing": SLOW,
    "in cycles": "held = place.take(some); held.finish_out(); held.me = held; place.me = place",
    "closed": "place.take(torch.ones(64 << 20, dtype=torch.uint8)).release(); place.close(); place.close()",
    "silent": """
place.patience = 0.1
place.take(some).finish_out()
os.pwritev = lambda *args: threading.Event().wait()
held = place.take(some)
try: held.finish_out()
except RuntimeError as error: assert 'has not answered' in str(error)
else: assert False
""",
    "closed at exit": "atexit.register(place.close); held = place.take(torch.ones(64 << 20, dtype=torch.uint8))",
}


def test_the_interpreter_ends(tmp_path):
    """Each in a fork, for which nothing need be imported again, and which ends as any interpreter does."""
    text = (
        "import atexit, json, threading\n"
        "some = torch.ones(9, dtype=torch.uint8)\n"
        "for name, end in json.loads(sys.argv[2]).items():\n"
        "    child = os.fork()\n"
        "    if child == 0:\n"
        "        exec(end)\n"
        "        sys.exit()\n"
        "    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])\n"
        "    print(f'{name}: {code}', flush=True)\n"
    )
    with script(text, tmp_path, json.dumps(ENDS)) as process:
        out, error = process.communicate(timeout=200)
    assert error == ""
    assert out.splitlines() == [f"{name}: 0" for name in ENDS]
    assert list(tmp_path.iterdir()) == []


def test_a_process_that_was_not_forked_ends_in_the_middle_of_writing(tmp_path):
    """Its threads are not in the middle of PyTorch when Python ends them, which would abort it."""
    text = "held = place.take(torch.ones(64 << 20, dtype=torch.uint8))\nready()\n"
    with script(text, tmp_path) as process:
        out, error = process.communicate(timeout=120)
    assert (process.returncode, out, error) == (0, "ready\n", "")


def test_two_processes_in_one_directory(tmp_path):
    text = (
        "source = torch.full((1 << 20,), 7, dtype=torch.uint8)\n"
        "contents = [place.take(source) for _ in range(8)]\n"
        "for content in contents: content.finish_out()\n"
        "ready()\n"
        "sys.stdin.readline()\n"
        "for content in contents:\n"
        "    into = torch.zeros_like(source); content.begin_back(into); content.finish_back()\n"
        "    assert torch.equal(into, source)\n"
    )
    place = DiskPlace(tmp_path)
    with script(text, tmp_path) as process:
        is_ready(process)
        contents = [place.take(some_bytes(1 << 20, seed)) for seed in range(8)]
        for seed, content in enumerate(contents):
            content.finish_out()
            assert torch.equal(fetched(content), some_bytes(1 << 20, seed))
        _, error = process.communicate("go on\n", timeout=120)
        assert process.returncode == 0, error
    place.close()


def in_grandchild(job):
    """In a fork of a process that has threads, as a DataLoader's workers are; returns its exit code."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # that forks and threads do not go together: from 3.12 on
        child = os.fork()
    if child == 0:
        try:
            job()
        except BaseException:
            import traceback

            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_fork_has_a_file_of_its_own(tmp_path):
    def parent():
        torch.set_num_threads(1)
        place = DiskPlace(tmp_path)
        content = place.take(some_bytes(1 << 20, 1))
        content.finish_out()
        number = scratch(place).fileno()

        def child():
            assert threads() == []
            with pytest.raises(OSError, match="Bad file descriptor"):
                os.fstat(number)
            assert place.used_bytes == 0
            with pytest.raises(OffloadError, match="a fork of its process"):
                content.finish_out()
            content.begin_back(torch.zeros(1 << 20, dtype=torch.uint8))
            with pytest.raises(OffloadError, match="a fork of its process"):
                content.finish_back()
            content.release()
            own = place.take(some_bytes(1 << 20, 2))
            own.finish_out()
            assert torch.equal(fetched(own), some_bytes(1 << 20, 2))
            assert len(threads()) == 2
            place.close()

        assert in_grandchild(child) == 0
        assert place.used_bytes == 1 << 20
        same = torch.equal(fetched(content), some_bytes(1 << 20, 1))
        place.close()
        return same

    assert in_fork(parent).value is True


def test_a_fork_while_locks_are_held_and_bytes_move(tmp_path):
    """A child of whatever moment: nothing that it calls waits for a thread that only its parent has."""

    def parent():
        torch.set_num_threads(1)
        place = DiskPlace(tmp_path)
        contents = [place.take(some_bytes(8 << 20, seed)) for seed in range(4)]

        def child():
            for content in contents:
                content.release()
            del content
            contents.clear()
            own = place.take(some_bytes(1 << 20))
            own.finish_out()
            assert torch.equal(fetched(own), some_bytes(1 << 20))

        held, letting_go = threading.Event(), threading.Event()

        def hold():
            with place._depot.locked(), place._opening:
                held.set()
                letting_go.wait()

        holder = threading.Thread(target=hold)
        holder.start()
        held.wait()
        code = in_grandchild(child)
        letting_go.set()
        holder.join()
        for seed, content in enumerate(contents):
            content.finish_out()
            assert torch.equal(fetched(content), some_bytes(8 << 20, seed))
        place.close()
        return code

    assert in_fork(parent).value == 0


def test_a_limit_on_the_size_of_files(tmp_path):
    """The kernel itself refuses the write, with root's rights and without."""

    def job():
        import resource

        torch.set_num_threads(1)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
        place = DiskPlace(tmp_path)
        small = place.take(some_bytes(1 << 19))
        small.finish_out()
        large = place.take(some_bytes(8 << 20))
        with pytest.raises(OffloadError, match="File too large"):
            large.finish_out()
        same = torch.equal(fetched(small), some_bytes(1 << 19))
        place.close()
        return same

    assert in_fork(job).value is True
