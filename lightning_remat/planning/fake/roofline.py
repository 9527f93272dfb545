"""How long an op may take, from what it computes and what it moves: an estimate, made without running anything.

Other names: roofline model (Williams, Waterman and Patterson, 2009). An op takes as long as its arithmetic or its
memory traffic, whichever is longer, and never less than it takes to start a kernel. FLOPs come from PyTorch's own
registry (``torch.utils.flop_counter``); an op that is not in it counts as traffic only.

Known weaknesses: the figures below are one typical device of each type at the share of its peak that training reaches,
not the device that will be used; caches, fusion and overlap are not modelled. Ratios of times are more to be trusted
than the times.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

_HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, kw_only=True)
class Speed:
    """What a type of device reaches in training.

    Attributes:
        flops: floating point operations per second of float32 matrix products.
        half_flops: the same for float16 and bfloat16.
        bytes: bytes read or written per second.
        launch: least seconds for one op.
    """

    flops: float
    half_flops: float
    bytes: float
    launch: float


SPEEDS = {
    # About half of the data sheet of an A100 (TF32 off, as is PyTorch's default) in arithmetic, 80 % in bandwidth.
    "cuda": Speed(flops=15e12, half_flops=150e12, bytes=1.2e12, launch=5e-6),
    # A few cores of a current server or laptop; half precision is emulated on most.
    "cpu": Speed(flops=100e9, half_flops=50e9, bytes=10e9, launch=5e-6),
}


def speed_of(device: str) -> Speed:
    """The figures for a type of device; an unknown one is taken for a GPU."""
    return SPEEDS.get(device, SPEEDS["cuda"])


def seconds_for(func: Any, args: Any, kwargs: dict[str, Any], out: Any, speed: Speed) -> float:
    """Seconds that one call of an overload should take.

    Args:
        func: the overload.
        args: its arguments; only shapes and dtypes are looked at, so fake tensors will do.
        kwargs: its keyword arguments.
        out: what it returned.
        speed: of the device.
    """
    moved = 0
    half = False
    for tensor in (*tensors_of(args), *tensors_of(kwargs), *tensors_of(out)):
        moved += tensor.numel() * tensor.element_size()
        half = half or tensor.dtype in _HALF
    count = flop_registry.get(getattr(func, "overloadpacket", None))
    flops = 0
    if count is not None:
        try:
            flops = count(*args, **kwargs, out_val=out)
        except Exception:  # a formula that does not expect such arguments (an unbatched convolution, a missing mask)
            flops = 0
    return max(flops / (speed.half_flops if half else speed.flops), moved / speed.bytes, speed.launch)


def tensors_of(value: Any) -> list[Tensor]:
    """The tensors among an op's arguments or results."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, (tuple, list)):
        return [tensor for entry in value for tensor in tensors_of(entry)]
    if isinstance(value, dict):
        return tensors_of(list(value.values()))
    return []
