"""Where in the model which policy holds: forward hooks on blocks, there for the length of a step only.

On the way into a segment its inputs are kept, on the way out its outputs; in between the segment's own action table is
in force. Hooks come and go with the step, so that a copy or a pickle of the model never meets them.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from lightning_remat.engine.actions import ActionTable
from lightning_remat.engine.policies import Policy
from lightning_remat.engine.tape import Tape


class Part:
    """The modules that one policy governs, and how far the current step has come through them."""

    def __init__(self, policy: Policy, named: list[tuple[str, nn.Module]], table: ActionTable) -> None:
        self.policy = policy
        self.named = named
        self.table = table
        self.expected = len(named)  # calls in one step; corrected after the first
        self.hooks: tuple[_Hook, _Hook] | None = None
        self.start()

    def start(self) -> None:
        """Begin a step."""
        self.calls = 0
        self.inside = False
        self.open = False
        self.outer: ActionTable | None = None
        self.per_segment = self.policy.blocks_per_segment(self.expected)


class _Hook(partial[Any]):
    """A hook that does nothing in a copy or a pickle of its module, should user code make one in mid-step."""

    def __reduce__(self) -> Any:
        return _inert_hook, ()

    def __deepcopy__(self, memo: Any) -> Any:
        return _inert


def _inert(*args: Any) -> None:
    """In place of a hook of ours in a copy."""


def _inert_hook() -> Any:
    return _inert


class Regions:
    """Switches a tape's action table as execution enters and leaves the modules of each part."""

    def __init__(self, parts: list[Part], outside: ActionTable) -> None:
        self.parts = parts
        self.outside = outside
        self.stack: list[tuple[Part, ActionTable] | None] = []
        self.watched: list[tuple[int, nn.Module]] = []
        self.tape: Tape | None = None

    def install(self, tape: Tape) -> None:
        """Put the hooks in place for one step under ``tape``."""
        self.tape = tape
        tape.actions = self.outside
        self.stack.clear()
        for part in self.parts:
            part.start()
            for _, module in part.named:
                self.watch(part, module)

    def watch(self, part: Part, module: nn.Module) -> None:
        """Hook one module of a part.

        What ``register_forward_pre_hook`` and ``register_forward_hook(always_call=True)`` do, without handles: this is
        done for every block in every step.
        """
        hooks = part.hooks
        if hooks is None:
            hooks = part.hooks = (_Hook(self.enter, part), _Hook(self.leave, part))
        key = id(part)
        module._forward_pre_hooks[key] = hooks[0]
        cast("OrderedDict[int, Any]", module._forward_pre_hooks).move_to_end(key, last=False)
        module._forward_pre_hooks_with_kwargs[key] = True
        module._forward_hooks[key] = hooks[1]
        module._forward_hooks_always_called[key] = True
        self.watched.append((key, module))

    def remove(self) -> int:
        """Take every hook away again; returns how many modules of parts ran."""
        for key, module in self.watched:
            module._forward_pre_hooks.pop(key, None)
            module._forward_pre_hooks_with_kwargs.pop(key, None)
            module._forward_hooks.pop(key, None)
            module._forward_hooks_always_called.pop(key, None)
        self.watched.clear()
        self.stack.clear()
        self.tape = None
        for part in self.parts:
            part.expected = part.calls or part.expected
        return sum(part.calls for part in self.parts)

    def discard(self) -> None:
        """Let go of the modules; hooks and parts hold each other, and would wait for the garbage collector."""
        for part in self.parts:
            part.hooks = None

    @property
    def block(self) -> int | None:
        """Index of the block that is running, in order of execution, or None."""
        return next((part.calls for part in self.parts if part.inside), None)

    def enter(self, part: Part, module: nn.Module, args: Any, kwargs: Any) -> None:
        """A module of ``part`` is about to run."""
        if is_compiling():
            return  # traced into a graph: what runs there is the compiler's
        tape = self.tape
        if tape is None or part.inside or not torch.is_grad_enabled():
            self.stack.append(None)
            return
        part.inside = True
        if part.per_segment is not None and not part.open:
            for a in args:
                if a.__class__ is Tensor:
                    tape.keep_border(a)
                else:
                    keep_all(tape, a)
            if kwargs:
                keep_all(tape, kwargs)
            part.open = True
            part.outer = tape.actions
        self.stack.append((part, tape.actions))
        tape.actions = part.table

    def leave(self, part: Part, module: nn.Module, args: Any, output: Any) -> None:
        """It has run, or raised (``output`` is None then)."""
        if is_compiling():
            return
        entry = self.stack.pop() if self.stack else None
        tape = self.tape
        if entry is None or tape is None:
            return
        part.inside = False
        part.calls += 1
        if part.per_segment is None:
            tape.actions = entry[1]
        elif part.calls % part.per_segment == 0 or part.calls >= part.expected:
            if output.__class__ is Tensor:
                tape.keep_border(output)
            else:
                keep_all(tape, output)
            part.open = False
            tape.actions = part.outer or self.outside


def keep_all(tape: Tape, value: Any) -> None:
    """Keep every tensor in ``value``."""
    for tensor in tensors_in(value):
        tape.keep_border(tensor)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Every tensor in nested tuples, lists, mappings and dataclasses."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for v in value:
            yield from tensors_in(v)
    elif isinstance(value, Mapping):
        for v in value.values():
            yield from tensors_in(v)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for f in dataclasses.fields(value):
            yield from tensors_in(getattr(value, f.name, None))
