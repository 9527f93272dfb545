"""Out of memory in backward: a dispatch mode that makes room and runs the op again.

While a mode is active, many of autograd's formulas choose other ops (see the head of
:mod:`~lightning_remat.engine.plain`), which changes bits. So the mode is entered only for a backward pass whose graph
consists of nodes that compute the same with a mode and without one: those of :data:`SAFE`, which a test holds against
PyTorch's operator database. A node that is not there may be safe as well; then there is no rescue, and the error goes
up.

It costs host time for every op of backward and a walk through the graph, so that it is armed only once memory has run
short. Known weaknesses: hooks on tensors that are no leaves cannot be seen from outside, and run under the mode; it is
left off where ``torch.distributed`` is in use, since a collective takes the modes of its thread along and has them
released by a thread that may not run Python.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_remat.engine.eviction import Eviction
from lightning_remat.engine.out_of_memory import bytes_asked, is_out_of_memory
from lightning_remat.engine.plain import guard_backward
from lightning_remat.engine.sources import NEVER, verdict_on


def _nodes(names: str) -> frozenset[str]:
    return frozenset(f"{name}Backward0" for name in names.split())


SAFE = (
    # Matrix products, convolutions, attention, recurrent kernels.
    _nodes("Addmm Mm Bmm Baddbmm Addbmm Addmv Mv Dot Convolution MkldnnRnnLayer ScaledDotProductFlashAttentionForCpu")
    # Normalisation, activations, softmax, pooling, losses.
    | _nodes(
        "NativeLayerNorm NativeGroupNorm NativeBatchNorm Gelu Relu Silu Sigmoid Tanh LeakyRelu Hardtanh Elu Softplus"
    )
    | _nodes("Hardswish Hardsigmoid Mish LogSigmoid Glu Threshold Softmax LogSoftmax")
    | _nodes("MaxPool2DWithIndices AvgPool2D AdaptiveAvgPool2D UpsampleNearest2D UpsampleBilinear2D")
    | _nodes("NllLoss NllLoss2D MseLoss SmoothL1Loss HuberLoss BinaryCrossEntropy BinaryCrossEntropyWithLogits")
    # Element by element, and sums.
    | _nodes("Add Sub Rsub Mul Div Neg Exp Log Log1P Sqrt Rsqrt Reciprocal Pow Abs Sin Cos Erf Addcmul Addcdiv Lerp")
    | _nodes("Sum Mean MaskedFill Where NativeDropout Clamp ClampMin Cumsum Var VarMean")
    | frozenset({"AddBackward1", "SumBackward1", "MeanBackward1", "SubBackward1", "MulBackward1"})
    # Moving and picking.
    | _nodes(
        "View UnsafeView ReshapeAlias Transpose T Permute Expand Unsqueeze Slice Select Split SplitWithSizes Unbind"
    )
    | _nodes("Cat Stack Clone ToCopy Repeat Squeeze AsStrided Embedding Index IndexSelect Gather Flip Roll")
    | _nodes("ConstantPadNd Tril Triu")
    | frozenset({"SqueezeBackward1", "SqueezeBackward2", "torch::autograd::AccumulateGrad"})
)
"""Names of nodes of autograd's graph that compute the same under a mode that only passes through."""


class Rescue(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's __init_subclass__ has no types
    """Calls ops, and has an eviction make room where a pure one runs out of memory."""

    supports_higher_order_operators = True

    def __init__(self, eviction: Eviction) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # the same
        self.eviction = eviction

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled regions stay compiled under this mode."""
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # The default wraps __torch_dispatch__ in a second Python call for every op.
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one op, a second time if need be."""
        try:
            return func(*args, **kwargs) if kwargs else func(*args)
        except RuntimeError as error:
            # What fails in a replay is repeated there, where it is known what has to stay.
            if not is_out_of_memory(error) or verdict_on(func) == NEVER or self.eviction.replaying:
                raise
            asked = bytes_asked(error) or 0
        return self.eviction.again(partial(func, *args, **(kwargs or {})), asked)


def arm(eviction: Eviction) -> Callable[[], None]:
    """From now on, have backward passes rescued where that changes no bit; returns what ends that."""

    def guard(roots: Iterable[Any], create_graph: bool) -> Rescue | None:
        if create_graph or _distributed() or not is_safe(roots):
            return None
        return Rescue(eviction)

    return guard_backward(guard)


def is_safe(roots: Iterable[Any]) -> bool:
    """Whether a mode changes nothing in a backward pass from these tensors (or ``GradientEdge`` objects)."""
    return not unsafe_nodes(roots)


def unsafe_nodes(roots: Iterable[Any]) -> set[str]:
    """Names of nodes behind ``roots`` that are not known to compute the same under a mode, or that run user code."""
    todo = [root.grad_fn if isinstance(root, torch.Tensor) else root.node for root in roots]
    seen = set(todo)
    found: set[str] = set()
    while todo:
        node = todo.pop()
        if node is None:
            continue
        name = node.name()
        if name not in SAFE or isinstance(node, BackwardCFunction):
            found.add(name)
        elif name == "torch::autograd::AccumulateGrad":
            leaf = node.variable  # type: ignore[union-attr]  # which such a node has
            if leaf._backward_hooks or leaf._post_accumulate_grad_hooks:
                found.add(f"{name} with hooks")
            continue
        for following, _ in node.next_functions:
            if following not in seen:
                seen.add(following)
                todo.append(following)
    return found


def _distributed() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()
