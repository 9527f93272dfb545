"""After oneDNN has run out of memory on a thread, it never again makes a kernel there; on a fresh thread it does.

oneDNN generates its kernels' code when it meets a new shape. If memory for that cannot be had, its code generator notes
so in a variable of the thread and never clears it: from then on every kernel for a shape that was not met before fails
on that thread with "could not create a primitive", however much memory is free. Kernels are kept for the whole process,
though. So one that a fresh thread has made can be used by the thread that cannot make any.
(Seen with PyTorch 2.13 on x86-64; the test beside this says whether it is still so.)
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from lightning_remat.engine.out_of_memory import row_of


def failed_in_onednn(error: BaseException) -> bool:
    """Whether it was oneDNN that could not make a kernel, so that only :func:`kernels_made` can help."""
    row = row_of(error)
    return row is not None and row.source == "oneDNN"


def kernels_made(op: Callable[..., Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> bool:
    """Let a fresh thread make the kernels of an op, by running it there; the result is thrown away.

    It needs the memory of the op's result while it runs. An op that writes to its arguments is not run.

    Args:
        op: an overload, such as ``torch.ops.aten.convolution.default``.
        args: its arguments; tensors of CPU memory.
        kwargs: its keyword arguments.

    Returns:
        Whether the op ran through, so that it is worth calling it again on this thread.
    """
    schema = getattr(op, "_schema", None)
    if schema is None or schema.is_mutable:
        return False
    # Kernels are looked up by how many threads they are for, and the number is each thread's own.
    threads = torch.get_num_threads()
    grad_mode = torch.is_grad_enabled()  # some ops look at it to choose a kernel
    inputs, keywords = tree_map(_plain, (tuple(args), dict(kwargs or {})))
    done = False

    def run() -> None:
        nonlocal done
        try:
            torch.set_num_threads(threads)
            with torch.set_grad_enabled(grad_mode):
                op(*inputs, **keywords)
            done = True
        except Exception:  # out of memory here as well, or an error that the caller's own call will raise again
            done = False

    thread = threading.Thread(target=run, name="lightning_remat kernels", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # no memory for a thread
        return False
    thread.join()
    return done


def _plain(value: Any) -> Any:
    """A tensor without its history: nothing is to be recorded on the other thread."""
    return value.detach() if isinstance(value, Tensor) else value
