"""How much memory this process could still have on a device, and what sets the limit.

For the CPU that is the least of several limits: the machine's free memory, the control groups the process is in (all of
them up to the root, version 1 or 2, as containers and Slurm set them), and the limits of the shell (``ulimit -v``,
``ulimit -d``). Linux tells them in files; elsewhere little is known of the CPU.

Known weaknesses: swap is not counted. Under ``ulimit -v`` what is free is an upper bound, since address space falls to
pieces. What other processes take later is unknown.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lightning_remat.sizes import parse_margin

_NO_LIMIT = 1 << 60
"""From here on a number of version 1 of control groups, which has no word for it, means that there is no limit."""


@dataclass(frozen=True)
class Room:
    """What one limit leaves.

    Attributes:
        total_bytes: the limit; None: unknown.
        free_bytes: what this process can still have below it, never negative; None: unknown.
        limited_by: what the limit is, in words that fit after "limited by".
    """

    total_bytes: int | None
    free_bytes: int | None
    limited_by: str


_UNKNOWN = Room(None, None, "nothing that is known")


def free_memory(device: torch.device, *, proc: str = "/proc", cgroups: str = "/sys/fs/cgroup") -> Room:
    """What this process could still allocate on ``device``, by the limit that is met first; never raises.

    What PyTorch's caching allocator holds without using it counts as free.

    Args:
        device: any.
        proc: where Linux tells of processes; for tests.
        cgroups: where control groups are mounted; for tests.
    """
    try:
        if device.type == "cpu":
            return _least(_of_the_host(Path(proc), Path(cgroups)))
        if device.type == "cuda":
            return _least(_of_cuda(device))
        if device.type == "xpu":
            return _of_xpu(device)
        if device.type == "mps":
            return _of_mps()
    except Exception:  # figures are a help, and whoever asks for them is often in trouble already
        return _UNKNOWN
    return _UNKNOWN


def default_budget(
    static_bytes: int, device: torch.device, margin: object = "5%", *, room: Room | None = None
) -> int | None:
    """The peak that a step may reach, static memory included, if no budget is given; None: unknown.

    Args:
        static_bytes: what is there between steps, and so no longer free.
        device: where the step runs.
        margin: what stays free, as :func:`~lightning_remat.sizes.parse_margin` takes it; a share is one of the limit.
            A margin that would take up nearly all there is leaves a tenth of it to the step.
        room: what is free; None: it is looked up now.

    Raises:
        ConfigurationError: the margin is not one.
    """
    size = parse_margin(margin)
    room = free_memory(device) if room is None else room
    if room.free_bytes is None or room.total_bytes is None:
        return None
    kept_free = int(size * room.total_bytes) if isinstance(size, float) else size
    return static_bytes + max(room.free_bytes - kept_free, room.free_bytes // 10)


def _least(rooms: Iterator[Room]) -> Room:
    """The one with the least that is free; the first of equals."""
    return min(rooms, key=lambda room: room.free_bytes or 0, default=_UNKNOWN)


def _room(total: int, used: int, limited_by: str) -> Room:
    return Room(total, max(0, total - used), limited_by)


def _of_the_host(proc: Path, cgroups: Path) -> Iterator[Room]:
    memory = _table(proc / "meminfo")
    if "MemTotal" in memory and "MemAvailable" in memory:
        total = memory["MemTotal"] * 1024
        yield _room(total, total - memory["MemAvailable"] * 1024, "the machine's memory")
    yield from _of_groups(_text(proc / "self" / "cgroup"), cgroups)
    status = _table(proc / "self" / "status")
    for line in _text(proc / "self" / "limits").splitlines():
        for name, used, words in (
            ("Max address space", "VmSize", "the limit on address space (ulimit -v)"),
            ("Max data size", "VmData", "the limit on data (ulimit -d)"),
        ):
            limit = line.removeprefix(name).split()[:1] if line.startswith(name) else []
            if limit and limit[0].isdigit() and used in status:
                yield _room(int(limit[0]), status[used] * 1024, words)


def _of_groups(memberships: str, mount: Path) -> Iterator[Room]:
    """Limits of the control groups that ``/proc/self/cgroup`` names and of those around them.

    In a container the names may be those of the host, while what is mounted begins at the container's own group. Such
    folders do not exist; on the way up comes the mount, which does.
    """
    for line in memberships.splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:  # version 2; "unified" is where it is beside version 1
            files, roots = ("memory.max", "memory.current", ""), (mount, mount / "unified")
        elif "memory" in controllers.split(","):
            files, roots = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"), (mount / "memory", mount)
        else:
            continue
        for root in roots:
            parts = [part for part in path.split("/") if part not in ("", "..")]
            for depth in range(len(parts), -1, -1):
                room = _of_group(root.joinpath(*parts[:depth]), "/" + "/".join(parts[:depth]), *files)
                if room is not None:
                    yield room


def _of_group(folder: Path, name: str, limit_file: str, used_file: str, prefix: str) -> Room | None:
    limit, used = _text(folder / limit_file).strip(), _text(folder / used_file).strip()
    if not (limit.isdigit() and used.isdigit()) or int(limit) >= _NO_LIMIT:
        return None
    stat = _table(folder / "memory.stat")
    # File contents that the kernel drops before anything fails. Shared memory is no part of these two.
    cache = stat.get(f"{prefix}active_file", 0) + stat.get(f"{prefix}inactive_file", 0)
    return _room(int(limit), max(0, int(used) - cache), f"the control group {name} ({limit_file})")


def _of_cuda(device: torch.device) -> Iterator[Room]:
    free, total = torch.cuda.mem_get_info(device)
    allocated = torch.cuda.memory_allocated(device)
    idle = torch.cuda.memory_reserved(device) - allocated
    yield _room(total, total - free - idle, "the device's memory")
    share = torch.cuda.get_per_process_memory_fraction(device)
    if share < 1:
        words = f"torch.cuda.set_per_process_memory_fraction({share:g})"
        yield _room(int(share * total), allocated, words)


def _of_xpu(device: torch.device) -> Room:
    free, total = torch.xpu.mem_get_info(device)
    idle = torch.xpu.memory_reserved(device) - torch.xpu.memory_allocated(device)
    return _room(total, total - free - idle, "the device's memory")


def _of_mps() -> Room:
    # The driver's figure includes what the allocator holds without using it.
    return _room(
        torch.mps.recommended_max_memory(), torch.mps.current_allocated_memory(), "what Metal recommends to a process"
    )


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError):
        return ""


def _table(path: Path) -> dict[str, int]:
    """Lines ``name: number ...`` or ``name number`` of a file; all others are left out."""
    table: dict[str, Any] = {}
    for line in _text(path).splitlines():
        name, *values = line.split()[:2] or [""]
        if values and values[0].isdigit():
            table[name.removesuffix(":")] = int(values[0])
    return table
