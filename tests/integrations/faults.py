"""Out of memory that is made up: at random ops and at random points of forward and backward.

An error is raised *before* an op runs, as an allocator does it: the op has then changed nothing. All randomness comes
from a generator of its own, so that the streams of the training under test are not touched.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode


class Faults:
    """Decides where memory runs out.

    Args:
        seed: of its own random stream.
        rate: probability that a place where it may happen (an op, a point in the model) is one where it does. 0: never,
            which is for the run to compare with: a mode around backward makes some of autograd's formulas choose other
            ops, so that run needs the same mode.
        most: how many failures one batch can have. If each of them takes running it again, it runs ``most + 1`` times.

    Attributes:
        happened: how many failures there were, by what failed and where.
        batches: batches that had some.
    """

    def __init__(self, seed: int = 0, rate: float = 0.0, most: int = 3) -> None:
        self.rate = rate
        self.most = most
        self.happened: Counter[str] = Counter()
        self.batches = 0
        self._random = random.Random(seed)
        self._where: str | None = None
        self._left = 0
        self._once_more = False

    def new_batch(self) -> None:
        """The batch that comes may fail ``most`` times, however often it is run."""
        self._left = self.most
        self._once_more = False

    @contextmanager
    def armed(self, where: str | None) -> Iterator[None]:
        """What runs inside can fail; with None, inside of what is armed, it can not.

        Whatever leaves by an exception is disarmed by it, so that putting things back never fails.
        """
        before, self._where = self._where, where
        try:
            yield
        finally:
            self._where = before

    def trip(self, what: str) -> None:
        """A place where memory may run out.

        Raises:
            torch.OutOfMemoryError: it did.
        """
        if self._where is None or not self.rate or not self._left:
            return
        if not self._once_more and self._random.random() >= self.rate:
            return
        self.batches += self._left == self.most
        self._left -= 1
        # Sometimes the next place fails as well: where an op is run again, that is the same op.
        self._once_more = self._random.random() < 0.3
        self.happened[f"{what}, {self._where}"] += 1
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB. (This is made up.)")


_in_force: list[Faults] = []


def faults_now() -> Faults:
    """Those of the mode that is entered.

    A module must not hold them: what a module holds is put back with it when a batch is run again, and a failure that
    is put back comes again.
    """
    return _in_force[-1]


class FaultMode(TorchDispatchMode):
    """Ops that fail. Entered around the whole of ``fit``, it is below the tape: what the tape calls, replay included,
    arrives here."""

    def __init__(self, faults: Faults) -> None:
        super().__init__()
        self.faults = faults
        self._allocates: dict[Any, bool] = {}

    def __enter__(self) -> FaultMode:
        _in_force.append(self.faults)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        _in_force.pop()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        allocates = self._allocates.get(func)
        if allocates is None:
            allocates = self._allocates[func] = may_allocate(func)
        if allocates:
            self.faults.trip("op")
        return func(*args, **(kwargs or {}))


def may_allocate(func: Any) -> bool:
    """Whether an op makes tensors or writes into some, which may need a workspace; views never fail."""
    returns = func._schema.returns
    makes = any(r.alias_info is None and "Tensor" in str(r.type) for r in returns)
    return makes or bool(func._schema.is_mutable)


class _Trip(torch.autograd.Function):
    """The identity, which may fail in either direction."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        faults_now().trip("function")
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        faults_now().trip("function")
        return grad


class Tripping(nn.Module):
    """A module, and behind it a point that may fail: user code, in which no op can be run again."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        """What the module gives."""
        out: Tensor = _Trip.apply(self.inner(x))
        return out
