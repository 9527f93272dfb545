"""LightningCLI: everything can be set in a configuration file, overridden on the command line, and saved again."""

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from lightning.pytorch import LightningDataModule
from lightning.pytorch.cli import LightningCLI

from lightning_remat import Offload, Remat, RematCallback, RematStrategy
from tests.helpers.training import Lit, Net, regression, regression_data

OPTIONS: dict[str, Any] = {
    "policy": "auto",
    "budget": "20GiB",
    "margin": "5%",
    "retries": 2,
    "verify_every_n_steps": 2,
    "compiled": "leave",
}


@pytest.fixture(autouse=True)
def _no_command_line_of_the_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    """LightningCLI warns if a program that has arguments of its own gives it others."""
    monkeypatch.setattr("sys.argv", ["script.py"])
    # Lightning 2.6.6 calls two methods of jsonargparse by names that were deprecated in its 4.49.
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")


class Model(Lit):
    """What a user's script gives LightningCLI."""

    def __init__(self, width: int = 16) -> None:
        super().__init__(Net(width), regression)


class Data(LightningDataModule):
    def __init__(self, batches: int = 4) -> None:
        super().__init__()
        self.batches = batches

    def train_dataloader(self) -> Any:
        return regression_data(self.batches)


QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "devices": 1,
    "max_epochs": 1,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "log_every_n_steps": 1,
}


def written(folder: Path, **trainer: Any) -> str:
    """A configuration file."""
    path = folder / "given.yaml"
    trainer = {"logger": {"class_path": "CSVLogger", "init_args": {"save_dir": str(folder / "logs")}}} | trainer
    path.write_text(yaml.safe_dump({"seed_everything": 1, "trainer": QUIET | trainer}))
    return str(path)


def run(*args: str) -> LightningCLI:
    """What the user's script does with `python script.py fit ...`."""
    return LightningCLI(Model, Data, args=["fit", *args], save_config_kwargs={"overwrite": True})


def strategy(**options: Any) -> dict[str, Any]:
    return {"class_path": "lightning_remat.RematStrategy", "init_args": options}


def remat_of(cli: LightningCLI) -> Remat:
    remat = cli.trainer.strategy.remat
    assert isinstance(remat, Remat)
    assert remat.counters.steps == 4
    return remat


def options_of(remat: Remat) -> dict[str, Any]:
    return {name: value for name, value in remat._options.items() if value is not None and value is not False}


def test_everything_in_a_file(tmp_path: Path) -> None:
    cli = run("--config", written(tmp_path, strategy=strategy(**OPTIONS)))
    remat = remat_of(cli)
    assert options_of(remat) == OPTIONS
    assert remat.plan is not None
    assert remat.budget_bytes == 20 * 2**30
    (metrics,) = tmp_path.rglob("metrics.csv")
    assert "remat/replayed_ops" in metrics.read_text()


def test_the_example(tmp_path: Path) -> None:
    """The configuration in examples/."""
    example = str(Path(__file__).parents[2] / "examples" / "lightning_cli.yaml")
    args = ("--trainer.logger.init_args.save_dir", str(tmp_path), "--seed_everything=1")
    quiet = [f"--trainer.{name}={value}" for name, value in QUIET.items()]
    remat = remat_of(run("--config", example, *args, *quiet))
    assert remat.budget_bytes == 20 * 2**30


def test_overrides_on_the_command_line(tmp_path: Path) -> None:
    """A part of what the file says, or all of it; bytes, shares, names and mappings."""
    file = written(tmp_path, strategy=strategy(**OPTIONS))
    prefix = "--trainer.strategy.init_args."
    remat = remat_of(run("--config", file, f"{prefix}budget=3000000", f"{prefix}retries=0"))
    assert options_of(remat) == OPTIONS | {"budget": 3_000_000, "retries": 0}
    assert remat.budget_bytes == 3_000_000
    remat = remat_of(run("--config", file, f"{prefix}budget=null", f"{prefix}policy=full", f"{prefix}margin=1000"))
    assert remat.policy == "full"
    assert remat._options["margin"] == 1000
    remat = remat_of(run("--config", file, f"{prefix}budget=null", prefix + 'policy={"net.layers.*": "full"}'))
    assert remat.blocks == ["net.layers.0", "net.layers.1", "net.layers.2"]
    assert remat_of(run("--config", file, "--trainer.strategy=remat")).policy == "auto"


def test_the_command_line_alone(tmp_path: Path) -> None:
    file = written(tmp_path)
    args = ("--trainer.strategy=lightning_remat.RematStrategy", "--trainer.strategy.policy=full",
            "--trainer.strategy.blocks=net.layers.*")  # fmt: skip
    remat = remat_of(run("--config", file, *args))
    assert (remat.policy, len(remat.blocks)) == ("full", 3)


@pytest.mark.parametrize(
    ("policy", "blocks"),
    [({"net.layers.*": "full"}, None), ("every:2", ["net.layers.*"]), ("none", None), ("sqrt", "net.layers.*")],
)
def test_policies_and_blocks(policy: Any, blocks: Any, tmp_path: Path) -> None:
    cli = run("--config", written(tmp_path, strategy=strategy(policy=policy, blocks=blocks)))
    options = cli.trainer.strategy.remat._options
    assert (options["policy"], options["blocks"]) == (policy, blocks)


