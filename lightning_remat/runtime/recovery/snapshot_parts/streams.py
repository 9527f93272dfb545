"""Where the random streams stand: PyTorch's on every device in use, Python's, NumPy's."""

from __future__ import annotations

import ctypes
import random
import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from lightning_remat.engine.generators import NoGenerator, default_generator

_MT19937_BYTES = 624 * 4 + 4
"""Size of NumPy's ``mt19937_state``: 624 words and a position."""


class Streams:
    """The process-wide random streams at one time."""

    def __init__(self) -> None:
        self._torch: list[tuple[torch.Generator, Tensor]] = []
        self._python: Any = None
        self._numpy: Any = None
        self._numpy_bytes: bytes | None = None

    def take(self, devices: Iterable[torch.device]) -> None:
        """Note all streams; ``devices`` are those of the model, the current device of their kinds goes along."""
        generators = {id(torch.default_generator): torch.default_generator}
        for device in devices:
            # "cuda" without an index is the current one, which user code may draw from as well.
            for place in {device, torch.device(device.type)} if device.type not in ("cpu", "meta") else ():
                try:
                    generator = default_generator(place)
                except NoGenerator:
                    continue
                generators[id(generator)] = generator
        self._torch = [(g, g.get_state()) for g in generators.values()]
        self._python = random.getstate()
        self._take_numpy()

    def restore(self) -> None:
        """Wind all streams back."""
        for generator, state in self._torch:
            generator.set_state(state)
        random.setstate(self._python)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy)

    def release(self) -> None:
        """Forget; what is kept of NumPy's saves reading it again while nobody draws from it."""
        self._torch = []
        self._python = None

    def _take_numpy(self) -> None:
        numpy = sys.modules.get("numpy")
        if numpy is None or "numpy.random" not in sys.modules:  # nobody can have drawn from it
            self._numpy = None
            return
        # NumPy takes 70 microseconds to hand out its state and is seldom drawn from: its raw words say whether it was.
        # A second normal number that is put by is in none of them, so a state that has one is always read anew.
        raw = _raw_state(numpy)
        if raw is None or raw != self._numpy_bytes or self._numpy is None or self._numpy["has_gauss"]:
            self._numpy = numpy.random.get_state(legacy=False)
            self._numpy_bytes = raw


def _raw_state(numpy: Any) -> bytes | None:
    """The words of NumPy's global Mersenne twister; None if it is something else."""
    try:
        bits = numpy.random.mtrand._rand._bit_generator
        if type(bits).__name__ != "MT19937":
            return None
        return ctypes.string_at(bits.ctypes.state_address, _MT19937_BYTES)
    except AttributeError:  # private names that may move; the slow way then
        return None
