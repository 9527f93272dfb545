"""lightning-remat: training that fits in memory, with results bit for bit those of plain training.

Importing it makes ``Trainer(strategy="remat")``, ``"remat_ddp"``, ``"remat_fsdp"`` and ``"remat_fsdp2"`` known to
Lightning.
"""

from lightning_remat.engine.policies import OpInfo
from lightning_remat.errors import ConfigurationError, NoMemoryLeft, OffloadError, RematError, ReplayError
from lightning_remat.integrations.callback import RematCallback
from lightning_remat.integrations.strategy import RematStrategy, register
from lightning_remat.offload_option import Offload
from lightning_remat.reporting.kept import print_kept
from lightning_remat.runtime.session import Remat, StepStats

__all__ = [
    "ConfigurationError",
    "NoMemoryLeft",
    "Offload",
    "OffloadError",
    "OpInfo",
    "Remat",
    "RematCallback",
    "RematError",
    "RematStrategy",
    "ReplayError",
    "StepStats",
    "print_kept",
]

register()