def test_a_plan_file(tmp_path: Path) -> None:
    remat = remat_of(run("--config", written(tmp_path, strategy=strategy(**OPTIONS))))
    plan = tmp_path / "plan.json"
    remat.save_plan(plan)
    again = remat_of(run("--config", written(tmp_path, strategy=strategy(policy=str(plan)))))
    assert str(plan) in again.summary


def test_the_name_alone(tmp_path: Path) -> None:
    assert remat_of(run("--config", written(tmp_path, strategy="remat"))).policy == "auto"


def test_another_base_and_what_it_takes(tmp_path: Path) -> None:
    """Options of the base go into `dict_kwargs`, as jsonargparse has it for what it cannot see."""
    given = {**strategy(base="ddp", policy="full"), "dict_kwargs": {"find_unused_parameters": True}}
    path = written(tmp_path, strategy=given)
    cli = LightningCLI(Model, Data, run=False, args=["--config", path])
    assert isinstance(cli.trainer.strategy, RematStrategy)
    assert cli.trainer.strategy._ddp_kwargs == {"find_unused_parameters": True}


def test_the_callback(tmp_path: Path) -> None:
    """In a file, with an override for it."""
    given = {"class_path": "lightning_remat.RematCallback", "init_args": OPTIONS}
    file = written(tmp_path, callbacks=[given], strategy={"class_path": "SingleDeviceStrategy"})
    for args, budget in (((), "20GiB"), (("--trainer.callbacks.init_args.budget=10GiB",), "10GiB")):
        cli = run("--config", file, *args)
        (callback,) = [c for c in cli.trainer.callbacks if isinstance(c, RematCallback)]
        assert options_of(callback.remat) == OPTIONS | {"budget": budget}
        assert callback.remat.counters.steps == 4


def test_what_is_saved_can_be_run_again(tmp_path: Path) -> None:
    """`config.yaml`, which every LightningCLI run leaves beside its logs, and `--print_config`."""
    given = OPTIONS | {"policy": {"net.layers.*": "full"}, "budget": None}
    first = run("--config", written(tmp_path, strategy=strategy(**given)))
    (saved,) = tmp_path.rglob("config.yaml")
    content = yaml.safe_load(saved.read_text())["trainer"]["strategy"]
    assert content["class_path"] == "lightning_remat.RematStrategy"
    assert content["init_args"].items() >= given.items()
    again = run("--config", str(saved))
    assert options_of(remat_of(again)) == options_of(remat_of(first))
    for a, b in zip(first.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_print_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What is printed is a configuration with every option of ours in it."""
    with pytest.raises(SystemExit):
        run("--config", written(tmp_path, strategy=strategy(**OPTIONS)), "--print_config")
    printed = tmp_path / "printed.yaml"
    printed.write_text(capsys.readouterr().out)
    shown = yaml.safe_load(printed.read_text())["trainer"]["strategy"]["init_args"]
    rest = {"base": "auto", "blocks": None, "offload": None, "verify": False, "share_plan": False}
    assert shown == rest | OPTIONS
    assert options_of(remat_of(run("--config", str(printed)))) == OPTIONS


def test_where_to_offload(tmp_path: Path) -> None:
    """A word, a directory, or a class with its options; saved as it was given, overridden in part."""

    def given(*args: str, **options: Any) -> Any:
        path = written(tmp_path, strategy=strategy(policy="full", **options))
        return LightningCLI(Model, Data, run=False, args=["--config", path, *args]).trainer.strategy.remat.offload

    assert given(offload="disk") == Offload("disk")
    assert given(offload=str(tmp_path)) == Offload(tmp_path)
    options = {"to": str(tmp_path), "disk_budget": "3GiB", "checksum": False}
    expected = Offload(tmp_path, disk_budget="3GiB", checksum=False)
    assert given(offload={"class_path": "lightning_remat.Offload", "init_args": options}) == expected
    assert given(offload=options) == expected
    assert given("--trainer.strategy.init_args.offload=disk", offload=options) == Offload("disk")
    assert given("--trainer.strategy.init_args.offload=null", offload=options) is None


def test_where_to_offload_under_the_callback(tmp_path: Path) -> None:
    options = {"to": "disk", "min_bytes": 4096}
    callback = {
        "class_path": "lightning_remat.RematCallback",
        "init_args": {
            "policy": "offload_only",
            "offload": {"class_path": "lightning_remat.Offload", "init_args": options},
        },
    }
    path = written(tmp_path, callbacks=[callback], strategy={"class_path": "SingleDeviceStrategy"})
    cli = LightningCLI(Model, Data, run=False, args=["--config", path])
    (found,) = [c for c in cli.trainer.callbacks if isinstance(c, RematCallback)]
    assert found.remat.offload == Offload("disk", min_bytes=4096)


def test_a_place_that_cannot_work_is_named(tmp_path: Path) -> None:
    """Before anything runs, in our words."""
    path = written(tmp_path, strategy=strategy(offload={"to": "disk", "host_budget": "3GiB"}))
    with pytest.raises(ValueError, match="host_budget='3GiB' and to='disk' contradict each other"):
        run("--config", path)


def test_a_wrong_option_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run("--config", written(tmp_path, strategy=strategy(polcy="full")))
    assert "polcy" in capsys.readouterr().err
