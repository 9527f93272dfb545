"""Meeting the model: in a plain loop nobody hands us the module, so the first step shows which ones are called."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch import nn

from lightning_remat.engine.regions import Part, Regions
from lightning_remat.engine.watch import ModuleCalls

Named = list[tuple[str, nn.Module]]


class Discovery:
    """Reports every module that is called while no other is running, and puts its blocks under watch at once."""

    def __init__(self, regions: Regions, met: Callable[[nn.Module], list[tuple[Part, Named]]]) -> None:
        self.regions = regions
        self.met = met
        self.depth = 0

    def watching(self) -> AbstractContextManager[None]:
        """Look for roots while this is open."""
        return ModuleCalls(self._enter, self._leave).watching()

    def _enter(self, module: nn.Module, args: Any) -> None:
        self.depth += 1
        if self.depth > 1:
            return
        for part, named in self.met(module):
            for _, block in named:
                self.regions.watch(part, block)
                if block is module:
                    # Its own hooks were collected before ours came; open the region by hand this once.
                    self.regions.enter(part, module, args, {})

    def _leave(self) -> None:
        self.depth = max(0, self.depth - 1)
