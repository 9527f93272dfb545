"""Out of memory, first answer: drop kept values and run the op again.

An op whose allocation failed has changed nothing. So nothing is lost if some of what autograd and recorded ops hold is
let go of, to be computed again when backward asks for it, and the op is run a second time. Close relatives: dynamic
tensor rematerialisation (Kirisame et al., 2021), which evicts by staleness, size and cost as well.

Chosen is what costs least time per byte, counting what would have to be computed on the way, among contents that nobody
but the tape's holders keeps alive. Known weaknesses: the times are those of a plan, or else a guess by the kind of op;
bytes are counted storage by storage, and an allocator that cannot join the pieces needs more of them; what random,
in-place and foreign ops made cannot be evicted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from heapq import heapify, heappop, heapreplace
from math import inf
from typing import Any
from weakref import WeakSet
from weakref import ref as weakref

import torch

from lightning_remat.engine.aliases import alias
from lightning_remat.engine.generators import RecordedState
from lightning_remat.engine.lineage import Gone, evictable_bytes, holder_of, missing_for
from lightning_remat.engine.offload.moved import Moved, fetch, fetch_op, moved_of
from lightning_remat.engine.offload.mover import Mover
from lightning_remat.engine.out_of_memory import bytes_asked, is_out_of_memory
from lightning_remat.engine.replay import missing_ops, run
from lightning_remat.engine.rules import rule_for
from lightning_remat.engine.sources import Recipe, Source, Sources
from lightning_remat.engine.values import HELD, OWNED, Geometry, Op, Value, geometry_of
from lightning_remat.errors import OffloadError

ATTEMPTS = 40
"""How often an op is called again; each time twice as much room is made as the time before, until nothing is left."""

_UNKNOWN = 1 << 20  # bytes to make room for where an error does not say how many are missing
_PER_CALL = 5e-6  # seconds, where nobody knows how long an op takes: for a call,
_CHEAP = 2e-10  # and for a byte of its output
_DEAR = 4e-9
_NoModes = torch._C._DisableTorchDispatch
_NEVER = inf


class Eviction:
    """Drops kept values when an op has run out of memory.

    Args:
        seconds: time of the op at a position of the plan that is followed; None: guess by its kind.
        on_eviction: called with the number of bytes of every value that was evicted.

    Attributes:
        evictions: values that were dropped.
        evicted_bytes: what they held.
        failures: how often an op ran out of memory.
        known: sources of all that could be evicted, weakly.
        mover: moves contents where that is cheaper than to compute them again, or the only way; None: nothing leaves.
    """

    def __init__(
        self, seconds: Callable[[int], float] | None = None, on_eviction: Callable[[int], None] | None = None
    ) -> None:
        self.seconds = seconds
        self.on_eviction = on_eviction
        self.evictions = 0
        self.evicted_bytes = 0
        self.failures = 0
        self.mover: Mover | None = None
        self.known: list[weakref[Source]] = []
        self._tapes: WeakSet[Sources] = WeakSet()  # those that were left as well: their values may be still to come

    @property
    def replaying(self) -> bool:
        """Whether recorded ops are being run again right now."""
        return any(tape.paused for tape in self._tapes)

    def attach(self, tape: Sources) -> None:
        """Look after what a tape keeps, from its next step on; not to be called during one."""
        tape.eviction = self
        self._tapes.add(tape)

    def detach(self, tape: Sources) -> None:
        """Leave a tape alone from its next step on. What has been evicted is still computed when it is asked for."""
        tape.eviction = None

    def prune(self) -> None:
        """Forget sources that nobody refers to any more."""
        self.known = [reference for reference in self.known if reference() is not None]

    # ------------------------------------------------------------------ calling again

    def again(
        self,
        call: Callable[[], Any],
        asked: int,
        rng: RecordedState | None = None,
        pinned: Callable[[], set[Value]] = set,
        may: Callable[[], bool] = lambda: True,
    ) -> Any:
        """Make room, and repeat a call that has run out of memory, until it succeeds or there is nothing left to evict.

        Args:
            call: what failed. It must have changed nothing.
            asked: bytes that it asked for; 0: not known.
            rng: the generator's state as it was before the first call.
            pinned: values that must stay.
            may: asked after another failure, whether the call may be repeated once more.

        Raises:
            RuntimeError: what the last call raised.
        """
        for attempt in range(ATTEMPTS):
            self.failures += 1
            if not self.make_room((asked or _UNKNOWN) << min(attempt, 30), pinned()):
                break
            if rng is not None:
                rng[0].set_state(rng[1])
            try:
                return call()
            except RuntimeError as error:
                if not is_out_of_memory(error) or not may():
                    raise
                asked = bytes_asked(error) or 0
            # The traceback held tensors; it is gone only now.
        if rng is not None:
            rng[0].set_state(rng[1])
        return call()

    def run(self, op: Op, pending: list[Op]) -> None:
        """Replay an op, and make room for it as long as it has none; what ``pending`` ops read stays.

        Raises:
            RuntimeError: out of memory, and nothing can be evicted, or the op had begun to write.
        """
        try:
            run(op)
            return
        except RuntimeError as error:
            if not is_out_of_memory(error) or not _is_intact(op):
                raise
            asked = bytes_asked(error) or 0
        self.again(
            lambda: run(op),
            asked,
            pinned=lambda: {value for o in (op, *pending) for value in o.needs},
            may=lambda: _is_intact(op),
        )

    # ------------------------------------------------------------------ choosing

    def make_room(self, nbytes: int, pinned: Iterable[Value] = ()) -> int:
        """Evict what is cheapest to compute again per byte, until that many bytes are free.

        Args:
            nbytes: bytes that are needed.
            pinned: values that must stay.

        Returns:
            Bytes that were freed; 0 if there is nothing that can be evicted.
        """
        stays = set(pinned)
        self.prune()
        mover = self.mover
        given_way = mover.give_way() if mover is not None else 0
        if given_way >= nbytes:
            return given_way
        heap: list[tuple[float, int, int, Source]] = []
        for number, reference in enumerate(self.known):
            source = reference()
            if source is None or (source.recipe is None and (mover is None or source.parameter is not None)):
                continue
            value = source.value() if source.value is not None else None
            if value is not None and value in stays:
                continue
            size = evictable_bytes(source)
            if size and (source.recipe is not None or self._moves(size)):
                heap.append((self._price(source, size), number, size, source))
        heapify(heap)
        freed = given_way
        while heap and freed < nbytes:
            price, number, size, source = heap[0]
            if not evictable_bytes(source):
                heappop(heap)
                continue
            now = self._price(source, size)
            if now > price:  # what it is computed from has been evicted meanwhile
                heapreplace(heap, (now, number, size, source))
                continue
            heappop(heap)
            if now == _NEVER:
                break
            if self._move_out(source, size) or (source.recipe is not None and self._evict(source)):
                freed += size
                self.evictions += 1
                self.evicted_bytes += size
                if self.on_eviction is not None:
                    self.on_eviction(size)
        return freed

    def _moves(self, size: int) -> bool:
        """Whether a content of that size can leave now."""
        mover = self.mover
        return mover is not None and not mover.halted and size >= mover.min_bytes

    def _price(self, source: Source, size: int) -> float:
        """Seconds per byte of what is cheaper, to compute it again or to move it; infinite if neither can be done."""
        again = self._recompute_price(source, size) if source.recipe is not None else _NEVER
        return min(again, self.mover.seconds_per_byte) if self.mover is not None and self._moves(size) else again

    def _recompute_price(self, source: Source, size: int) -> float:
        try:
            missing = missing_for(source)
        except Gone:
            return _NEVER
        recipes = {id(s.recipe): s for s in (source, *missing)}
        return sum(self._seconds(s) for s in recipes.values()) / size

    def _seconds(self, source: Source) -> float:
        recipe: Recipe = source.recipe  # type: ignore[assignment]  # candidates have one
        if self.seconds is not None and recipe.position >= 0:
            return self.seconds(recipe.position)
        size, _, _, dtype = source.geometry[:4]  # type: ignore[index]  # what has a recipe has a geometry
        nbytes: int = size.numel() * dtype.itemsize
        return _PER_CALL + nbytes * (_DEAR if rule_for(recipe.func).kind == "expensive" else _CHEAP)

    # ------------------------------------------------------------------ evicting

    def _move_out(self, source: Source, size: int) -> bool:
        """Have a kept content leave the device, if that is the cheaper way; whether its memory is free now."""
        mover = self.mover
        if mover is None or not self._moves(size):
            return False
        if source.recipe is not None and self._recompute_price(source, size) < mover.seconds_per_byte:
            return False
        value = source.value() if source.value is not None else None
        holder = next((s.tensor for r in source.saved if (s := r()) is not None and s.tensor is not None), None)
        if holder is None:
            holder = value.tensor if value is not None else None
        if holder is None:
            return False
        with _NoModes():
            moved = mover.leave(alias(holder), expected=False)
        del holder
        if moved is None or not moved.let_out():
            return False
        if value is None:
            value = Value()
            value.op = value.tensor = value.version = None
            value.flags = 0
            value.source = source
            source.value = weakref(value)
        index = source.recipe.index if source.recipe is not None else 0
        return _let_go(source, value, moved.geometry, fetch_op(moved, value, index))

    def _evict(self, source: Source) -> bool:
        """Turn a kept content into a dropped one; whether its memory is free now."""
        try:
            # Values in between live as long as the ops that read them; until those are there, we hold them.
            between = [self._record(s) for s in missing_for(source)]
            value, op = self._record(source)
        except Gone:
            return False
        del between
        return _let_go(source, value, source.geometry, op)

    def rebuild(self, value: Value) -> bool:
        """Compute a value again from its recipe, in place of the way that it has; whether that can be done."""
        # What it is computed from may be lost as well, and so on to the beginning of the model: a list, since calls
        # inside calls would go too deep.
        lost = [value]
        while lost:
            value = lost[-1]
            if value.tensor is not None:
                lost.pop()
                continue
            if moved_of(value) is not None and not self._by_recipe(value):
                return False
            ops = missing_ops(value)
            while ops:
                op = ops.pop()
                if op.func.__class__ is not Moved:
                    run(op)
                    continue
                try:
                    fetch(op)
                except OffloadError:
                    lost.append(op.outs[0][1]())  # type: ignore[arg-type]  # it is fetched for somebody
                    break
        return True

    def _by_recipe(self, value: Value) -> bool:
        """Let a value be made by its recipe, in place of the way that it has; whether that can be done."""
        source: Source | None = getattr(value, "source", None)
        if source is None or source.recipe is None:
            return False
        try:
            between = [self._record(s) for s in missing_for(source)]
            _, value.op = self._record(source)
        except Gone:
            return False
        del between
        value.geometry = source.geometry
        return True

    def _record(self, source: Source) -> tuple[Value, Op]:
        """The record of the op that makes ``source``, whose inputs are there or have records."""
        recipe: Recipe = source.recipe  # type: ignore[assignment]  # candidates have one
        value = source.value() if source.value is not None else None
        if value is None:
            value = Value()
            value.op = value.tensor = value.version = None
            value.flags = 0
            value.geometry = source.geometry
            value.source = source
            source.value = weakref(value)
        op = recipe.op() if recipe.op is not None else None
        if op is None:
            op = Op()
            op.func = recipe.func
            op.index = recipe.index
            op.needs = []
            op.args = self._references(recipe.args, op.needs)
            op.extra = None
            if recipe.extra is not None:
                keywords, rule, _ = recipe.extra
                values = self._references(keywords.values(), op.needs)
                op.extra = (dict(zip(keywords, values, strict=True)), rule, None)
            op.outs = ()
            recipe.op = weakref(op)
        if all(reference() is not value for _, reference in op.outs):
            op.outs = (*op.outs, (source.position, weakref(value)))
        if value.tensor is None:
            value.op = op
        return value, op

    def _references(self, args: Iterable[Any], needs: list[Value]) -> list[Any]:
        out = []
        for a in args:
            if a.__class__ is tuple:
                source: Source
                source, geometry = a
                value = self._value_of(source)
                if source.recipe is not None or value.tensor is None:
                    needs.append(value)
                a = (value, geometry)
            elif a.__class__ is list:
                a = self._references(a, needs)
            out.append(a)
        return out

    def _value_of(self, source: Source) -> Value:
        """The value that stands for a content: the one that there is, or a new one over whoever holds the content."""
        value = source.value() if source.value is not None else None
        if value is not None:
            return value
        tape = self._tape_with(source)
        holder = holder_of(source)
        assert holder is not None
        if source.recipe is None and tape is not None:
            # While the step goes on, the tape must know who reads what the program may yet overwrite.
            with _NoModes():
                value = tape.reference_to(holder)
        else:
            value = Value()
            value.op = None
            with _NoModes():
                value.tensor = holder if source.parameter is holder else alias(holder)
            value.geometry = geometry_of(holder)
            value.version = source.version
            value.flags = HELD if source.parameter is holder else 0
            value.anchor = source.anchor
            if tape is not None:
                tape.add_leaf(holder, value)
        value.source = source
        source.value = weakref(value)
        return value

    def _tape_with(self, source: Source) -> Sources | None:
        """The tape in whose running step the content was met, if it is still there."""
        holder = holder_of(source)
        if holder is None:
            return None
        key = weakref(holder.untyped_storage())
        return next((tape for tape in self._tapes if tape.sources.get(key) is source), None)


def _is_intact(op: Op) -> bool:
    """Whether a failed replay of an op may be repeated: it has not begun to write into memory that was another's."""
    extra = op.extra
    if extra is None or extra[1] is None or extra[1].form != "write" or op.args[0].__class__ is not tuple:
        return True
    return op.args[0][0].tensor is not None


def _let_go(source: Source, value: Value, geometry: Geometry | None, op: Op) -> bool:
    """Have a content's holders ask ``op`` for it from now on; whether its memory is free now."""
    storage: weakref[Any] | None = None
    for reference in source.saved:
        saved = reference()
        if saved is not None and saved.tensor is not None:
            storage = weakref(saved.tensor.untyped_storage())
            saved.geometry = geometry_of(saved.tensor)
            saved.value = value
            saved.tensor = None
    if value.tensor is not None:
        storage = weakref(value.tensor.untyped_storage())
    value.tensor = value.version = None
    value.flags &= ~(OWNED | HELD)
    value.geometry = geometry
    value.op = op
    return storage is not None and storage() is None
