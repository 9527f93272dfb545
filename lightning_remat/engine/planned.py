"""Running a plan: a tape that knows for every op of the step, by its position, whether to keep or to drop.

A plan is a list of instructions, one for each op that is counted (:func:`~lightning_remat.engine.actions.counted`) in
gradient mode. What is met is compared with what was expected: another op means another sequence, an output of another
size means another shape. Neither can do harm, since any plan is exact; both are reported, so that somebody can plan
anew, and may change the instructions for the rest of the step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_remat.engine.actions import (
    COUNT,
    HIGHER,
    PASS,
    RECORD,
    WRITE,
    WRITE_KEEP,
    ActionTable,
    counted,
)
from lightning_remat.engine.policies import FULL, KEEP_ALL
from lightning_remat.engine.replay import Clock
from lightning_remat.engine.rules import Rule, rule_for
from lightning_remat.engine.spread import whose
from lightning_remat.engine.tape import Tape

_grad_enabled = torch.is_grad_enabled

Instruction = tuple[Any, int, int]
"""(overload, action, elements of its first output); elements of -1 are of no interest, below that see careful_script.
In a script from a file, at first: (overload's name, DROPPED or MOVED or 0, elements)."""

DROPPED, MOVED = 1, 2

Script = list[Instruction]


MOVE = 32
"""Added to the action of an op whose outputs are kept: they may leave the device."""


def action_for(rule: Rule, drop: bool, move: bool = False) -> int:
    """The tape's action for a counted op whose outputs are to be dropped, or kept, on the device or elsewhere."""
    return FULL.action(rule) if drop else KEEP_ALL.action(rule) + MOVE * move


def script_for(
    functions: Sequence[Any], sizes: Sequence[int], drop: Sequence[bool], move: Sequence[bool] = ()
) -> Script:
    """Instructions for a plan.

    Args:
        functions: the overload of each counted op.
        sizes: elements of its first output.
        drop: whether its outputs are dropped.
        move: whether they leave; empty: none do.
    """
    return [
        (function, action_for(rule_for(function), dropped, moved), size)
        for function, size, dropped, moved in zip(functions, sizes, drop, move or [False] * len(drop), strict=True)
    ]


class PlannedTape(Tape):  # type: ignore[no-untyped-call]  # torch's __init_subclass__ has no types
    """A tape that follows a script.

    Attributes:
        script: the instructions.
        position: how many counted ops have run in this step.
        on_other_op: asked for a new script when another op comes than expected; (position, name) -> script or None.
        on_other_size: the same for another size; (position, elements) -> script or None.
        fallback: table for ops that no script knows.
        keeping: table for what runs out of gradient mode.
        kept: names of ops whose results are never dropped, whatever a script says.
        seen: elements of each op's first output since a careful script came into force.
        lost: no script fits any more; the fallback holds for the rest of the step.
    """

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock)
        self.script: Script = []
        self.on_other_op: Callable[[int, str], Script | None] = lambda position, name: None
        self.on_other_size: Callable[[int, int], Script | None] = lambda position, size: None
        self.fallback = ActionTable(lambda rule: action_for(rule, rule.kind == "cheap" and rule.name not in self.kept))
        self.kept: set[str] = set()
        self.seen: list[int] = []
        self.lost = False
        self.table = ActionTable(counted)
        self.keeping = ActionTable(KEEP_ALL.action)

    def start(self, script: Script) -> None:
        """Begin a step under a script."""
        self.script = script
        self.position = 0
        self.lost = False

    def never_drop(self, name: str) -> None:
        """Keep the results of an op from now on, in the script in force as well."""
        self.kept.add(name)
        self.fallback.clear()
        self.script = without(self.script, self.kept)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one op, and record it if the script says so."""
        if types and (owner := whose(types)):
            return self.step_aside(owner, func, args, kwargs)
        action = self.table.get(id(func))
        if action is None:
            action = self.table[id(func)] = counted(rule_for(func))
        if action == PASS or self.paused:
            if action == HIGHER:
                return func(*args, **(kwargs or {}))
            try:
                return func._op(*args, **kwargs) if kwargs else func._op(*args)
            except RuntimeError as error:
                asked = self._asked(func, error)
                if asked < 0:
                    raise
            return self._kept_again(func, args, kwargs, asked)
        if action != COUNT:
            return self._dispatch_rest(action, func, args, kwargs or {})
        if not _grad_enabled():
            # Nothing is dropped, but a write must still save what recorded ops read.
            keeping = self.keeping.get(id(func))
            if keeping is None:
                keeping = self.keeping[id(func)] = self.keeping.make(rule_for(func))
            return self.act(keeping, func, args, kwargs)
        position = self.position
        self.position = position + 1
        try:
            expected, action, size = self.script[position]
        except IndexError:
            expected, size = None, -1
        if expected is not func:
            action, size = self._unexpected(position, func)
        if action <= RECORD:  # or PASS
            try:
                out = func._op(*args, **kwargs) if kwargs else func._op(*args)
            except RuntimeError as error:
                asked = self._asked(func, error)
                if asked < 0:
                    raise
            else:
                asked = -1
            if asked >= 0:
                out = self._again(partial(func._op, *args, **(kwargs or {})), func, args, kwargs, asked)
            if action == RECORD:
                self._record(func, args, kwargs, out, None, None)
            elif self.eviction is not None:
                self._note_kept(func, args, kwargs, out)
        elif WRITE <= action <= WRITE_KEEP:
            out = self._write(action, func, args, kwargs or {})
            if self.leaving:
                self.must_stay(out)
        elif action >= MOVE:
            out = self.act(action - MOVE, func, args, kwargs)
            if self.mover is not None:
                self.may_leave(func, out, sides=False)
        else:
            out = self._dispatch_rest(action, func, args, kwargs or {})
        if size != -1:
            first = out if out.__class__ is Tensor else first_tensor(out)
            elements = first.numel() if first is not None else -1
            if elements != size:
                self._other_size(position, elements, size)
        return out

    def _unexpected(self, position: int, func: Any) -> tuple[int, int]:
        """The op is not the one that the script holds by identity: maybe by name, maybe in another script."""
        rule = rule_for(func)
        if not self.lost:
            found = self._matching(position, func, rule)
            if found is None:
                other = self.on_other_op(position, rule.name)
                if other is not None:
                    self.script = other
                    found = self._matching(position, func, rule)
            if found is not None:
                return found
            self.lost = True
        action = self.fallback.get(id(func))
        if action is None:
            action = self.fallback[id(func)] = self.fallback.make(rule)
        return action, -1

    def _matching(self, position: int, func: Any, rule: Rule) -> tuple[int, int] | None:
        if position >= len(self.script):
            return None
        expected, action, size = self.script[position]
        if expected is func:
            return action, size
        if expected != rule.name:
            return None
        # A script from a file knows names, and 1 for what is dropped; from now on it knows the op.
        action = action_for(rule, action == DROPPED, action == MOVED)
        self.script[position] = (func, action, size)
        return action, size

    def _other_size(self, position: int, size: int, expected: int) -> None:
        if self.lost:
            return
        if expected < -1:
            self.seen.append(size)
            if size <= _CAREFUL - expected:
                return
        other = self.on_other_size(position, size)
        if other is not None:
            self.script = other


def without(script: Script, kept: set[str]) -> Script:
    """The same instructions, with ops of these names kept."""
    found: Script = []
    for function, action, size in script:
        if isinstance(function, str):
            found.append((function, 0 if function in kept else action, size))
        else:
            rule = rule_for(function)
            found.append((function, action_for(rule, False) if rule.name in kept else action, size))
    return found


_CAREFUL = -2
_ANY = 2**60


def careful_script(script: Script, growing: bool = False) -> Script:
    """The same instructions for a step of unknown shape: sizes are noted, and it is reported once if one is larger.

    Args:
        script: instructions for another shape.
        growing: it is known to be larger, so that there is nothing to report.
    """
    return [(function, action, _CAREFUL - (_ANY if growing else max(size, 0))) for function, action, size in script]


def first_tensor(out: Any) -> Tensor | None:
    """The first of several outputs, if it is a tensor; None otherwise."""
    first = out[0] if isinstance(out, (tuple, list)) and out else out
    return first if isinstance(first, Tensor) and first.layout is torch.strided else None
