"""``Trainer(strategy="remat")``: any of Lightning's strategies, with the tape around its training step.

The class of a remat strategy is made once per base class (mixin, then base), so that Lightning's own ``isinstance``
checks hold. ``base="auto"`` cannot know its base class before the trainer has chosen devices: such a strategy starts as
a placeholder and turns into the real thing when Lightning configures its launcher, the last step of that choice.
"""

from __future__ import annotations

import importlib
from functools import cache
from typing import TYPE_CHECKING, Any

from lightning_remat.errors import ConfigurationError
from lightning_remat.runtime.session import Remat

if TYPE_CHECKING:
    from lightning.pytorch.strategies import Strategy

    _Base = Strategy
else:
    _Base = object

NAMESPACES = ("lightning.pytorch", "pytorch_lightning")
"""The two packages that Lightning is published as; their classes are not interchangeable."""


class RematStrategy(_Base):
    """A Lightning strategy whose training step is recorded and recomputed by :class:`~lightning_remat.Remat`.

    Args:
        base: ``"auto"`` (what ``Trainer(strategy="auto")`` would choose), the name of a registered strategy
            (``"ddp"``, ``"ddp_find_unused_parameters_true"``, ...), or a strategy class. Supported are single devices
            and the DDP family.
        policy, budget, blocks, offload, verify: see :class:`~lightning_remat.Remat`.
        **base_options: handed to the base class (``find_unused_parameters=True``, ``static_graph=True``, ...).

    Raises:
        ConfigurationError: an option that cannot work, or a base that is not supported.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> trainer = Trainer(accelerator="cpu", strategy=RematStrategy(policy="full"), logger=False)
        >>> trainer.strategy.remat.policy
        'full'
    """

    remat: Remat

    def __new__(cls, base: Any = "auto", *args: Any, _namespace: str = NAMESPACES[0], **options: Any) -> RematStrategy:
        """Choose the class that has the base's class among its own."""
        if cls is not RematStrategy:
            return object.__new__(cls)
        base_class, _ = resolve_base(base, _namespace)
        return object.__new__(strategy_class(base_class))

    def __init__(
        self,
        base: Any = "auto",
        *,
        policy: Any = "auto",
        budget: int | str | None = None,
        blocks: Any = None,
        offload: str | None = None,
        verify: bool = False,
        _namespace: str = NAMESPACES[0],
        **base_options: Any,
    ) -> None:
        _, preset = resolve_base(base, _namespace)
        self.remat = Remat(policy, budget=budget, blocks=blocks, offload=offload, verify=verify)
        if isinstance(self, _placeholder(_namespace)):
            self._single_only = base == "single_device"
            self._base_options = {**preset, **base_options}
            super().__init__()
        else:
            super().__init__(**{**preset, **base_options})

    def setup(self, trainer: Any) -> None:
        """Find the model's blocks and check the options against it, before anything else happens."""
        if trainer.state.fn is not None and trainer.state.fn.value == "fit":
            self.remat.bind(self.lightning_module)  # type: ignore[arg-type]
        super().setup(trainer)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """The base's training step, recorded."""
        with self.remat:
            return super().training_step(*args, **kwargs)

    def __reduce__(self) -> Any:
        base = next(c for c in type(self).__mro__ if not issubclass(c, RematStrategy))
        return _rebuild, (base,), self.__dict__

    def _configure_launcher(self) -> None:
        if "_single_only" in self.__dict__:
            _settle(self)
        super()._configure_launcher()


def resolve_base(base: Any, namespace: str) -> tuple[type, dict[str, Any]]:
    """The class behind ``base=``, and the options that its registered name stands for.

    Raises:
        ConfigurationError: unknown, or not supported.
    """
    strategies = importlib.import_module(f"{namespace}.strategies")
    supported = (strategies.SingleDeviceStrategy, strategies.DDPStrategy)
    if isinstance(base, str):
        if base in ("auto", "single_device"):
            return _placeholder(namespace), {}
        entry = strategies.StrategyRegistry.get(base, default=False) if base not in strategies.StrategyRegistry else None
        if entry is False:
            names = sorted(n for n, e in strategies.StrategyRegistry.items() if _is_supported(e["strategy"], supported))
            raise ConfigurationError(f"base={base!r} is not a registered strategy; supported are auto, {', '.join(names)}.")
        found = strategies.StrategyRegistry[base]
        base_class, preset = found["strategy"], dict(found["init_params"])
    elif isinstance(base, type):
        base_class, preset = base, {}
        for other in NAMESPACES:
            if base.__module__.startswith(other):
                strategies = importlib.import_module(f"{other}.strategies")
                supported = (strategies.SingleDeviceStrategy, strategies.DDPStrategy)
    else:
        raise ConfigurationError(
            f"base={base!r}: give a strategy's name or class, not an instance; what the instance was given goes into "
            "RematStrategy itself, as keyword arguments. For an instance that exists already there is RematCallback."
        )
    if isinstance(base_class, type) and issubclass(base_class, RematStrategy):
        raise ConfigurationError(f"base={base!r} is a remat strategy already; leave RematStrategy(base=...) around it out.")
    if not _is_supported(base_class, supported):
        raise ConfigurationError(
            f"base={base!r} is not supported (yet): recomputation under it is not known to be exact. Supported are "
            "single devices and the DDP family; use base='auto' or base='ddp', or the strategy without lightning-remat."
        )
    return base_class, preset


