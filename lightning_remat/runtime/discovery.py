"""Meeting the model: in a plain loop nobody hands us the module, so the first step shows which ones are called."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.compiler import is_compiling
from torch.nn.modules import module as module_hooks

from lightning_remat.engine.regions import Part, Regions

Named = list[tuple[str, nn.Module]]


class Discovery:
    """Reports every module that is called while no other is running, and puts its blocks under watch at once."""

    def __init__(self, regions: Regions, met: Callable[[nn.Module], list[tuple[Part, Named]]]) -> None:
        self.regions = regions
        self.met = met
        self.depth = 0

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Look for roots while this is open."""
        handles = [
            module_hooks.register_module_forward_pre_hook(self._enter),
            module_hooks.register_module_forward_hook(self._leave, always_call=True),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, module: nn.Module, args: Any) -> None:
        if is_compiling():
            return
        self.depth += 1
        if self.depth > 1:
            return
        for part, named in self.met(module):
            for _, block in named:
                self.regions.watch(part, block)
                if block is module:
                    # Its own hooks were collected before ours came; open the region by hand this once.
                    self.regions.enter(part, module, args, {})

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if not is_compiling():
            self.depth = max(0, self.depth - 1)
