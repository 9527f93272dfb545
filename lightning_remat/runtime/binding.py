"""From a model and a policy to regions: which modules are blocks, and which table holds where."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from lightning_remat.engine.actions import ActionTable
from lightning_remat.engine.blocks import find_blocks, find_units, is_compiled, outermost, select_blocks, there
from lightning_remat.engine.policies import KEEP_ALL, Policy, matches
from lightning_remat.engine.regions import Part, Regions
from lightning_remat.errors import ConfigurationError
from lightning_remat.runtime.foreign import refuse_foreign_checkpointing

Named = list[tuple[str, nn.Module]]


class Binding:
    """The regions of one model (or of several roots that one step calls) under one policy.

    Attributes:
        roots: the models met so far.
        regions: what holds where, to be installed for each step.
        problem: why a root that a step came upon does not fit the patterns; another one may.
        bound: the model was given beforehand.
        final: nothing is to be discovered any more.
    """

    def __init__(self, policy: Policy, blocks: object, table: Callable[[Policy], ActionTable]) -> None:
        self.policy = policy
        self.blocks = blocks
        self.table = table
        self.roots: list[nn.Module] = []
        self.bound = self.final = False
        self.problem: ConfigurationError | None = None
        parts = [] if policy.parts else [self._part(policy, [])]
        outside = policy if policy.everywhere and not policy.parts else KEEP_ALL
        self.regions = Regions(parts, table(outside))

    def bind(self, root: nn.Module) -> None:
        """Find everything in ``root`` now.

        Raises:
            ConfigurationError: no blocks where the policy needs them, a pattern that matches nothing, or a model that
                already does activation checkpointing.
        """
        refuse_foreign_checkpointing(root)
        policy = self.policy
        if policy.parts:
            parts = self._mapped(root)
        elif self.blocks is not None:
            parts = [self._part(policy, select_blocks(root, self.blocks))]
        else:
            parts = [self._part(policy, find_blocks(root) or (find_units(root) if not policy.everywhere else []))]
        if policy.needs_blocks and not any(part.named for part in parts):
            compiled = [name for name, module in root.named_modules() if name and is_compiled(module)]
            shown = ", ".join(compiled[:3]) + (", ..." if len(compiled) > 3 else "")
            why = (
                f"what is compiled ({shown}) is no block, since its compiler decides what it keeps; compile parts of "
                "blocks, or use policy='auto' with compiled='budget'. "
                if compiled
                else "no submodules repeat, and none has parts of its own. "
            )
            raise ConfigurationError(
                f"policy={policy.name!r} works on blocks, and none were found in {type(root).__name__}: {why}Name them "
                "with blocks= (a class, a name pattern or a list), or use policy='selective', which needs none; "
                f"{there(root)}"
            )
        self.roots = [root]
        self.bound = self.final = True
        self.regions = Regions(parts, self.regions.outside)

    def met(self, root: nn.Module) -> list[tuple[Part, Named]]:
        """A root that a step has come upon; returns what is to be watched from now on.

        Raises:
            ConfigurationError: it already does activation checkpointing.
        """
        if any(root is known for known in self.roots):
            return []
        refuse_foreign_checkpointing(root)
        self.roots.append(root)
        if self.policy.parts:
            try:
                parts = self._mapped(root)
            except ConfigurationError as error:
                self.problem = error  # another root may have what this one lacks; judged when the step is over
                return []
            self.regions.parts += parts
            return [(part, part.named) for part in parts]
        if self.blocks is not None:
            try:
                named = select_blocks(root, self.blocks)
            except ConfigurationError as error:
                self.problem = error
                return []
        else:
            named = find_blocks(root)
            if not named and not is_compiled(root) and any(True for _ in root.children()):
                named = [(type(root).__name__, root)]  # called for itself, again and again: a block, or as good as one
        part = self.regions.parts[0]
        part.named += named
        part.expected = len(part.named)
        if not part.calls:
            part.per_segment = self.policy.blocks_per_segment(part.expected)
        return [(part, named)]

    def _mapped(self, root: nn.Module) -> list[Part]:
        chosen: dict[str, Named] = {pattern: [] for pattern, _ in self.policy.parts}
        for name, module in root.named_modules():
            pattern = next((p for p in chosen if matches(p, name)), None) if name else None
            if pattern is not None:
                chosen[pattern].append((name, module))
        for pattern, named in chosen.items():
            chosen[pattern] = outermost(named)
            if not named:
                raise ConfigurationError(
                    f"policy: the pattern {pattern!r} matches no submodule of {type(root).__name__} that an earlier "
                    f"pattern has not taken; {there(root)}"
                )
        return [self._part(policy, chosen[pattern]) for pattern, policy in self.policy.parts]

    def _part(self, policy: Policy, named: Named) -> Part:
        return Part(policy, named, self.table(policy))
