"""What the compiler is kept out of: see :mod:`~lightning_remat.engine.opaque`."""

from __future__ import annotations

from lightning_remat import sizes
from lightning_remat.engine import (
    aliases,
    eviction,
    generators,
    leaving,
    ledger,
    lineage,
    moving,
    plain,
    planned,
    regions,
    replay,
    rescue,
    rules,
    sharded,
    sources,
    spread,
    store,
    tape,
    transforms,
    untold,
    values,
    verify,
    writes,
)
from lightning_remat.engine.offload import (
    buffers,
    crew,
    depot,
    directory,
    disk,
    extents,
    file,
    gpu_direct,
    host,
    moved,
    mover,
    pinned,
    streams,
    transfer,
)
from lightning_remat.engine.opaque import hide_from_compiler
from lightning_remat.runtime import compiled, measuring, memory, nobodys, saying, static, tracer, tracing
from lightning_remat.runtime.tuning import choosing, fallback, from_file, known, pilot, relief, resting


def hide_from_the_compiler() -> None:
    """Mark all code that may run inside of what is compiled: dispatch, hooks, and what they call."""
    hide_from_compiler(
        aliases,
        eviction,
        lineage,
        generators,
        leaving,
        ledger,
        moving,
        plain,
        planned,
        regions,
        replay,
        rescue,
        rules,
        sharded,
        sources,
        spread,
        store,
        tape,
        transforms,
        untold,
        values,
        verify,
        writes,
    )
    hide_from_compiler(
        buffers,
        crew,
        depot,
        directory,
        disk,
        extents,
        file,
        gpu_direct,
        host,
        moved,
        mover,
        pinned,
        streams,
        transfer,
        sizes,
        saying,
    )
    # A step that is traced, planned or measured runs these inside of what may be compiled.
    hide_from_compiler(
        choosing,
        compiled,
        fallback,
        from_file,
        known,
        measuring,
        memory,
        nobodys,
        pilot,
        relief,
        resting,
        static,
        tracer,
        tracing,
    )
