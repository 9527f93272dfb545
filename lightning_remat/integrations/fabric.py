"""Fabric: its users write the loop, so they enter the engine in it; what would hide that from them is refused.

A strategy of Fabric's sees calls of modules and of ``backward``, and neither the loss nor where a step begins and ends.
Both belong to a step, whose peak is what a budget is for.
"""

from __future__ import annotations

import importlib
from typing import Any, NoReturn

from lightning_remat.errors import ConfigurationError

_NAMESPACES = ("lightning.fabric", "lightning_fabric")

_WAY_OUT = (
    "in Fabric the loop is yours, and the engine is entered in it. Leave strategy= as it is without recomputation "
    "('auto', 'ddp', ...), make one lightning_remat.Remat(...) after fabric.setup, and put `with remat:` around "
    "forward and loss; fabric.backward(loss) comes behind it."
)


def refuse(setting: str) -> NoReturn:
    """Say what to do instead.

    Raises:
        ConfigurationError: always.
    """
    raise ConfigurationError(f"Fabric(strategy={setting}) is not supported: {_WAY_OUT}")


def register_refusals(names: dict[str, str], strategy_class: Any) -> None:
    """Have every Fabric that is installed refuse the trainer's names and strategy objects; safe to repeat.

    Args:
        names: of strategies, with what they stand for.
        strategy_class: what an object's class stands on. It counts as one of Fabric's, so that it is asked for what a
            strategy of Fabric's has, and can answer.
    """
    for namespace in _NAMESPACES:
        try:
            strategies = importlib.import_module(f"{namespace}.strategies")
        except ImportError:
            continue
        for name, description in names.items():
            strategies.STRATEGY_REGISTRY.register(
                name, refuse, description=f"refused by Fabric: {description}", override=True, setting=repr(name)
            )
        strategies.Strategy.register(strategy_class)
