"""Names, the choice of a base, what the trainer was given, and refusals: all before the first step."""

import pickle
from typing import Any

import lightning.pytorch as lp
import pytest
import pytorch_lightning as pl
import torch
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.plugins import MixedPrecision, TorchCheckpointIO
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.plugins.layer_sync import TorchSyncBatchNorm
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy

from lightning_remat import RematStrategy
from tests.helpers.training import Lit, Net, regression, regression_data, trainer_for

PACKAGES = pytest.mark.parametrize("package", [lp, pl], ids=["lightning.pytorch", "pytorch_lightning"])


def strategy_of(strategy: Any, package: Any = lp, **options: Any) -> Any:
    """The strategy of a trainer that is built and not run."""
    settings = {"accelerator": "cpu", "devices": 1, "logger": False, "enable_checkpointing": False} | options
    return package.Trainer(strategy=strategy, **settings).strategy


# ---------------------------------------------------------------------- names and bases


@PACKAGES
def test_names_are_registered(package: Any) -> None:
    """Importing lightning_remat is enough, under either name that Lightning is published as."""
    assert {"remat", "remat_ddp", "remat_fsdp", "remat_fsdp2"} <= set(
        package.strategies.StrategyRegistry.available_strategies()
    )


@PACKAGES
@pytest.mark.parametrize("strategy", ["remat", "REMAT", "an instance"])
def test_remat_chooses_what_auto_would(package: Any, strategy: Any) -> None:
    """One device or several, and Lightning's own class checks hold, of the package whose trainer it is."""
    bases = package.strategies
    for devices, base in [(1, bases.SingleDeviceStrategy), (2, bases.DDPStrategy)]:
        given = strategy if strategy != "an instance" or package is pl else RematStrategy()
        if given == "an instance":
            given = RematStrategy(base=base)  # an instance for "auto" is one of lightning.pytorch
        chosen = strategy_of(given, package, devices=devices)
        assert isinstance(chosen, RematStrategy)
        lightnings = [c for c in type(chosen).__mro__ if c.__module__.startswith(package.__name__)]
        assert lightnings[0] is base is type(strategy_of("auto", package, devices=devices))


@PACKAGES
@pytest.mark.parametrize(("name", "base"), [("remat_fsdp", "FSDPStrategy"), ("remat_fsdp2", "ModelParallelStrategy")])
def test_sharded_names_stand_for_their_bases(package: Any, name: str, base: str) -> None:
    chosen = strategy_of(name, package, devices=2)
    assert isinstance(chosen, getattr(package.strategies, base))
    assert isinstance(chosen, RematStrategy)


@PACKAGES
@pytest.mark.parametrize("devices", [1, 2])
def test_remat_ddp_is_ddp_whatever_the_number_of_devices(package: Any, devices: int) -> None:
    chosen = strategy_of("remat_ddp", package, devices=devices)
    assert isinstance(chosen, package.strategies.DDPStrategy)
    assert isinstance(chosen, RematStrategy)
    assert chosen.num_processes == devices


@pytest.mark.parametrize(
    ("base", "expected", "options"),
    [
        ("ddp", DDPStrategy, {"_start_method": "popen"}),
        ("ddp_spawn", DDPStrategy, {"_start_method": "spawn"}),
        ("ddp_find_unused_parameters_true", DDPStrategy, {"_ddp_kwargs": {"find_unused_parameters": True}}),
        ("single_device", SingleDeviceStrategy, {}),
        (DDPStrategy, DDPStrategy, {}),
        (SingleDeviceStrategy, SingleDeviceStrategy, {}),
    ],
    ids=str,
)
def test_a_base_by_name_or_class(base: Any, expected: type, options: dict[str, Any]) -> None:
    """A name brings the options that it stands for in Lightning."""
    chosen = strategy_of(RematStrategy(base=base, policy="full"))
    assert isinstance(chosen, expected)
    assert chosen.remat.policy == "full"
    for name, value in options.items():
        assert getattr(chosen, name) == value


