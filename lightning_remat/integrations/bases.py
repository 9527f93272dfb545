"""Which of Lightning's strategies can be a base, and which options each of them takes."""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Iterable, Mapping
from typing import Any

from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from lightning_remat.errors import ConfigurationError

NAMESPACES = ("lightning.pytorch", "pytorch_lightning")
"""The two packages that Lightning is published as; their classes are not interchangeable."""

FSDP2 = "fsdp2"
"""Our name for ``ModelParallelStrategy`` with shards on all devices; by itself that has tensor parallel on all."""

_PACKAGES = ("lightning", "pytorch_lightning", "lightning_fabric")

_OURS = (
    "policy",
    "budget",
    "blocks",
    "offload",
    "verify",
    "margin",
    "retries",
    "verify_every_n_steps",
    "compiled",
    "share_plan",
)


def resolve_base(base: Any, namespace: str) -> tuple[type | None, dict[str, Any]]:
    """The class behind ``base=`` (None: to be chosen by the trainer), and the options its registered name stands for.

    Raises:
        ConfigurationError: unknown, or not supported.
    """
    if base == "ModelParallelStrategy":  # which Lightning has given no name
        base = strategies_of(namespace).ModelParallelStrategy
    if base == FSDP2:
        return strategies_of(namespace).ModelParallelStrategy, {"tensor_parallel_size": 1}
    if isinstance(base, str):
        if base in ("auto", "single_device"):
            return None, {}
        registry = strategies_of(namespace).StrategyRegistry
        if base not in registry:
            names = sorted(n for n, e in registry.items() if _can_be_a_base(e))
            raise ConfigurationError(
                f"base={base!r} is not a registered strategy; supported are auto, {FSDP2}, ModelParallelStrategy, "
                f"{', '.join(names)}."
            )
        base_class, preset = registry[base]["strategy"], dict(registry[base]["init_params"])
    elif isinstance(base, type):
        base_class, preset = base, {}
    else:
        raise ConfigurationError(
            f"base={base!r}: give a strategy's name or class, not an instance; what the instance was given goes into "
            "RematStrategy itself, as keyword arguments. For an instance that exists already there is RematCallback."
        )
    if is_ours(base_class):
        raise ConfigurationError(
            f"base={base!r} is a remat strategy already; leave RematStrategy(base=...) around it out."
        )
    if not is_supported(base_class):
        raise ConfigurationError(
            f"base={base!r} is not supported (yet): recomputation under it is not known to be exact. Supported are "
            f"{SUPPORTED}; use base='auto', 'ddp' or 'fsdp', or the strategy without lightning-remat."
        )
    return base_class, preset


SUPPORTED = "single devices, the DDP family, FSDPStrategy, ModelParallelStrategy and DeepSpeedStrategy (stages 0 to 2)"
_BASES = ("SingleDeviceStrategy", "DDPStrategy", "FSDPStrategy", "ModelParallelStrategy", "DeepSpeedStrategy")


_WRAPPERS: dict[str, Any] = {"DDPStrategy": DistributedDataParallel, "FSDPStrategy": FullyShardedDataParallel}


class Recomputing:
    """Marks strategy classes that recompute."""


def strategies_of(namespace: str) -> Any:
    """The module ``<namespace>.strategies``."""
    return importlib.import_module(f"{namespace}.strategies")


def _can_be_a_base(entry: Mapping[str, Any]) -> bool:
    """Whether a registered strategy is one that may stand under ours."""
    base_class, preset = entry["strategy"], entry["init_params"]
    refused = preset.get("stage") == 3 or preset.get("offload_optimizer", False) or preset.get("cpu_offload", False)
    return is_supported(base_class) and not is_ours(base_class) and not refused


def is_ours(base_class: Any) -> bool:
    """Whether a class recomputes already: RematStrategy, or one that was made from it."""
    return isinstance(base_class, type) and issubclass(base_class, Recomputing)


def is_supported(base_class: Any) -> bool:
    """Whether a class is one of the supported bases, or is a user's own and stands on one."""
    return _lightnings_own(base_class) in _BASES


def is_known_not_to_work(strategy_class: type) -> bool:
    """Whether a strategy, of whatever origin, stands on one of Lightning's that is not supported."""
    own = _lightnings_own(strategy_class)
    return own is not None and own not in (*_BASES, "ParallelStrategy", "Strategy")


def _lightnings_own(strategy_class: Any) -> str | None:
    """The first class on the way up that is Lightning's; DeepSpeed's and XLA's stand on DDP's and are others."""
    if not isinstance(strategy_class, type):
        return None
    return next((c.__name__ for c in strategy_class.__mro__ if c.__module__.partition(".")[0] in _PACKAGES), None)


def check_options(base: Any, classes: Iterable[type], options: Mapping[str, Any]) -> None:
    """Refuse an option that none of ``classes`` takes.

    Raises:
        ConfigurationError: which one, and the nearest that there is.
    """
    classes = list(classes)
    accepted: set[str] = set()
    for base_class in classes:
        names = _parameters(base_class)
        if names is None:
            return
        accepted |= names
    for name in options:
        if name not in accepted:
            near = difflib.get_close_matches(name, [*_OURS, *sorted(accepted)], n=2)
            hint = f" Did you mean {' or '.join(near)}?" if near else ""
            where = " or ".join(c.__name__ for c in classes)
            raise ConfigurationError(
                f"{name}={options[name]!r} is neither an option of lightning-remat ({', '.join(_OURS)}) nor of "
                f"{where}, for which base={base!r} stands; leave it out, or give the base that takes it.{hint}"
            )


def _parameters(base_class: type) -> set[str] | None:
    """Names of the keyword arguments of a strategy class; None if it takes any."""
    names: set[str] = set()
    for c in base_class.__mro__:
        if "__init__" not in vars(c):
            continue
        # Only its signature is read.
        parameters = inspect.signature(c.__init__).parameters.values()  # type: ignore[misc]
        names.update(p.name for p in parameters if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD))
        if c.__name__ in _WRAPPERS:  # hands the rest to the wrapper
            wrapper = inspect.signature(_WRAPPERS[c.__name__].__init__).parameters
            return (names | set(wrapper)) - {"self", "module", "device_ids", "device_id", "kwargs"}
        if not any(p.kind is p.VAR_KEYWORD for p in parameters):
            return names - {"self"}
    return None
