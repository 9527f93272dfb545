"""What is free on a device, by whichever limit is met first, and the budget that is made of it."""

import subprocess
import sys
import textwrap

import pytest
import torch

from lightning_remat import Remat
from lightning_remat.errors import ConfigurationError
from lightning_remat.runtime.room import Room, default_budget, free_memory
from lightning_remat.sizes import parse_margin

KIB, MIB, GIB = 1024, 1024**2, 1024**3
CPU = torch.device("cpu")
GPU = torch.device("cuda", 0)
UNLIMITED = "9223372036854771712"


class Machine:
    """A tree of files as Linux shows them."""

    def __init__(self, root):
        self.proc = root / "proc"
        self.cgroups = root / "cgroup"
        self.write(
            self.proc / "meminfo",
            f"MemTotal:       {64 * MIB} kB\nMemFree:        1000 kB\nMemAvailable:   {32 * MIB} kB\n",
        )
        self.write(self.proc / "self" / "status", f"Name:\tpython\nVmSize:\t{6 * MIB} kB\nVmData:\t{2 * MIB} kB\n")
        self.limits()
        self.write(self.proc / "self" / "cgroup", "0::/\n")

    @staticmethod
    def write(path, text):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def limits(self, space="unlimited", data="unlimited"):
        self.write(
            self.proc / "self" / "limits",
            "Limit                     Soft Limit           Hard Limit           Units     \n"
            f"Max data size             {data:<20} unlimited            bytes     \n"
            "Max stack size            8388608              unlimited            bytes     \n"
            f"Max address space         {space:<20} unlimited            bytes     \n",
        )

    def group(self, path, **files):
        for name, text in files.items():
            self.write(self.cgroups / path / name.replace("__", "."), str(text))

    def room(self):
        return free_memory(CPU, proc=str(self.proc), cgroups=str(self.cgroups))


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


def test_without_limits_it_is_the_machines_memory(machine):
    assert machine.room() == Room(64 * GIB, 32 * GIB, "the machine's memory")


def test_a_control_group_of_version_2_counts_without_its_file_cache(machine):
    machine.write(machine.proc / "self" / "cgroup", "0::/user.slice/job_7/step_0\n")
    machine.group("user.slice/job_7/step_0", memory__max="max", memory__current=5 * GIB)
    machine.group(
        "user.slice/job_7",
        memory__max=16 * GIB,
        memory__current=9 * GIB,
        memory__stat=f"anon {5 * GIB}\nfile {4 * GIB}\ninactive_file {2 * GIB}\nactive_file {1 * GIB}\n",
    )
    machine.group("user.slice", memory__max="max", memory__current=30 * GIB)
    room = machine.room()
    assert (room.total_bytes, room.free_bytes) == (16 * GIB, 10 * GIB)
    assert room.limited_by == "the control group /user.slice/job_7 (memory.max)"


def test_of_nested_groups_the_one_that_leaves_least_holds(machine):
    machine.write(machine.proc / "self" / "cgroup", "0::/a/b\n")
    machine.group("a/b", memory__max=8 * GIB, memory__current=1 * GIB)
    machine.group("a", memory__max=16 * GIB, memory__current=14 * GIB)
    assert machine.room().free_bytes == 2 * GIB
    assert "/a (" in machine.room().limited_by


def test_a_control_group_of_version_1(machine):
    machine.write(machine.proc / "self" / "cgroup", "9:name=systemd:/\n4:cpu,memory:/jobs/7\n1:cpuset:/\n0::/\n")
    machine.group("memory", memory__limit_in_bytes=UNLIMITED, memory__usage_in_bytes=40 * GIB)
    machine.group("memory/jobs", memory__limit_in_bytes=UNLIMITED, memory__usage_in_bytes=40 * GIB)
    machine.group(
        "memory/jobs/7",
        memory__limit_in_bytes=4 * GIB,
        memory__usage_in_bytes=3 * GIB,
        memory__stat=f"active_file 7\ninactive_file 7\ntotal_active_file {MIB}\ntotal_inactive_file {MIB}\n",
    )
    room = machine.room()
    assert (room.total_bytes, room.free_bytes) == (4 * GIB, 1 * GIB + 2 * MIB)
    assert room.limited_by == "the control group /jobs/7 (memory.limit_in_bytes)"