def test_a_base_of_the_users_own() -> None:
    """A subclass of a supported strategy keeps what it overrides."""

    class Mine(SingleDeviceStrategy):
        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            self.steps = getattr(self, "steps", 0) + 1
            return super().training_step(*args, **kwargs)

    strategy = RematStrategy(base=Mine, policy="full")
    trainer_for(strategy).fit(Lit(Net(), regression), regression_data())
    assert isinstance(strategy, Mine)
    assert strategy.steps == 3
    assert strategy.remat.stats.replayed_ops > 0


def test_options_of_the_base_reach_it() -> None:
    chosen = strategy_of(RematStrategy(base="ddp", static_graph=True, find_unused_parameters=True))
    assert chosen._ddp_kwargs == {"static_graph": True, "find_unused_parameters": True}
    chosen = strategy_of(RematStrategy(static_graph=True), devices=2)
    assert chosen._ddp_kwargs == {"static_graph": True}


def test_the_class_is_made_once() -> None:
    assert type(RematStrategy(base="ddp")) is type(RematStrategy(base=DDPStrategy))


@PACKAGES
def test_either_packages_classes_are_bases(package: Any) -> None:
    strategy = RematStrategy(base=package.strategies.DDPStrategy)
    assert isinstance(strategy_of(strategy, package, devices=2), package.strategies.DDPStrategy)


# ---------------------------------------------------------------------- what the trainer was given


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("strategy", ["remat", "remat_ddp"])
def test_what_the_trainer_was_given_survives(strategy: str, devices: int) -> None:
    """Accelerator, precision, checkpoint plugin, cluster environment, number of nodes and SyncBatchNorm."""
    accelerator, checkpoints, cluster = CPUAccelerator(), TorchCheckpointIO(), LightningEnvironment()
    options: dict[str, Any] = {"accelerator": accelerator, "plugins": [checkpoints, cluster], "precision": "bf16-mixed"}
    chosen = strategy_of(strategy, devices=devices, sync_batchnorm=True, **options)
    assert chosen.accelerator is accelerator
    assert chosen.checkpoint_io is checkpoints
    assert isinstance(chosen.precision_plugin, MixedPrecision)
    if isinstance(chosen, DDPStrategy):
        assert chosen.cluster_environment is cluster
        assert chosen.parallel_devices == [torch.device("cpu")] * devices
        assert isinstance(chosen._layer_sync, TorchSyncBatchNorm)


@pytest.mark.parametrize("devices", [1, 2])
def test_what_the_strategy_was_given_survives(devices: int) -> None:
    """The same through the strategy's own arguments, which Lightning looks at before devices are chosen."""
    precision, checkpoints = MixedPrecision("bf16-mixed", "cpu"), TorchCheckpointIO()
    accelerator = CPUAccelerator()
    strategy = RematStrategy(precision_plugin=precision, checkpoint_io=checkpoints, accelerator=accelerator)
    chosen = strategy_of(strategy, accelerator="auto", devices=devices)
    assert chosen.precision_plugin is precision
    assert chosen.checkpoint_io is checkpoints
    assert chosen.accelerator is accelerator


def test_what_ddp_alone_takes_survives_where_auto_means_ddp() -> None:
    cluster = LightningEnvironment()
    chosen = strategy_of(RematStrategy(cluster_environment=cluster), devices=2)
    assert chosen.cluster_environment is cluster


def test_several_nodes_are_ddp() -> None:
    chosen = strategy_of("remat", num_nodes=2)
    assert isinstance(chosen, DDPStrategy)
    assert chosen.num_nodes == 2


@pytest.mark.parametrize("base", ["auto", "ddp", "ddp_spawn"])
def test_a_strategy_can_be_pickled_before_it_runs(base: str) -> None:
    """Spawned processes get theirs that way."""
    chosen = strategy_of(RematStrategy(base=base, policy={"layers.*": "full"}, static_graph=True), devices=2)
    copy = pickle.loads(pickle.dumps(chosen))
    assert type(copy) is type(chosen)
    assert copy.remat.policy == chosen.remat.policy
    assert copy._ddp_kwargs == {"static_graph": True}
    assert copy.parallel_devices == chosen.parallel_devices
