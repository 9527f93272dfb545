"""What users write as ``policy=``, and what it tells the tape.

One policy is one small named thing: which ops' results it keeps, whether that holds everywhere or inside blocks only,
and at which block borders it keeps what crosses them.
"""

from __future__ import annotations

import difflib
import fnmatch
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from lightning_remat.engine import actions
from lightning_remat.engine.rules import Rule
from lightning_remat.errors import ConfigurationError

Verdict = Literal["keep", "recompute"]


@dataclass(frozen=True, slots=True)
class OpInfo:
    """What a callable policy is told about one op that has just run.

    Attributes:
        name: the overload, such as ``"aten.addmm.default"``.
        module: qualified name of the innermost module whose ``forward`` is running, ``""`` outside of any.
        block: index of the block that is running, in order of execution within the step, or None.
        bytes: size of the storages that the op made or wrote.
        kind: ``"expensive"`` (matrix product, convolution, attention, ...), ``"cheap"`` or ``"random"``. Ops that may
            never be run again (collectives, foreign kernels, factories) are not asked about.

    Example:
        >>> import torch
        >>> from lightning_remat import OpInfo, Remat
        >>> asked = []
        >>> def policy(op: OpInfo) -> str:
        ...     asked.append((op.name, op.module, op.kind, op.bytes))
        ...     return "recompute" if op.kind == "cheap" else "keep"
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU())
        >>> with Remat(policy=policy):
        ...     loss = model(torch.ones(2, 4)).sum()
        >>> asked[:2]
        [('aten.addmm.default', '0', 'expensive', 64), ('aten.gelu.default', '1', 'cheap', 64)]
        >>> loss.backward()
    """

    name: str
    module: str
    block: int | None
    bytes: int
    kind: str


OpPolicy = Callable[[OpInfo], Verdict]


@dataclass(frozen=True)
class Policy:
    """A parsed policy.

    Attributes:
        name: as the user wrote it, for reports.
        keeps: the kinds of op whose results are kept.
        everywhere: applies outside blocks too; otherwise everything is kept there.
        segment: number of consecutive blocks between two kept borders; ``"sqrt"``: about the square root of the number
            of blocks; None: borders are not kept.
        ask: the user's function over ops.
        parts: (module name pattern, policy) pairs, first match wins.
    """

    name: str
    keeps: frozenset[str] = frozenset()
    everywhere: bool = True
    segment: int | Literal["sqrt"] | None = 1
    ask: OpPolicy | None = None
    parts: tuple[tuple[str, Policy], ...] = field(default=())

    @property
    def needs_blocks(self) -> bool:
        """Whether it means nothing in a model without blocks."""
        return not self.everywhere and not self.parts and self.name not in ("none", "auto")

    @property
    def needs_offload(self) -> bool:
        """Whether it, or a part of it, means nothing without a place for what is kept."""
        return self.name == "offload_only" or any(part.needs_offload for _, part in self.parts)

    @property
    def off(self) -> bool:
        """Whether the tape has nothing to do."""
        return self.name == "none"

    def action(self, rule: Rule) -> int:
        """The tape's action for an op under this policy."""
        general = actions.counted(rule)
        if general != actions.COUNT:
            return general
        keep = rule.kind in ("fixed", "factory") or rule.kind in self.keeps
        if rule.form == "write":
            return actions.WRITE_KEEP if keep else actions.WRITE_ASK if self.ask is not None else actions.WRITE
        if keep:
            return actions.WATCH if rule.hidden or rule.inner or rule.foreign else actions.PASS
        if self.ask is not None:
            return actions.ASK
        slow = rule.random or rule.hidden or rule.inner or rule.transfers
        return actions.SLOW if slow else actions.RECORD

    def blocks_per_segment(self, blocks: int) -> int | None:
        """How many consecutive blocks share one segment, of ``blocks`` in all; None: borders are not kept."""
        if self.segment == "sqrt":
            return max(1, math.isqrt(blocks))
        return self.segment


ALL_KINDS = frozenset({"expensive", "cheap", "random", "fixed", "factory"})

NONE = Policy("none", keeps=ALL_KINDS, segment=None)
"""Keeps everything; right when memory is no concern."""

