"""How much memory a device has, and how much of it is free."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from lightning_remat.sizes import device_memory


@dataclass(frozen=True)
class Room:
    """Memory of a device.

    Attributes:
        total_bytes: all of it.
        free_bytes: what could be allocated now.
        limited_by: what sets the limit.
    """

    total_bytes: int
    free_bytes: int
    limited_by: str


def free_memory(device: torch.device) -> Room:
    """What a device has now."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return Room(total, free + cached, "device")
    total = device_memory(torch.device("cpu"))
    return Room(total, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES"), "machine")


def default_budget(static_bytes: int, device: torch.device, margin: int | float) -> int:
    """Peak memory that a step may take where no budget is given: all that is free and what it has already.

    Args:
        static_bytes: what is there between steps.
        device: where.
        margin: what is to be left free, in bytes or (float) as a share of the device.
    """
    room = free_memory(device)
    kept_free = margin if isinstance(margin, int) else int(margin * room.total_bytes)
    return max(1, static_bytes + room.free_bytes - kept_free)
