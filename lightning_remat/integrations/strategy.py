"""``Trainer(strategy="remat")``: any of Lightning's strategies, with the tape around its training step.

The class of a remat strategy is made once per base class (mixin, then base), so that Lightning's own ``isinstance``
checks hold. ``base="auto"`` cannot know its base class before the trainer has chosen devices: such a strategy starts as
a placeholder and turns into the real thing when Lightning configures its launcher, the last step of that choice.
"""

from __future__ import annotations

import importlib
import logging
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_remat.errors import ConfigurationError
from lightning_remat.integrations.bases import (
    FSDP2,
    NAMESPACES,
    Recomputing,
    check_options,
    resolve_base,
    strategies_of,
)
from lightning_remat.integrations.checkpoints import is_fitting, load_state, with_state
from lightning_remat.integrations.deepspeed import check_deepspeed, check_options_of_deepspeed, is_deepspeed
from lightning_remat.integrations.fabric import refuse, register_refusals
from lightning_remat.integrations.guard import Guard
from lightning_remat.integrations.monitor import Monitor
from lightning_remat.integrations.parting import Parting
from lightning_remat.integrations.precision import refuse_precision
from lightning_remat.integrations.sharing import Agreement
from lightning_remat.offload_option import Offload
from lightning_remat.runtime.session import Remat

if TYPE_CHECKING:
    from lightning.pytorch.strategies import Strategy

    _Base = Strategy
else:
    _Base = object

log = logging.getLogger("lightning.pytorch")  # Lightning's, so that what is said appears where its own lines do