OFFLOAD_ONLY = Policy("offload_only", keeps=ALL_KINDS, segment=None)
"""Recomputes nothing, and what autograd saves leaves the device; right when transfers are hidden behind the step."""

KEEP_ALL = Policy("keep", keeps=ALL_KINDS, segment=None)
"""What holds where a policy does not: like ``none``, while the tape stays on for the rest of the model."""

FULL = Policy("full", everywhere=False)
"""Keeps what enters a block; right when memory is short and a third more compute is acceptable."""

LEAN = Policy("auto", everywhere=False)
"""What a step is traced under, and what remains where no plan holds: like full, in models without blocks as well."""

SQRT = Policy("sqrt", everywhere=False, segment="sqrt")
"""Keeps about sqrt(N) block borders; right where the block inputs are most of what full keeps; else full is better."""

SELECTIVE = Policy("selective", keeps=frozenset({"expensive"}))
"""Keeps matrix products, convolutions and attention; right where time counts: part of the saving for little time."""

NAMED = {policy.name: policy for policy in (NONE, FULL, SQRT, SELECTIVE, OFFLOAD_ONLY)}
_NAMES = ("auto", *NAMED, "every:k")


def parse_policy(policy: object) -> Policy:
    """A policy from what the user wrote. ``"auto"`` is not one; it has been resolved before.

    Raises:
        ConfigurationError: with the nearest names, or what is wrong with the value.
    """
    if isinstance(policy, Policy):
        return policy
    if isinstance(policy, str):
        return _parse_name(policy)
    if isinstance(policy, Mapping):
        if not policy:
            raise ConfigurationError("policy={} names no module; give {'pattern': 'policy', ...} or a policy name.")
        for pattern in policy:
            if not isinstance(pattern, str) or not pattern:
                raise ConfigurationError(f"policy: module name patterns are non-empty strings, got {pattern!r}.")
            if isinstance(policy[pattern], str) and policy[pattern] == "auto":
                raise ConfigurationError(
                    f"policy: {pattern!r} is given 'auto', which chooses for a whole model; name one of "
                    f"{', '.join(_NAMES[1:])}."
                )
        parts = tuple((pattern, parse_policy(part)) for pattern, part in policy.items())
        if any(part.parts for _, part in parts):
            raise ConfigurationError("policy: a mapping inside a mapping; give each pattern a policy of its own.")
        return Policy("by module", keeps=ALL_KINDS, segment=None, parts=parts)
    if callable(policy):
        return Policy(getattr(policy, "__name__", "callable"), segment=None, ask=policy)
    raise ConfigurationError(
        f"policy={policy!r} is not a policy: give one of {', '.join(_NAMES)}, a function over ops, or a mapping from "
        "module name patterns to policies."
    )


def _parse_name(name: str) -> Policy:
    if name in NAMED:
        return NAMED[name]
    if name.startswith("every:"):
        count = name.removeprefix("every:")
        if not (count.isascii() and count.isdecimal()) or int(count) < 1:
            raise ConfigurationError(
                f"policy={name!r}: k must be a whole number of blocks, 1 or more; 'every:1' is 'full', and 'none' "
                "keeps everything."
            )
        return Policy(name, everywhere=False, segment=int(count))
    near = difflib.get_close_matches(name, _NAMES, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(map(repr, near))}? " if near else ""
    raise ConfigurationError(f"policy={name!r} is unknown; {hint}There are: {', '.join(_NAMES)}.")


def checked_verdict(policy: OpPolicy, info: OpInfo) -> bool:
    """Whether the user's function wants the op recomputed.

    Raises:
        ConfigurationError: it returned something other than "keep" or "recompute".
    """
    verdict = policy(info)
    if verdict == "recompute":
        return True
    if verdict == "keep":
        return False
    raise ConfigurationError(
        f"policy: the function returned {verdict!r} for {info.name}; it must return 'keep' or 'recompute'."
    )


def matches(pattern: str, name: str) -> bool:
    """Whether a module's qualified name matches a shell-style pattern (``*`` crosses dots)."""
    return fnmatch.fnmatchcase(name, pattern)
