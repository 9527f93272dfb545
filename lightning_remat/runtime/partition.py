"""The pass that tells the compiler how much of what one graph saves it may: imported only where that is done.

A share for all graphs (``torch._functorch.config.activation_memory_budget``) would be a danger. The partitioner takes
random operations for any others, so that below 1 some backends draw new random numbers in backward, and at 0 Inductor
does as well: gradients are then wrong, without a word. This pass runs once Inductor has made seeds of random
operations. It marks what must not run twice as to be saved, and gives the share to this graph alone. A graph in which
that cannot be done is left to its compiler. Graphs of other backends never come by here, and keep what they would keep
without us.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._ops import OpOverload
from torch.fx import Graph, Node
from torch.utils.checkpoint import CheckpointPolicy

_VERSION = 2  # part of the key of the compiler's cache: to be raised whenever the pass does something else
_PURE = frozenset({"aten", "prims", "inductor_prims", "_inductor_test"})  # libraries whose operations may run twice


class Partition(CustomGraphPass):
    """A custom pass over joint graphs.

    Args:
        share: how much of what it would save a graph may save, above 0 and below 1.
        others: what the user has set in this place; runs before.
    """

    def __init__(self, share: float, others: Iterable[Callable[[Graph], Any]] = ()) -> None:
        self.share = float(share)
        self.others = tuple(others)

    def __call__(self, graph: Graph) -> None:
        """Mark a graph, in place."""
        for other in self.others:
            other(graph)
        once = [node for node in graph.nodes if _must_not_repeat(node)]
        if any(_has_several_results(node) for node in once):
            return
        for node in once:
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
        for node in graph.nodes:
            node.meta["memory_budget"] = self.share

    def uuid(self) -> Any:
        """What the compiler's caches know it by; None, as for any pass without one, if the user's has none."""
        names = [other.uuid() if isinstance(other, CustomGraphPass) else None for other in self.others]
        return None if not all(names) else ("lightning_remat.partition", _VERSION, self.share, *names)


def _must_not_repeat(node: Node) -> bool:
    """Random operations, and those of whose results nothing is known."""
    if node.op != "call_function":
        return False
    target = node.target
    if not isinstance(target, OpOverload):
        return isinstance(target, torch._ops.OperatorBase)  # higher-order; getitem and arithmetic of sizes are none
    return target.namespace not in _PURE or (
        torch.Tag.nondeterministic_seeded in target.tags and not _without_dropout(node, target)
    )


def _without_dropout(node: Node, target: OpOverload) -> bool:
    """Whether it is attention that draws nothing, since its dropout is 0."""
    for place, argument in enumerate(target._schema.arguments):
        if argument.name == "dropout_p":
            value = node.args[place] if place < len(node.args) else node.kwargs.get("dropout_p", argument.default_value)
            return isinstance(value, (int, float)) and value == 0
    return False


def _has_several_results(node: Node) -> bool:
    """Whether parts are taken of what an operation gives (a tuple, a dict).

    The partitioner cannot save such a result, and does not look at what its parts are marked with: below 1 it would run
    the operation again.
    """
    return bool(node.users) and not isinstance(node.meta.get("val"), torch.Tensor)
