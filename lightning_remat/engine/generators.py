"""Which random generator an op draws from, and running an op again from a recorded state of it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

RecordedState = tuple[torch.Generator, Tensor]
"""A generator and its state before an op drew from it (5 KB on the CPU, 16 bytes on CUDA)."""


class NoGenerator(Exception):
    """The device's generator is not known, so a random op on it cannot be run again."""


def default_generator(device: torch.device) -> torch.Generator:
    """The generator that random ops on ``device`` use when they are given none.

    Raises:
        NoGenerator: the device's module does not show one.
    """
    if device.type == "cpu":
        return torch.default_generator
    if device.type == "mps":
        return torch.mps._get_default_mps_generator()
    module = getattr(torch, device.type, None)
    generators = getattr(module, "default_generators", None)
    if not generators:
        raise NoGenerator(device.type)
    index: int | None = device.index  # the stubs say int, but "cuda" has none
    # Of whatever device module it is.
    generator: torch.Generator = generators[module.current_device() if index is None else index]  # type: ignore[union-attr]
    return generator


def state_before(args: Any, kwargs: dict[str, Any]) -> RecordedState:
    """The generator that a random op with these arguments is about to draw from, and its state now.

    Raises:
        NoGenerator: see :func:`default_generator`.
    """
    generator = kwargs.get("generator") if kwargs else None
    if generator is None:
        device = None
        for a in args:
            if isinstance(a, Tensor):
                device = a.device
                break
            if isinstance(a, torch.Generator):
                return a, a.get_state()
        if device is None:
            device = torch.device(kwargs.get("device") or torch.get_default_device())
        generator = default_generator(device)
    return generator, generator.get_state()


def call_rewound(recorded: RecordedState, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Call a random op from a recorded generator state; the user's stream then goes on as if it had not been called."""
    generator, state = recorded
    now = generator.get_state()
    generator.set_state(state)
    try:
        return func(*args, **kwargs)
    finally:
        generator.set_state(now)