def _is_supported(base_class: Any, supported: tuple[type, ...]) -> bool:
    return isinstance(base_class, type) and issubclass(base_class, supported) and not issubclass(base_class, RematStrategy)


@cache
def strategy_class(base_class: type) -> type:
    """The remat strategy class over a base class; one per base, whoever asks."""
    return type(f"Remat{base_class.__name__.removeprefix('_')}", (RematStrategy, base_class), {"__module__": __name__})


def _rebuild(base_class: type) -> RematStrategy:
    strategy: RematStrategy = object.__new__(strategy_class(base_class))
    return strategy


@cache
def _placeholder(namespace: str) -> type:
    """A single-device strategy with the attributes that Lightning fills in only where it finds them."""
    strategies = importlib.import_module(f"{namespace}.strategies")

    class Auto(strategies.SingleDeviceStrategy):  # type: ignore[misc, name-defined]
        cluster_environment = None
        parallel_devices = None
        num_nodes = 1
        _layer_sync = None
        remat_namespace = namespace

        def set_world_ranks(self) -> None:
            """Ranks are known when the real strategy is."""

    Auto.__name__ = Auto.__qualname__ = f"_AutoStrategy_{namespace.replace('.', '_')}"
    Auto.__module__ = __name__
    globals()[Auto.__name__] = Auto  # picklable by name
    return Auto


def _settle(strategy: Any) -> None:
    """Turn a placeholder into the strategy that the trainer's devices call for, in place."""
    given = dict(strategy.__dict__)
    namespace = strategy.remat_namespace
    strategies = importlib.import_module(f"{namespace}.strategies")
    devices = list(given.get("parallel_devices") or [])
    nodes = given.get("num_nodes", 1)
    options = given["_base_options"]
    several = len(devices) > 1 or nodes > 1
    if several and given["_single_only"]:
        raise ConfigurationError(
            f"base='single_device' and {len(devices)} devices on {nodes} node(s) contradict each other: use devices=1, "
            "or base='auto' or 'ddp'."
        )
    base_class = strategies.DDPStrategy if several else strategies.SingleDeviceStrategy
    strategy.__dict__.clear()
    strategy.__class__ = strategy_class(base_class)
    strategy.remat = given["remat"]
    if several:
        interactive = importlib.import_module("lightning.fabric.utilities.imports" if namespace == NAMESPACES[0] else "lightning_fabric.utilities.imports")
        if interactive._IS_INTERACTIVE:
            options = {"start_method": "fork", **options}
        base_class.__init__(strategy, **options)
    else:
        base_class.__init__(strategy, **{"device": devices[0] if devices else "cpu", **options})
    for name in ("_accelerator", "_precision_plugin", "_checkpoint_io"):
        if given.get(name) is not None:
            setattr(strategy, name, given[name])
    if several:
        strategy.cluster_environment = given.get("cluster_environment")
        strategy.parallel_devices = devices
        strategy.num_nodes = nodes
        strategy._layer_sync = given.get("_layer_sync")
        strategy.set_world_ranks()


def register() -> None:
    """Make ``"remat"`` and ``"remat_ddp"`` known to every Lightning package that is installed; safe to repeat."""
    for namespace in NAMESPACES:
        try:
            registry = importlib.import_module(f"{namespace}.strategies").StrategyRegistry
        except ImportError:
            continue
        for name, base in (("remat", "auto"), ("remat_ddp", "ddp")):
            registry.register(
                name,
                RematStrategy,
                description=f"activation recomputation around strategy={base!r}",
                override=True,
                base=base,
                _namespace=namespace,
            )


