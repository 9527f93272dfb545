"""Random plans that keep, drop and move, on places that may fail, under pressure: what a program is run with."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any
from weakref import WeakMethod
from weakref import ref as weakref

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_remat.engine.actions import PASS
from lightning_remat.engine.eviction import Eviction
from lightning_remat.engine.offload.disk import DiskPlace
from lightning_remat.engine.offload.mover import Mover
from lightning_remat.engine.offload.place import Place
from lightning_remat.engine.planned import PlannedTape, script_for
from lightning_remat.engine.replay import Clock
from tests.helpers.evicting import Failing, on, retryable
from tests.helpers.places import MemoryPlace

WAYS = ("plan", "plan on a disk", "failing writes", "failing reads", "little room", "pressure", "failing ops")
"""What else happens, by turns."""


class Seen(PlannedTape):
    """Notes the ops that a plan has to do with, and keeps everything."""

    def __init__(self) -> None:
        super().__init__(Clock())
        self.functions: list[Any] = []

    def _unexpected(self, position: int, func: Any) -> tuple[int, int]:
        self.functions.append(func)
        return PASS, -1


class Counting(PlannedTape):
    """Knows which op it is at."""

    current: Any = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before, self.current = self.current, func
        try:
            return super().__torch_dispatch__(func, types, args, kwargs)
        finally:
            self.current = before


class Held:
    """A context in which it is seen whether autograd's graph is freed: some programs tie knots in plain PyTorch."""

    def __init__(self) -> None:
        self._held: list[weakref[_Hold]] = []
        self._hooks = saved_tensors_hooks(self._pack, lambda hold: hold.tensor)

    def _pack(self, tensor: Tensor) -> _Hold:
        hold = _Hold(tensor.detach())
        self._held.append(weakref(hold))
        return hold

    def leaks(self) -> bool:
        """Whether something is held that was saved."""
        gc.collect()
        gc.collect()
        return any(reference() is not None for reference in self._held)

    def __enter__(self) -> Held:
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._hooks.__exit__(*error)


class _Hold:
    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class Scripted:
    """A context for steps under a random plan; what is random follows from a number.

    Attributes:
        may_lose: contents may be lost, so that an ``OffloadError`` may come out.
        place: where they go.
        mode: to be active all the time, also in the plain run, or None.
    """

    def __init__(self, seed: int, functions: Sequence[Any]) -> None:
        choose = self._choose = random.Random(seed)
        self.way = WAYS[seed % len(WAYS)]
        weights = [choose.random() for _ in range(3)]
        fates = choose.choices(("keep", "drop", "move"), weights, k=len(functions))
        script = script_for(
            functions, [-1] * len(functions), [f == "drop" for f in fates], [f == "move" for f in fates]
        )
        self.tape = Counting(Clock())
        self.tape.start(script)
        self.place: Any = self._new_place()
        place: Place = self.place
        self.mover = Mover(place, choose.choice((0, 0, 16, 100)), choose.choice((1, 1, 100, 1000, None)))
        self.tape.mover = self.mover
        self.may_lose = self.way == "failing reads"
        self.eviction = Eviction()
        self.eviction.mover = self.mover
        if self.way in ("pressure", "failing ops") or choose.random() < 0.5:
            self.eviction.attach(self.tape)
            self.mover.rebuild = WeakMethod(self.eviction.rebuild)
        self.mode: TorchDispatchMode | None = None
        if self.way == "failing ops":
            first, distance = choose.randrange(20), choose.randrange(12, 40)
            self.mode = Failing(range(first, 100_000, distance), may=self._may_fail)
        self._stack = ExitStack()

    def _new_place(self) -> Any:
        choose = self._choose
        if self.way == "plan on a disk":
            return DiskPlace()
        place = MemoryPlace(choose.choice((200, 1000, 3000)) if self.way == "little room" else None)
        unlucky, from_number = choose.uniform(0.02, 0.3), choose.randrange(20)
        salt = choose.random()

        def fails(number: int) -> bool:
            return number >= from_number and random.Random(salt + number).random() < unlucky

        if self.way == "failing writes":
            place.write_fails = fails
        elif self.way == "failing reads":
            place.read_fails = fails
        return place

    def _may_fail(self, func: Any) -> bool:
        # Not copies that a write has the tape make: nobody repeats those. And an empty tensor takes no memory.
        return (self.tape.current is func or self.tape.paused) and retryable(func) and "aten.empty" not in str(func)

    def __enter__(self) -> Scripted:
        choose = self._choose
        order = choose.sample(range(30), 30) if choose.random() < 0.2 else None
        window = choose.choice((None, None, 0, 50, 5000))
        self.mover.begin(order, window, choose.choice((None, None, 0, 50, 5000)))
        self._stack = ExitStack()
        self._stack.enter_context(on(self.tape))
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)

    def press(self, run: Callable[[int], None]) -> Callable[[int], None]:
        """Make room now and then before an instruction runs."""
        if self.way != "pressure":
            return run

        def pressed(position: int) -> None:
            if self._choose.random() < 0.3:
                self.make_room()
            run(position)

        return pressed

    def make_room(self) -> None:
        """Memory is short."""
        if self.way == "pressure":
            self.eviction.make_room(self._choose.choice((1, 100, 1000, 1 << 40)))

    def leaks(self) -> bool:
        """Whether a content that nobody can ask for has never been given back."""
        for _ in range(2):  # a node that is freed may let go of what is in a circle itself
            if self.place.used_bytes:
                gc.collect()
        return bool(self.place.used_bytes)

    def close(self) -> None:
        """End what the place has begun."""
        self.place.close()
