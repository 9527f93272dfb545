"""What the compiler is kept out of: see :mod:`~lightning_remat.engine.opaque`."""

from __future__ import annotations

from importlib import import_module

from lightning_remat.engine.opaque import hide_from_compiler

# All code that may run inside of what is compiled: dispatch, hooks, and what they call; and what a step that is traced,
# planned or measured runs besides.
_MODULES = {
    "lightning_remat": "sizes",
    "lightning_remat.engine": """
        eviction generators leaving ledger lineage moving plain planned regions replay rescue rules
        sources store tape transforms values verify writes
    """,
    "lightning_remat.engine.offload": """
        buffers crew depot directory disk extents file gpu_direct host moved mover pinned streams
        transfer
    """,
    "lightning_remat.runtime": "measuring memory saying static tracer tracing",
    "lightning_remat.runtime.tuning": "choosing fallback from_file known pilot relief resting",
}


def hide_from_the_compiler() -> None:
    """Mark all of it."""
    for package, names in _MODULES.items():
        hide_from_compiler(*(import_module(f"{package}.{name}") for name in names.split()))
