"""Following every module call, through global hooks.

The same functions under the same key each time: a compiled function guards on both, and a new pair in every step would
make it compile again in every step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.compiler import is_compiling
from torch.nn.modules import module as module_hooks

_hooks: Any = module_hooks


class ModuleCalls:
    """Calls ``enter(module, args)`` before and ``leave()`` after every module call, also one that raises."""

    def __init__(self, enter: Callable[[nn.Module, Any], None], leave: Callable[[], None]) -> None:
        self._enter, self._leave = enter, leave

    def _entering(self, module: nn.Module, args: Any) -> None:
        if not is_compiling():
            self._enter(module, args)

    def _leaving(self, module: nn.Module, args: Any, output: Any) -> None:
        if not is_compiling():
            self._leave()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """As long as this is open; it costs host time at every call."""
        key = id(self)
        _hooks._global_forward_pre_hooks[key] = self._entering
        _hooks._global_forward_hooks[key] = self._leaving
        _hooks._global_forward_hooks_always_called[key] = True
        try:
            yield
        finally:
            for table in ("_global_forward_pre_hooks", "_global_forward_hooks", "_global_forward_hooks_always_called"):
                getattr(_hooks, table).pop(key, None)