class RematStrategy(Recomputing, _Base):
    """A Lightning strategy whose training step is recorded and recomputed by :class:`~lightning_remat.Remat`.

    Args:
        base: ``"auto"`` (what ``Trainer(strategy="auto")`` would choose), the name of a registered strategy
            (``"ddp"``, ``"ddp_find_unused_parameters_true"``, ``"fsdp"``, ...), ``"ModelParallelStrategy"``, or a
            strategy class. Supported are single devices,
            the DDP family, ``FSDPStrategy``, ``ModelParallelStrategy``, and ``DeepSpeedStrategy`` in stages 0 to 2.
        policy, budget, blocks, offload, verify, margin, retries, verify_every_n_steps, compiled: see
            :class:`~lightning_remat.Remat`.
        share_plan: the processes follow one plan under a budget, as long as their steps are the same sequence of ops:
            the one with least room decides. Each by itself has the fastest plan for its own batches; with one for all,
            none waits for another that recomputes more. Takes a small exchange between them when a batch begins.
        **base_options: handed to the base class (``find_unused_parameters=True``, ``static_graph=True``, ...).

    Raises:
        ConfigurationError: an option that cannot work, or a base that is not supported.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> from lightning_remat import RematStrategy
        >>> trainer = Trainer(accelerator="cpu", strategy=RematStrategy(policy="full"), logger=False)
        >>> trainer.strategy.remat.policy
        'full'
    """

    remat: Remat
    _monitor: Monitor | None = None

    def __init__(
        self,
        base: Any = "auto",
        *,
        policy: Any = "auto",
        budget: int | str | None = None,
        blocks: Any = None,
        offload: str | Path | Offload | None = None,
        verify: bool = False,
        margin: int | str = "5%",
        retries: int = 3,
        verify_every_n_steps: int | None = None,
        compiled: str = "leave",
        share_plan: bool = False,
        _namespace: str = NAMESPACES[0],
        **base_options: Any,
    ) -> None:
        base_class, preset = resolve_base(base, _namespace)
        if type(self) is RematStrategy:
            # The class that has the base's class among its own. Not by __new__, whose signature would hide this one
            # from LightningCLI.
            self.__class__ = strategy_class(base_class or _placeholder(_namespace))
        self._over_all_devices = base == FSDP2
        options = {**preset, **base_options}
        check_options(base, [base_class] if base_class is not None else _candidates(base, _namespace), options)
        self.remat = Remat(
            policy,
            budget=budget,
            blocks=blocks,
            offload=offload,
            verify=verify,
            margin=margin,
            retries=retries,
            verify_every_n_steps=verify_every_n_steps,
            compiled=compiled,
        )
        self._guard = Guard(self.remat)
        self._parting = Parting(self._guard.explain)
        self._agreement = Agreement(self.remat) if share_plan else None
        if base_class is None:
            self._settings = (base, _namespace)
            self._base_options = options
            # What Lightning looks at before it has chosen devices must be in place by then.
            super().__init__(**{name: options.pop(name) for name in _EARLY if name in options})
            for name in ("cluster_environment", "parallel_devices"):
                if name in options:
                    setattr(self, name, options.pop(name))
        else:
            if is_deepspeed(self):
                check_options_of_deepspeed(options)
            super().__init__(**options)
            if is_deepspeed(self):
                check_deepspeed(self.config)  # type: ignore[attr-defined]  # of DeepSpeedStrategy

    def setup_environment(self) -> None:
        """Where ``base="fsdp2"`` was given no size, shards are spread over all devices that tensor parallel leaves."""
        if self._over_all_devices:
            base: Any = self  # a ModelParallelStrategy
            if base._data_parallel_size == "auto":
                base._data_parallel_size = base.num_nodes * base.num_processes // int(base._tensor_parallel_size)
        super().setup_environment()

    def setup(self, trainer: Any) -> None:
        """Find the model's blocks and check the options against it, before anything else happens."""
        fit = is_fitting(trainer)
        if fit:
            refuse_precision(trainer, self.remat)
            self.remat.bind(self.lightning_module)  # type: ignore[arg-type]  # attached by setup
        super().setup(trainer)
        if fit:
            # Again: by now the precision plugin or SyncBatchNorm may have put other modules in place of some.
            self.remat.bind(self.lightning_module)  # type: ignore[arg-type]  # attached by setup
            self._guard.install(trainer)
            if self.is_global_zero:
                log.info(self.remat.summary)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """The base's training step, recorded."""
        return self._guard.training_step(super().training_step, *args, **kwargs)

    def on_exception(self, exception: BaseException) -> None:
        """Training ends by an error: if it was out of memory, say why that was not got over."""
        self._guard.explain(exception)
        super().on_exception(exception)

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """The base's, unless training ends by an error here, and not in the processes that would be waited for."""
        if self._parting.alone(self) is None:
            super().barrier(*args, **kwargs)  # type: ignore[safe-super]  # that of the base, which has one

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The base's; where that takes all processes, not if training ends by an error in this one alone."""
        self._parting.before_state(self)
        return super().lightning_module_state_dict()

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Likewise."""
        self._parting.before_state(self)
        return super().optimizer_state(optimizer)

    def on_train_start(self) -> None:
        """Training begins, and is followed from here."""
        super().on_train_start()
        monitor = self._monitor = Monitor(self.remat)
        monitor.start(self.lightning_module.trainer)  # type: ignore[union-attr]  # attached while training

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """A batch begins, and the one before is over."""
        super().on_train_batch_start(batch, batch_idx)
        if self._agreement is not None:
            self._agreement.batch_starts()
        if self._monitor is not None:
            # Attached while training.
            self._monitor.batch_starts(self.lightning_module.trainer)  # type: ignore[union-attr]

    def on_train_end(self) -> None:
        """The last batch is over."""
        super().on_train_end()
        if self._monitor is not None:
            self._monitor.end(self.lightning_module.trainer)  # type: ignore[union-attr]  # attached while training

    def save_checkpoint(self, checkpoint: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """The base's, with what recomputation has learned."""
        super().save_checkpoint(
            with_state(checkpoint, self.remat) if self.is_global_zero else checkpoint, *args, **kwargs
        )

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """The base's; training that is resumed goes on with what recomputation had learned."""
        checkpoint: dict[str, Any] = super().load_checkpoint(*args, **kwargs)
        module = self.lightning_module
        if module is not None and is_fitting(module.trainer):
            load_state(checkpoint, self.remat)
        return checkpoint

    def teardown(self) -> None:
        """Training ends, also by an exception: nothing is counted any more."""
        self._guard.remove()
        monitor, self._monitor = self._monitor, None
        if monitor is not None:
            monitor.close(speak=self.is_global_zero)
        self.remat.close()
        super().teardown()

    @property
    def _precision(self) -> Any:
        """What Fabric asks a strategy object for, and no trainer."""
        refuse("RematStrategy(...)")

    def __reduce__(self) -> Any:
        base = next(c for c in type(self).__mro__ if not issubclass(c, Recomputing) and c is not Recomputing)
        return _rebuild, (base,), self.__dict__

    def _configure_launcher(self) -> None:
        if "_settings" in self.__dict__:
            _settle(self)
        super()._configure_launcher()


