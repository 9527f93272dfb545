"""The layer over the device's own streams: what can be said without a device, and the real thing where there is one."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_remat.engine.offload.host import HostPlace
from lightning_remat.engine.offload.streams import DeviceStreams
from tests.helpers.runif import RunIf

CUDA = torch.device("cuda", 0)


class Seen(TorchDispatchMode):
    """Notes what it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops.append(str(func))
        return func(*args, **(kwargs or {}))


def test_modes_do_not_see_copies() -> None:
    """Contents leave in the middle of a tape's own work."""
    streams: Any = DeviceStreams(CUDA)
    into, source = torch.zeros(8, dtype=torch.uint8), torch.ones(8, dtype=torch.uint8)
    with Seen() as seen:
        streams.copy(nullcontext(), into, source)
    assert torch.equal(into, source)
    assert seen.ops == []


def test_pinned_memory_can_be_written_to_outside_of_inference_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    make = torch.empty

    def unpinned(*args: Any, pin_memory: bool, **options: Any) -> torch.Tensor:
        assert pin_memory
        return make(*args, **options)

    monkeypatch.setattr(torch, "empty", unpinned)
    with torch.inference_mode(), Seen() as seen:
        memory = DeviceStreams(CUDA).pinned(8)
    assert not memory.is_inference()
    assert seen.ops == []
    memory.copy_(torch.ones(8))


def test_what_is_used_of_the_accelerator_api_is_there() -> None:
    assert callable(torch.accelerator.current_stream)
    assert callable(torch.accelerator.empty_host_cache)
    assert {"wait_event", "__enter__", "__exit__", "__eq__"} <= set(dir(torch.Stream))
    assert {"record", "query", "synchronize", "elapsed_time"} <= set(dir(torch.Event))


@RunIf(cuda=True)
def test_a_device() -> None:
    """Contents go and come back bit for bit while the device computes, into memory that is used again and again."""
    place = HostPlace(CUDA, budget=1 << 28)
    generator = torch.Generator(CUDA).manual_seed(0)
    for _ in range(3):
        held = []
        for _ in range(20):
            x = torch.randint(256, (3_000_001,), dtype=torch.uint8, device=CUDA, generator=generator)
            expected = x.clone()
            content = place.take(x)
            content.finish_out()
            del x
            torch.full((3_000_001,), 7, dtype=torch.uint8, device=CUDA)  # most likely the same memory
            held.append((content, expected))
        for content, expected in reversed(held):
            into = torch.empty(3_000_001, dtype=torch.uint8, device=CUDA)
            content.begin_back(into)
            content.finish_back()
            assert torch.equal(into, expected)
            content.release()
    torch.cuda.synchronize()
    traffic = place.traffic
    assert traffic.bytes_out == traffic.bytes_in == 3 * 20 * 3_000_001
    assert traffic.seconds_out > 0
    assert traffic.seconds_in > 0
    assert place.used_bytes == 0
    place.close()


@RunIf(cuda=True)
def test_a_device_under_another_stream() -> None:
    """Made and taken under one stream, asked for under another."""
    place, side = HostPlace(CUDA, budget=1 << 26), torch.cuda.Stream()
    x = torch.arange(1 << 20, device=CUDA).view(torch.uint8)
    expected = x.clone()
    content = place.take(x)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        content.finish_out()
        del x
        into = torch.empty(content.nbytes, dtype=torch.uint8, device=CUDA)
        content.begin_back(into)
    torch.cuda.current_stream().wait_stream(side)
    content.finish_back()
    assert torch.equal(into, expected)
    place.close()