@pytest.mark.parametrize("names", ["4:memory:/docker/0123abc\n", "4:memory:/\n"])
def test_in_a_container_the_mount_is_the_group(machine, names):
    machine.write(machine.proc / "self" / "cgroup", names)
    machine.group("memory", memory__limit_in_bytes=4 * GIB, memory__usage_in_bytes=GIB)
    assert machine.room() == Room(4 * GIB, 3 * GIB, "the control group / (memory.limit_in_bytes)")


@pytest.mark.parametrize("names", ["0::/\n", "0::/../other\n"])
def test_in_a_container_of_version_2_too(machine, names):
    machine.write(machine.proc / "self" / "cgroup", names)
    machine.group(".", memory__max=4 * GIB, memory__current=GIB)
    assert machine.room() == Room(4 * GIB, 3 * GIB, "the control group / (memory.max)")


def test_version_2_beside_version_1(machine):
    machine.write(machine.proc / "self" / "cgroup", "1:name=systemd:/x\n0::/x\n")
    machine.group("unified/x", memory__max=4 * GIB, memory__current=GIB)
    assert machine.room().free_bytes == 3 * GIB


def test_limits_of_the_shell(machine):
    machine.limits(space=str(10 * GIB))
    assert machine.room() == Room(10 * GIB, 4 * GIB, "the limit on address space (ulimit -v)")
    machine.limits(space=str(10 * GIB), data=str(5 * GIB))
    assert machine.room() == Room(5 * GIB, 3 * GIB, "the limit on data (ulimit -d)")
    machine.limits(space=str(1 * GIB))
    assert machine.room().free_bytes == 0  # set after more than that was mapped


def test_nothing_known_is_none_and_never_an_error(tmp_path, machine):
    unknown = Room(None, None, "nothing that is known")
    assert free_memory(CPU, proc=str(tmp_path / "none"), cgroups=str(tmp_path)) == unknown
    for name in ("meminfo", "self/status", "self/limits", "self/cgroup"):
        (machine.proc / name).write_bytes(b"\xff\n\n:\nMemTotal: many kB\nMax address space\n0::\nx\n4:memory\n")
    assert machine.room() == unknown
    for device in ("meta", "xla", "hpu"):
        assert free_memory(torch.device(device)) == unknown


def test_this_machine_knows_something():
    room = free_memory(CPU)
    assert room.free_bytes is not None
    assert room.total_bytes is not None
    assert 0 <= room.free_bytes <= room.total_bytes


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the limit is set as Linux has it")
def test_a_real_limit_on_address_space_is_what_can_be_had():
    """Under a real limit, nearly all that is said to be free can be allocated, and more cannot."""
    code = """
    import resource, torch
    from lightning_remat.runtime.room import free_memory
    torch.set_num_threads(1)
    torch.empty(2**20).fill_(0)
    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 2**28, -1))
    room = free_memory(torch.device("cpu"))
    print(room.limited_by)
    assert 2**28 - 2**24 <= room.free_bytes <= 2**28, room
    assert room.total_bytes == used + 2**28, room
    held = torch.empty(room.free_bytes - 2**22, dtype=torch.uint8)
    assert free_memory(torch.device("cpu")).free_bytes < 2**24
    del held
    try:
        torch.empty(room.free_bytes + 2**20, dtype=torch.uint8)
    except RuntimeError:
        print("more cannot")
    """
    out = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=False)
    assert out.returncode == 0, out.stderr
    assert out.stdout.splitlines() == ["the limit on address space (ulimit -v)", "more cannot"]


