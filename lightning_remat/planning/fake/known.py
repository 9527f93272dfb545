"""Small tensors of whole numbers stay real in a fake step, so that the program's questions about them have answers.

Token ids, masks, lengths and positions decide what a program does: ``if mask.all()``, ``lengths.max().item()``,
``x[labels != -100]``. Under fake tensors such a question is an error, and some libraries take another path as soon as
they see a fake mask. So what is computed from real tensors alone is computed, as long as it is small; where real and
fake meet, the result is fake.

Known weakness: a fake value that is written into a real tensor in place leaves the real content behind the times.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    unset_fake_temporarily,
)

from lightning_remat.engine.rules import Rule
from lightning_remat.planning.fake.roofline import tensors_of

_aten = torch.ops.aten
_INDEXING = frozenset(
    {_aten.index.Tensor, _aten.index_put.default, _aten.index_put_.default, _aten._index_put_impl_.default}
)
MOST_ELEMENTS = 2**22
"""A tensor with more elements is fake whatever it holds: computing it would take time and memory."""


def is_known(tensor: Tensor) -> bool:
    """Whether a tensor of a real batch or module stays real: whole numbers or truth values, and not many."""
    whole = not tensor.is_floating_point() and not tensor.is_complex()
    return whole and tensor.device.type != "meta" and tensor.numel() <= MOST_ELEMENTS


def call_known(rule: Rule, func: Any, args: Any, kwargs: dict[str, Any], inputs: list[Tensor]) -> Any:
    """Call an op in a fake mode, for real if everything that it reads is real and what it makes is small.

    Args:
        rule: the verdict on the op.
        func: the op.
        args: its arguments.
        kwargs: its keyword arguments.
        inputs: the tensors among both.
    """
    if rule.form == "higher":
        return func(*args, **kwargs)
    if any(isinstance(tensor, FakeTensor) for tensor in inputs):
        if func is _aten.masked_select.default and not isinstance(args[1], FakeTensor):
            size = torch.broadcast_shapes(args[0].shape, args[1].shape)  # type: ignore[no-untyped-call]  # torch's
            with unset_fake_temporarily():
                mask = args[1].expand(size)
            return _aten.index.Tensor(*_counted((args[0].expand(size), [mask])))
        return func(*(_counted(args) if func in _INDEXING else args), **kwargs)
    if inputs and rule.form in ("view", "write"):
        return _call_real(func, args, kwargs)
    try:
        out = func(*args, **kwargs)
    except (DataDependentOutputException, DynamicOutputShapeException):
        if not inputs:
            raise
        return _call_real(func, args, kwargs)
    made = tensors_of(out)
    if sum(tensor.numel() for tensor in made) > MOST_ELEMENTS or any(t.device.type == "meta" for t in made):
        return out
    if not inputs and any(t.is_floating_point() and t.numel() > 1 for t in made):
        return out  # a factory of activations: what follows will be fake
    return _call_real(func, args, kwargs)


def _counted(args: Any) -> Any:
    """Arguments of an indexing op in which each known mask has become the places that it selects."""
    indices: list[Tensor | None] = []
    for index in args[1]:
        if isinstance(index, Tensor) and index.dtype is torch.bool and not isinstance(index, FakeTensor):
            with unset_fake_temporarily():
                indices += index.nonzero().unbind(1)
        else:
            indices.append(index)
    return (args[0], indices, *args[2:])


def _call_real(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    with unset_fake_temporarily():
        return func(*args, **kwargs)
