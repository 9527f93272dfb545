"""What processes tell each other of their plans: by how much they differ, and, where that is wanted, one plan for all.

Plans of ranks need not agree, so that nothing is communicated for them: each leaves its figures with the store through
which the processes have found each other, and reads there what the others have left.

With ``share_plan=True`` they agree, when a batch begins, by small collectives that all of them take part in.
"""

from __future__ import annotations

import json
import logging
from dataclasses import asdict
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from lightning_remat.errors import ConfigurationError
from lightning_remat.planning.plan import judged
from lightning_remat.reporting.ranks import RankFigures
from lightning_remat.runtime.recovery.company import is_distributed
from lightning_remat.runtime.tuning.known import Known
from lightning_remat.runtime.tuning.pilot import Pilot

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lightning_remat.planning.plan import Candidate
    from lightning_remat.runtime.session import Remat

log = logging.getLogger("lightning.pytorch")  # Lightning's, so that what is said appears where its own lines do

_KEY = "lightning_remat/plan"
_NEVER = 2**62  # bytes too much: a plan that cannot be followed


class Board:
    """Where each process leaves the figures of its plan.

    Args:
        remat: the engine.
    """

    def __init__(self, remat: Remat) -> None:
        self.remat = remat
        self._left: RankFigures | None = None

    def begin(self) -> None:
        """Training begins: what an earlier one has left is out of date."""
        self._left = None
        self._write("")

    def leave(self) -> None:
        """Leave the figures, if they are news."""
        figures = figures_of(self.remat)
        if figures is not None and figures != self._left:
            self._left = figures
            self._write(json.dumps(asdict(figures)))

    def read(self) -> None:
        """Give the engine what all have left so far."""
        found = []
        try:
            if is_distributed():
                store = dist.distributed_c10d._get_default_store()
                keys = [f"{_KEY}/{rank}" for rank in range(dist.get_world_size())]
                found = [store.get(key).decode() for key in keys if store.check([key])]
        except RuntimeError:  # the store is gone
            return
        self.remat.ranks = tuple(RankFigures(**json.loads(text)) for text in found if text)

    def _write(self, text: str) -> None:
        try:
            if is_distributed():
                dist.distributed_c10d._get_default_store().set(f"{_KEY}/{dist.get_rank()}", text)
        except RuntimeError:  # the store is gone, and with it everybody who could have read it
            return


def figures_of(remat: Remat) -> RankFigures | None:
    """The figures of this process; None where there is no plan (yet)."""
    known = remat.pilot.main if isinstance(remat.pilot, Pilot) else None
    if known is None or known.result is None:
        return None
    result, chosen = known.result, known.result.chosen
    return RankFigures(
        rank=dist.get_rank() if is_distributed() else 0,
        ops=len(result.trace.ops),
        sequence=known.names,
        plan=_digest(chosen),
        dropped=sum(chosen.drop),
        predicted_peak_bytes=result.peak_bytes,
        measured_peak_bytes=None if known.measured is None else known.static + known.measured.peak_bytes,
        budget_bytes=result.budget_bytes,
        extra_seconds=chosen.extra_seconds,
    )


def _digest(plan: Candidate) -> str:
    return sha256(bytes(plan.drop) + b"|" + bytes(plan.move)).hexdigest()[:16]


class Agreement:
    """One plan for all processes, as long as their steps are the same sequence of ops.

    Of the plans that the processes would follow by themselves, they take the one that fits on all of them and costs the
    slowest of them least; if none fits, the one that exceeds a budget by least. So the one with least room decides.

    Args:
        remat: the engine.

    Raises:
        ConfigurationError: there are no plans that could be shared.
    """

    def __init__(self, remat: Remat) -> None:
        if not isinstance(remat.pilot, Pilot):
            raise ConfigurationError(
                f"share_plan=True and policy={remat.policy!r}: only plans that are made under a budget can be shared; "
                "use policy='auto', or leave share_plan out."
            )
        if remat.offload is not None:
            raise ConfigurationError(
                "share_plan=True and offload=: what may leave depends on the place that each process has; leave one of "
                "the two out."
            )
        self.remat = remat
        self._heads: list[Any] = []
        self._said = False

    def batch_starts(self) -> None:
        """Agree, if anything has changed. All processes call this, for each of their batches."""
        pilot = self.remat.pilot
        if not isinstance(pilot, Pilot) or not is_distributed():
            return
        pilot.conclude_if_over()
        known = pilot.main
        wish = None if known is None else pilot.chooser.wishes.get(known.number)
        head = None if known is None or wish is None else (known.names, len(known.trace.ops), _digest(wish))
        heads = _gathered(head)
        if heads == self._heads or any(h is None for h in heads):
            return
        self._heads = heads
        if len({h[0] for h in heads}) > 1:
            self._each_its_own(pilot, heads)
            return
        assert known is not None  # or its head would be None
        assert wish is not None
        wishes = sorted(set(_gathered(tuple(wish.drop))))
        costs = _gathered([_cost(known, drop) for drop in wishes])
        totals = [
            (max(rank[i][0] for rank in costs), max(rank[i][1] for rank in costs), drop)
            for i, drop in enumerate(wishes)
        ]
        pilot.share(known.names, min(totals)[2])
        pilot.chooser.note(
            f"all {len(heads)} ranks follow one plan, of {len(wishes)} that they would have followed by themselves"
        )

    def _each_its_own(self, pilot: Pilot, heads: Sequence[Any]) -> None:
        pilot.share(None, ())
        if not self._said:
            self._said = True
            ops = ", ".join(f"rank {rank}: {head[1]} ops" for rank, head in enumerate(heads))
            text = f"share_plan=True: ranks ran different sequences of ops ({ops}), so that each follows its own plan"
            pilot.chooser.note(text)
            if dist.get_rank() == 0:
                log.info(text)


def _gathered(mine: Any) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return found


def _cost(known: Known, drop: tuple[bool, ...]) -> tuple[int, float]:
    """By how many bytes a plan would exceed what there is here, and its extra time."""
    if any(dropped and not op.droppable for dropped, op in zip(drop, known.trace.ops, strict=True)):
        return _NEVER, 0.0
    plan = judged(known.trace, drop)
    took = int(plan.peak_bytes * known.tuner.ratio)
    return max(0, took - known.tuner.limit), plan.extra_seconds
