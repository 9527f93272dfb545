"""Running a trace under a plan, whether or not something moves."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_remat.planning.moving import MovingSimulator
from lightning_remat.planning.simulator import Simulation, Simulator
from lightning_remat.planning.trace import Trace
from lightning_remat.planning.transfer import Transfer


def simulate(
    trace: Trace,
    drop: Sequence[bool],
    timeline: bool = False,
    move: Sequence[bool] = (),
    transfer: Transfer | None = None,
) -> Simulation:
    """Run ``trace`` under a plan.

    Args:
        trace: the step.
        drop: for each op, whether its outputs are dropped. Ops that cannot be are kept whatever it says.
        timeline: fill in levels and tops.
        move: for each op that is not dropped, whether its outputs leave the device; empty: none do.
        transfer: what is known of the place that they go to.

    Raises:
        ValueError: something moves, and nobody knows where to.
    """
    if not any(move):
        return Simulator(trace, drop).run(timeline)
    if transfer is None:
        raise ValueError("move= needs transfer=: how fast contents leave and come back")
    return MovingSimulator(trace, drop, move, transfer).run(timeline)