def _cuda(monkeypatch, free, total, reserved, allocated, share=1.0):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, total))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: reserved)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: allocated)
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda device: share)


def test_on_cuda_what_the_allocator_holds_idle_is_free(monkeypatch):
    _cuda(monkeypatch, free=10 * GIB, total=80 * GIB, reserved=30 * GIB, allocated=25 * GIB)
    assert free_memory(GPU) == Room(80 * GIB, 15 * GIB, "the device's memory")


def test_on_cuda_a_share_that_the_process_may_have(monkeypatch):
    _cuda(monkeypatch, free=50 * GIB, total=80 * GIB, reserved=30 * GIB, allocated=25 * GIB, share=0.5)
    expected = "torch.cuda.set_per_process_memory_fraction(0.5)"
    assert free_memory(GPU) == Room(40 * GIB, 15 * GIB, expected)
    _cuda(monkeypatch, free=5 * GIB, total=80 * GIB, reserved=30 * GIB, allocated=25 * GIB, share=0.5)
    assert free_memory(GPU) == Room(80 * GIB, 10 * GIB, "the device's memory")


def test_a_device_that_fails_to_answer_is_unknown(monkeypatch):
    def fail(device):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "mem_get_info", fail)
    assert free_memory(GPU).free_bytes is None
    assert default_budget(GIB, GPU) is None


def test_xpu_and_mps_by_their_modules(monkeypatch):
    monkeypatch.setattr(torch.xpu, "mem_get_info", lambda device: (10 * GIB, 16 * GIB))
    monkeypatch.setattr(torch.xpu, "memory_reserved", lambda device: 4 * GIB)
    monkeypatch.setattr(torch.xpu, "memory_allocated", lambda device: 3 * GIB)
    assert free_memory(torch.device("xpu", 0)) == Room(16 * GIB, 11 * GIB, "the device's memory")
    monkeypatch.setattr(torch.mps, "recommended_max_memory", lambda: 20 * GIB)
    monkeypatch.setattr(torch.mps, "current_allocated_memory", lambda: 6 * GIB)
    assert free_memory(torch.device("mps")) == Room(20 * GIB, 14 * GIB, "what Metal recommends to a process")


def test_the_default_budget_leaves_the_margin():
    room = Room(100 * GIB, 60 * GIB, "x")
    assert default_budget(30 * GIB, CPU, room=room) == 85 * GIB
    assert default_budget(30 * GIB, CPU, "0%", room=room) == 90 * GIB
    assert default_budget(30 * GIB, CPU, "10GiB", room=room) == 80 * GIB
    assert default_budget(30 * GIB, CPU, 0, room=room) == 90 * GIB
    # Never less than what is there and a tenth of what is free.
    assert default_budget(30 * GIB, CPU, "90%", room=room) == 36 * GIB
    assert default_budget(30 * GIB, CPU, room=Room(100 * GIB, 0, "x")) == 30 * GIB
    assert default_budget(30 * GIB, CPU, room=Room(None, None, "x")) is None


def test_margins_are_read_as_budgets_are():
    assert parse_margin("5%") == pytest.approx(0.05)
    assert parse_margin("1GiB") == GIB
    assert parse_margin("1.5 GB") == 1_500_000_000
    assert parse_margin(7) == 7
    assert isinstance(parse_margin("0%"), float)
    assert parse_margin(0) == 0


@pytest.mark.parametrize("margin", [0.05, None, True, -1, "100%", "250%", "-5%", "much", "", "5 %%", "9" * 400 + "GiB"])
def test_a_margin_that_is_none_is_refused_by_name(margin):
    with pytest.raises(ConfigurationError, match="margin="):
        parse_margin(margin)
    with pytest.raises(ConfigurationError, match="margin="):
        default_budget(0, CPU, margin, room=Room(1, 1, "x"))
    with pytest.raises(ConfigurationError, match="margin="):
        Remat(margin=margin)  # and nothing is printed when what was begun is thrown away
