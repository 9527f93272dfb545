"""Collectives whose buffers the thread that trains lets go of itself, so that memory can be counted to the byte.

Gloo works on threads of its own, and now and then one of these is the last to let go of a buffer. The profiler follows
the thread that trains: to it, such a buffer is never released. Whether it happens is a matter of microseconds, and
differs from step to step, with recomputation or without. Here gloo gets copies, in memory that PyTorch's allocator does
not know.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _create_work_from_future
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.futures import Future


@contextmanager
def quiet_collectives() -> Iterator[None]:
    """What FSDP gathers and scatters, and what tensor parallel sums, gathers and scatters, in this process."""
    group: Any = dist.ProcessGroup
    before = {
        name: vars(group)[name] for name in ("all_gather_single", "reduce_scatter_single")
    }  # not bound to the class
    library = torch.library.Library("_c10d_functional", "IMPL")
    functional = {"all_reduce": _sum, "all_gather_into_tensor": _all_of, "reduce_scatter_tensor": _part_of_sum}
    for name, function in functional.items():
        library.impl(name, function, "CPU", allow_override=True)
    group.all_gather_single, group.reduce_scatter_single = _gathering(group.all_gather_single), _scatter
    try:
        yield
    finally:
        for name, method in before.items():
            setattr(group, name, method)
        library._destroy()


def _gathering(method: Callable[..., Any]) -> Callable[..., Any]:
    def gather(group: Any, out: Tensor, given: Tensor, *rest: Any) -> Any:
        there = _copy(out)
        method(group, there, _copy(given), *rest).wait()
        out.copy_(there)
        return _done()

    return gather


def _scatter(group: Any, out: Tensor, given: Tensor, options: Any, *rest: Any) -> Any:
    # Gloo does the same, with a copy that its thread lets go of: the sum of everything, and a part of that.
    there = _copy(given)
    dist.all_reduce(there, options.reduceOp, group)
    out.copy_(there.view(group.size(), *out.shape)[group.rank()])
    return _done()


def _sum(given: Tensor, how: str, name: str) -> Tensor:
    assert how == "sum"
    there = _copy(given)
    dist.all_reduce(there, group=_resolve_process_group(name))
    return given.clone().copy_(there)


def _all_of(given: Tensor, size: int, name: str) -> Tensor:
    there = torch.from_numpy(np.empty((given.shape[0] * size, *given.shape[1:]), dtype=given.detach().numpy().dtype))
    dist.all_gather_into_tensor(there, _copy(given), group=_resolve_process_group(name))
    return given.new_empty(there.shape).copy_(there)


def _part_of_sum(given: Tensor, how: str, size: int, name: str) -> Tensor:
    assert how == "sum"
    there, group = _copy(given), _resolve_process_group(name)
    dist.all_reduce(there, group=group)
    part = there.chunk(size)[group.rank()]
    return given.new_empty(part.shape).copy_(part)


def _done() -> Any:
    future: Future[None] = Future()
    future.set_result(None)
    return _create_work_from_future(future)


def _copy(tensor: Tensor) -> Tensor:
    return torch.from_numpy(tensor.detach().numpy().copy())