_EARLY = ("accelerator", "checkpoint_io", "precision_plugin")


def _candidates(base: str, namespace: str) -> list[type]:
    """What a placeholder may turn into."""
    strategies = strategies_of(namespace)
    single = [strategies.SingleDeviceStrategy]
    return single if base == "single_device" else [*single, strategies.DDPStrategy]


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
    strategies = strategies_of(namespace)

    class Auto(strategies.SingleDeviceStrategy):  # type: ignore[misc, name-defined]  # a base that is known at run time
        cluster_environment = None
        parallel_devices = None
        num_nodes = 1
        _layer_sync = None

        def set_world_ranks(self) -> None:
            """Ranks are known when the real strategy is."""

    Auto.__name__ = Auto.__qualname__ = f"_AutoStrategy_{namespace.replace('.', '_')}"
    Auto.__module__ = __name__
    globals()[Auto.__name__] = Auto  # picklable by name
    return Auto


def _settle(strategy: Any) -> None:
    """Turn a placeholder into the strategy that the trainer's devices call for, in place."""
    given = dict(strategy.__dict__)
    base, namespace = given["_settings"]
    options = given["_base_options"]
    single, *several = _candidates(base, namespace)
    devices = list(given.get("parallel_devices") or [])
    nodes = given.get("num_nodes", 1)
    if len(devices) <= 1 and nodes <= 1:
        base_class = single
        options = {"device": devices[0] if devices else "cpu", **options}
    elif several:
        base_class = several[0]
        if _is_interactive(namespace):
            options = {"start_method": "fork", **options}
    else:
        raise ConfigurationError(
            f"base={base!r} and {len(devices)} devices on {nodes} node(s) contradict each other: use devices=1, or "
            "base='auto' or 'ddp'."
        )
    check_options(base, [base_class], options)
    strategy.__dict__.clear()
    strategy.__class__ = strategy_class(base_class)
    for name in ("remat", "_guard", "_parting", "_agreement", "_over_all_devices"):
        setattr(strategy, name, given[name])
    base_class.__init__(strategy, **options)  # type: ignore[misc]  # of the class that it has just become
    for name in ("_accelerator", "_precision_plugin", "_checkpoint_io"):
        if given.get(name) is not None:
            setattr(strategy, name, given[name])
    if base_class is not single:
        strategy.cluster_environment = given.get("cluster_environment")
        strategy.parallel_devices = devices
        strategy.num_nodes = nodes
        strategy._layer_sync = given.get("_layer_sync")
        strategy.set_world_ranks()


def _is_interactive(namespace: str) -> bool:
    """Whether this is a notebook, where Lightning takes forked processes."""
    package = "lightning.fabric" if namespace == NAMESPACES[0] else "lightning_fabric"
    return bool(importlib.import_module(f"{package}.utilities.imports")._IS_INTERACTIVE)


def register() -> None:
    """Make ``"remat"`` and the others known to every Lightning package that is installed; safe to repeat."""
    names = {"remat": "auto", "remat_ddp": "ddp", "remat_fsdp": "fsdp", "remat_fsdp2": FSDP2}
    register_refusals({name: f"recomputation around {base!r}" for name, base in names.items()}, RematStrategy)
    for namespace in NAMESPACES:
        try:
            registry = strategies_of(namespace).StrategyRegistry
        except ImportError:
            continue
        for name, base in names.items():
            registry.register(
                name,
                RematStrategy,
                description=f"activation recomputation around strategy={base!r}",
                override=True,
                base=base,
                _namespace=namespace,
            )
        if namespace == NAMESPACES[0]:
            # An instance is a Strategy by its class, which depends on the base. LightningCLI asks before there is one.
            strategies_of(namespace).Strategy.register(RematStrategy)
