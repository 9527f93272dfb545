"""What users see of recomputation: metrics, the progress bar, the summary, a warning. Their results stay as is."""

import csv
import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import RichProgressBar, TQDMProgressBar
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor

from lightning_remat import Offload, Remat, RematCallback, RematStrategy
from lightning_remat.integrations.monitor import Monitor
from tests.helpers.training import Lit, Net, Result, regression, regression_data, train, trainer_for

WAYS = pytest.mark.parametrize("way", ["strategy", "callback"])
SCARCE = 95_000
RARELY = {"remat/evictions", "remat/evicted_bytes", "remat/out_of_memory", "remat/retries", "remat/retried_batches"}


def lit() -> Lit:
    return Lit(Net(), regression)


class Validated(Lit):
    def validation_step(self, batch: Any, index: int) -> None:
        self.log("val_loss", regression(self.net, batch))


class Failing(Lit):
    """Breaks off in its third step."""

    def training_step(self, batch: Any, index: int) -> Tensor:
        if self.steps_run == 2:
            raise ValueError("broken off")
        return super().training_step(batch, index)


def trained(way: str, make: Callable[[], Any] = lit, batches: int = 6, rows: int = 6, **options: Any) -> Result:
    """A training; its `trainer.remat` is the engine, whichever way it came in."""
    names = ("policy", "budget", "blocks", "offload", "verify", "verify_every_n_steps")
    ours = {name: options.pop(name) for name in names if name in options}
    callbacks: list[Callback] = options.pop("callbacks", [])
    data = regression_data(batches, rows)
    if way == "plain":
        return train(make, data, callbacks=lambda: callbacks, **options)
    if way == "strategy":
        strategy = RematStrategy(**ours)
        result = train(make, data, strategy=strategy, callbacks=lambda: callbacks, **options)
        result.trainer.remat = strategy.remat
        return result
    callback = RematCallback(**ours)
    result = train(make, data, callbacks=lambda: [*callbacks, callback], **options)
    result.trainer.remat = callback.remat
    return result


def rows_of(path: Path) -> list[dict[str, str]]:
    (file,) = path.rglob("metrics.csv")
    with file.open() as lines:
        return [{name: value for name, value in row.items() if value} for row in csv.DictReader(lines)]


def split(rows: list[dict[str, str]]) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """The user's rows and ours."""
    ours = [row for row in rows if any(name.startswith("remat/") for name in row)]
    return [row for row in rows if row not in ours], ours


# ---------------------------------------------------------------------- metrics


@WAYS
@pytest.mark.parametrize("every", [1, 2, 5])
def test_csv(way: str, every: int, tmp_path: Path) -> None:
    """Rows of ours come at the steps at which Lightning writes; the user's rows are those of plain training."""
    fit = {"val_dataloaders": regression_data(2)}
    found = {}
    for name in ("plain", way):
        options: dict[str, Any] = {"policy": "full", "verify_every_n_steps": 2} if name != "plain" else {}
        logger = CSVLogger(tmp_path / name)
        result = trained(name, lambda: Validated(Net(), regression), logger=logger, log_every_n_steps=every,
                         fit_options=fit, max_epochs=2, **options)  # fmt: skip
        found[name] = (result, *split(rows_of(tmp_path / name)))
    plain, users, none = found["plain"]
    result, same_users, ours = found[way]
    assert none == []
    assert same_users == users
    assert result.difference(plain) == []
    assert set(result.trainer.callback_metrics) == set(plain.trainer.callback_metrics)
    assert set(result.trainer.logged_metrics) == set(plain.trainer.logged_metrics)
    in_steps = [row["step"] for row in users if "loss" in row]
    assert [row["step"] for row in ours] == in_steps
    expected = {"remat/recompute_ms", "remat/replayed_ops", "remat/verified", "remat/verified_different", *RARELY}
    for row in ours:
        assert set(row) == expected | {"step"}  # what is not known is not there
        assert float(row["remat/replayed_ops"]) > 0
    remat = result.trainer.remat
    verified = [float(row["remat/verified"]) for row in ours]
    assert verified == sorted(verified)
    assert remat.counters.verified >= verified[-1] > 0
    assert (remat.counters.verified == verified[-1]) == (every < 5)  # the last batches came after the last row
    assert float(ours[-1]["remat/verified_different"]) == 0


