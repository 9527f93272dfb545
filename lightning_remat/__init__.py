"""lightning-remat: training that fits in memory, with results bit for bit those of plain training."""

from lightning_remat.engine.policies import OpInfo
from lightning_remat.errors import ConfigurationError, RematError, ReplayError
from lightning_remat.runtime.session import Remat, StepStats

__all__ = ["ConfigurationError", "OpInfo", "Remat", "RematError", "ReplayError", "StepStats"]
