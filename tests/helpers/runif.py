"""Skips for tests that need hardware, in one place, so that every skip names what was missing."""

import importlib.util

import pytest
import torch


def RunIf(
    *, cuda: bool = False, devices: int = 1, gib: float = 0.0, bf16: bool = False, package: str | None = None
) -> pytest.MarkDecorator:
    """Skip the test unless this machine has what it needs. Works as a decorator and in `pytest.param(marks=...)`.

    Args:
        cuda: a CUDA device (set by itself where another argument asks for more than a CPU has).
        devices: this many CUDA devices.
        gib: this much memory on each of them, in GiB; what is free is not looked at.
        bf16: bfloat16 arithmetic on the device, not only emulated.
        package: one that the tests do not install, by the name that it is imported by.
    """
    if package is not None and importlib.util.find_spec(package) is None:
        return pytest.mark.skip(reason=f"needs the package {package}, which is not among those that tests install")
    missing = missing_hardware(cuda=cuda, devices=devices, gib=gib, bf16=bf16)
    return pytest.mark.skipif(bool(missing), reason="needs " + " and ".join(missing))


def missing_hardware(*, cuda: bool = False, devices: int = 1, gib: float = 0.0, bf16: bool = False) -> list[str]:
    """Name what is asked for and not there; an empty list where all of it is."""
    if devices < 1:
        raise ValueError(f"devices={devices}: a test needs at least one")
    if not (cuda or devices > 1 or gib or bf16):
        return []
    if not torch.cuda.is_available():
        return ["a CUDA device" if devices == 1 else f"{devices} CUDA devices"]
    missing = []
    found = torch.cuda.device_count()
    if found < devices:
        missing.append(f"{devices} CUDA devices (found {found})")
    smallest = min(torch.cuda.get_device_properties(i).total_memory for i in range(min(found, devices))) / 2**30
    if smallest < gib:
        missing.append(f"{gib:g} GiB of device memory (found {smallest:.1f})")
    if bf16 and not torch.cuda.is_bf16_supported(including_emulation=False):
        missing.append("bfloat16 on the device")
    return missing