@WAYS
def test_offload_has_metrics_of_its_own(way: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Beside the others, in each row, and in the summary; what is trained is what plain training trains."""
    caplog.set_level(logging.INFO)
    plain = trained("plain")
    offload = Offload("disk", min_bytes=16, in_flight=1)  # nothing stays until its transfer is over
    result = trained(way, policy="full", offload=offload, logger=CSVLogger(tmp_path), log_every_n_steps=1)
    assert result.difference(plain) == []
    _, ours = split(rows_of(tmp_path))
    names = {"remat/offloaded_bytes", "remat/fetched_bytes", "remat/transfer_wait_seconds"}
    assert ours
    assert all(names <= set(row) for row in ours)
    counters = result.trainer.remat.counters
    out = [float(row["remat/offloaded_bytes"]) for row in ours]
    assert all(size > 0 for size in out)  # of each step by itself
    assert sum(out) == counters.bytes_out
    assert sum(float(row["remat/fetched_bytes"]) for row in ours) == counters.bytes_in == counters.bytes_out
    assert all(0 <= float(row["remat/transfer_hidden"]) <= 1 for row in ours)
    assert "moved" in caplog.text


@WAYS
def test_tensorboard(way: str, tmp_path: Path) -> None:
    """Under a budget, with predicted and measured peaks; without verification nothing is said of it."""
    logger = TensorBoardLogger(tmp_path)
    trained(way, budget=SCARCE, batches=8, rows=32, logger=logger, log_every_n_steps=1)
    events = EventAccumulator(logger.log_dir)
    events.Reload()
    scalars = {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    assert [step for step, _ in scalars["remat/replayed_ops"]] == list(range(8))
    assert [step for step, _ in scalars["loss"]] == list(range(8))
    assert {value for _, value in scalars["remat/budget_bytes"]} == {SCARCE}
    predicted, measured = scalars["remat/predicted_peak_bytes"][-1][1], scalars["remat/peak_bytes"][-1][1]
    assert abs(predicted - measured) < 0.02 * predicted
    assert scalars["remat/peak_bytes"][0][0] > 1  # nothing was measured before there was a plan
    assert "remat/verified" not in scalars


def test_accumulation_has_one_row_for_each_step_of_the_optimizer(tmp_path: Path) -> None:
    """As Lightning's own; the last is that of the batches that were left."""
    options: dict[str, Any] = {"accumulate_grad_batches": 4, "log_every_n_steps": 1, "batches": 6}
    trained("strategy", policy="full", logger=CSVLogger(tmp_path), **options)
    users, ours = split(rows_of(tmp_path))
    assert [row["step"] for row in ours] == [row["step"] for row in users] == ["0", "1"]


def test_counters_that_others_fill(tmp_path: Path) -> None:
    """Everything in the counters is logged under its name."""

    class Counting(Lit):
        def training_step(self, batch: Any, index: int) -> Tensor:
            counters = self.trainer.strategy.remat.counters
            counters.evictions += 2
            counters.evicted_bytes += 100
            counters.out_of_memory += 1
            counters.retries += 3
            counters.peak_bytes, counters.kept_bytes, counters.budget_bytes = 700 + index, 50, 1000
            return super().training_step(batch, index)

    options: dict[str, Any] = {"logger": CSVLogger(tmp_path), "log_every_n_steps": 1, "batches": 2}
    trained("strategy", lambda: Counting(Net(), regression), policy="full", **options)
    _, ours = split(rows_of(tmp_path))
    for i, row in enumerate(ours):
        values = {name.removeprefix("remat/"): float(value) for name, value in row.items()}
        assert values.items() >= {"evictions": 2.0 * (i + 1), "evicted_bytes": 100.0 * (i + 1)}.items()
        assert values.items() >= {"out_of_memory": i + 1.0, "retries": 3.0 * (i + 1)}.items()
        assert values.items() >= {"peak_bytes": 700.0 + i, "kept_bytes": 50.0, "budget_bytes": 1000.0}.items()


def test_nothing_is_logged_where_nothing_recomputes(tmp_path: Path) -> None:
    trained("strategy", policy="none", logger=CSVLogger(tmp_path), log_every_n_steps=1)
    assert split(rows_of(tmp_path))[1] == []


class Taking(Logger):
    """Keeps what it gets, or refuses what is ours."""

    def __init__(self, refuses: bool) -> None:
        super().__init__()
        self.refuses = refuses
        self.got: list[set[str]] = []

    @property
    def name(self) -> str:
        return "taking"

    @property
    def version(self) -> int:
        return 0

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        pass

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        if self.refuses and "remat/replayed_ops" in metrics:
            raise KeyError("no slashes, please")
        self.got.append(set(metrics))


def test_a_logger_that_refuses_ends_no_training() -> None:
    """It is said once, and other loggers and the user's metrics go on."""
    refusing, taking = Taking(True), Taking(False)
    with pytest.warns(UserWarning, match="Taking did not take the metrics of recomputation") as said:
        result = trained("strategy", policy="full", logger=[refusing, taking], log_every_n_steps=1)
    assert sum("did not take" in str(w.message) for w in said) == 1
    assert result.steps_run == 6
    assert sum("loss" in names for names in refusing.got) == 6
    assert sum("remat/replayed_ops" in names for names in taking.got) == 6


def test_other_ranks_write_nothing() -> None:
    remat, logger = Remat("full"), Taking(False)
    monitor = Monitor(remat)
    remat.counters.steps += 1
    for zero in (False, True):
        monitor._write(SimpleNamespace(is_global_zero=zero, loggers=[logger]), 0)
        assert bool(logger.got) == zero


# ---------------------------------------------------------------------- the progress bar


class Seen(Callback):
    """What the bar shows at the end of each batch."""

    def __init__(self) -> None:
        self.items: list[dict[str, Any]] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        self.items.append(trainer.progress_bar_callback.get_metrics(trainer, pl_module))


@WAYS
@pytest.mark.parametrize("kind", [TQDMProgressBar, RichProgressBar])
def test_the_bar_shows_the_peak(way: str, kind: type[Any], capsys: pytest.CaptureFixture[str]) -> None:
    """And is left as it was; the user's metrics are not touched."""
    bar, seen = kind(), Seen()
    options: dict[str, Any] = {"enable_progress_bar": True, "budget": SCARCE, "batches": 8, "rows": 32}
    result = trained(way, callbacks=[bar, seen], **options)
    shown = [items["remat"] for items in seen.items]
    assert any(text.startswith("~") for text in shown)  # predicted, until it has been measured
    assert shown[-1].endswith("KiB")
    assert not shown[-1].startswith("~")
    assert "get_metrics" not in vars(bar)
    assert set(result.trainer.progress_bar_metrics) == set()
    assert set(result.trainer.callback_metrics) == {"loss"}
    out = capsys.readouterr()
    assert f"remat={shown[-1]}" in (out.out + out.err).replace("remat: ", "remat=")


def test_the_bar_names_the_policy_where_no_peak_is_known() -> None:
    seen = Seen()
    trained("strategy", policy="full", callbacks=[TQDMProgressBar(), seen], enable_progress_bar=True)
    assert {items["remat"] for items in seen.items} == {"full"}


def test_the_user_has_the_name_first() -> None:
    class Mine(Lit):
        def training_step(self, batch: Any, index: int) -> Tensor:
            self.log("remat", 5.0, prog_bar=True)
            return super().training_step(batch, index)

    seen = Seen()
    make = lambda: Mine(Net(), regression)  # noqa: E731  # a name for what `train` takes
    trained("strategy", make, policy="full", callbacks=[TQDMProgressBar(), seen], enable_progress_bar=True)
    assert {items["remat"] for items in seen.items[1:]} == {5.0}


@WAYS
def test_the_bar_is_left_as_it_was_after_an_exception(way: str) -> None:
    bar = TQDMProgressBar()
    mine = lambda trainer, pl_module: {"mine": 1}  # noqa: E731  # an attribute of the instance, as users set it
    bar.get_metrics = mine
    with pytest.raises(ValueError, match="broken off"):
        trained(way, lambda: Failing(Net(), regression), policy="full", callbacks=[bar], enable_progress_bar=True)
    assert bar.get_metrics is mine


# ---------------------------------------------------------------------- the summary and the warning


def summaries(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.getMessage().startswith("Recomputation in this training")]


@WAYS
def test_the_summary(way: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "lightning.pytorch"):
        result = trained(way, budget=SCARCE, batches=8, rows=32, verify_every_n_steps=4)
    (text,) = summaries(caplog)
    assert "8 steps" in text
    assert "budget 92.8 KiB" in text
    assert "measured" in text
    assert "none differed" in text
    assert "memory ran out" not in text
    assert result.steps_run == 8


@WAYS
def test_the_summary_of_a_training_that_was_broken_off(way: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "lightning.pytorch"), pytest.raises(ValueError, match="broken off"):
        trained(way, lambda: Failing(Net(), regression), policy="full")
    (text,) = summaries(caplog)
    assert "2 steps" in text


@pytest.mark.parametrize("options", [{"policy": "none"}, {"policy": "full", "limit_train_batches": 0}])
def test_no_summary_of_nothing(options: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "lightning.pytorch"):
        trained("strategy", **options)
    assert summaries(caplog) == []


def test_each_fit_has_its_own_summary(caplog: pytest.LogCaptureFixture) -> None:
    strategy = RematStrategy(policy="full")
    trainer = trainer_for(strategy)
    with caplog.at_level(logging.INFO, "lightning.pytorch"):
        trainer.fit(lit(), regression_data(3))
        trainer.fit_loop.max_epochs = 2
        trainer.fit(lit(), regression_data(3))
        trainer.validate(Validated(Net(), regression), regression_data(1), verbose=False)
    assert ["3 steps" in text for text in summaries(caplog)] == [True, True]


def test_a_warning_when_batches_are_retried_again_and_again() -> None:
    """Once for many batches."""

    class Retried(Lit):
        def training_step(self, batch: Any, index: int) -> Tensor:
            if index >= 2:
                self.trainer.strategy.remat.counters.retried_batches += 1
            return super().training_step(batch, index)

    with pytest.warns(UserWarning, match=r"3 batches so far had to be run more than once.*policy='full'") as said:
        trained("strategy", lambda: Retried(Net(), regression), policy="selective", batches=20)
    assert sum("more than once" in str(w.message) for w in said) == 1


def test_results_are_those_of_plain_training(tmp_path: Path) -> None:
    """With everything that is shown, every bit is that of a training without us."""
    plain = trained("plain", batches=8, rows=32)
    ours = trained("strategy", budget=SCARCE, verify_every_n_steps=2, batches=8, rows=32, log_every_n_steps=1,
                   logger=CSVLogger(tmp_path), callbacks=[TQDMProgressBar()], enable_progress_bar=True)  # fmt: skip
    assert ours.difference(plain) == []


@WAYS
def test_the_other_package(way: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Trainer, logger and progress bar of `pytorch_lightning`."""

    class Other(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def training_step(self, batch: Any, index: int) -> Tensor:
            return regression(self.net, batch)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    trainer = pl.Trainer(
        accelerator="cpu", devices=1, max_epochs=1, enable_checkpointing=False, enable_model_summary=False,
        log_every_n_steps=1, logger=pl.loggers.CSVLogger(tmp_path),
        callbacks=[pl.callbacks.TQDMProgressBar(), *([RematCallback(policy="full")] if way == "callback" else [])],
        strategy="remat" if way == "strategy" else "auto",
    )  # fmt: skip
    trainer.fit(Other(), regression_data(3))
    assert [row["step"] for row in split(rows_of(tmp_path))[1]] == ["0", "1", "2"]
    out = capsys.readouterr()
    assert ("remat=full" if way == "callback" else "remat=~") in out.out + out.err
