"""``lightning-remat plan``: does a model fit, under which plan, at which price, with which batch. Needs no GPU."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import typer
from rich.console import Console
from torch import nn

from lightning_remat.errors import ConfigurationError
from lightning_remat.integrations.config import Configured
from lightning_remat.reporting.estimate_report import answer, fits_table, one_answer, static_sentence
from lightning_remat.runtime.estimate import MARGIN, Estimator, Fit
from lightning_remat.runtime.target import (
    MakeOptimizers,
    Target,
    batches_from,
    batches_like,
    batches_of,
    built,
    forward_step,
    named,
    optimizers_named,
    optimizers_of,
    training_step_of,
)
from lightning_remat.sizes import format_bytes, parse_budget

EPILOG = (
    "Example: lightning-remat plan mypackage.model:make_model --batch mypackage.data:make_batch --memory 24GiB. "
    "make_batch(n) returns a batch of n samples, as training_step or forward takes it."
)


def plan(
    target: Annotated[
        str | None,
        typer.Argument(
            metavar="MODULE:NAME", help="A module, or a class or function without arguments that makes one."
        ),
    ] = None,
    memory: Annotated[str, typer.Option(help="Memory of the device: bytes, or a size such as 24GiB.")] = "",
    batch: Annotated[
        str | None,
        typer.Option(metavar="MODULE:NAME", help="A function from a number of samples to a batch of that many."),
    ] = None,
    config: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="A LightningCLI configuration with model: and data:, instead of a name."),
    ] = None,
    step: Annotated[
        str | None,
        typer.Option(
            metavar="MODULE:NAME", help="A function of module and batch that returns the loss; else training_step."
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="cuda or cpu; it need not be there.")] = "cuda",
    precision: Annotated[
        str | None, typer.Option(help="As in Trainer(precision=): 32-true, bf16-mixed, 16-mixed, bf16-true, 16-true.")
    ] = None,
    optimizer: Annotated[
        str | None, typer.Option(help="adamw, sgd, ... (torch.optim) or none; else what configure_optimizers makes.")
    ] = None,
    batch_size: Annotated[int | None, typer.Option(min=1, help="Ask about this batch size only.")] = None,
    most: Annotated[int, typer.Option(min=1, help="The largest batch size to look at.")] = 1024,
    margin: Annotated[
        float, typer.Option(min=0, max=0.9, help="Share of the memory to leave free for what an estimate cannot see.")
    ] = MARGIN,
    meta: Annotated[bool, typer.Option("--meta", help="Build the module on the meta device, without memory.")] = False,
) -> None:
    """Print whether it fits."""
    console = Console()
    try:
        size = _memory(memory)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the user's code, out of its trainer
            asked = _Asked(target, config, batch, step, optimizer, precision, meta)
            with console.status("estimating ..."):  # shown on terminals only
                estimator = Estimator(asked.target, int(size * (1 - margin)), device, asked.precision)
                rows, words = _answers(estimator, batch_size, most)
            _print(console, estimator, asked, rows, words, f"{format_bytes(size)} ({margin:.0%} left free)")
    except ConfigurationError as error:
        typer.echo(f"lightning-remat plan: {error}", err=True)
        raise typer.Exit(2) from error


def _answers(estimator: Estimator, batch_size: int | None, most: int) -> tuple[list[Fit], str]:
    """The table's rows, and the answer in words."""
    budget = estimator.budget
    if batch_size is not None:
        rows = [estimator.at(batch_size)]
        return rows, one_answer(rows[0], budget)
    rows = estimator.table(most)
    plain, planned = (estimator.largest(rows, most, under_plan) for under_plan in (False, True))
    rows += [estimator.at(n) for n in {plain, planned} - {row.batch_size for row in rows} if n]
    return rows, answer(rows, budget, estimator.static, plain, planned, most)


def _print(console: Console, estimator: Estimator, asked: _Asked, rows: list[Fit], words: str, room: str) -> None:
    title = f"{type(asked.target.module).__name__} on {estimator.device}, {estimator.precision}: "
    console.print(fits_table(rows, estimator.budget, f"{title}{format_bytes(estimator.budget)} of {room}"))
    for sentence in (words, static_sentence(estimator.static), *asked.assumptions(estimator)):
        console.print(sentence, soft_wrap=True, markup=False, highlight=False)


def _memory(text: str) -> int:
    if not text:
        raise ConfigurationError("--memory is missing: say how much the device has, such as --memory 24GiB.")
    try:
        size = parse_budget(text)
    except ConfigurationError as error:
        raise ConfigurationError(
            f"--memory={text!r} is not a size: give bytes (24000000000) or a size ('24GiB', '500MiB')."
        ) from error
    if not isinstance(size, int):
        raise ConfigurationError(f"--memory={text!r}: a share of which device? Give a size, such as 24GiB.")
    return size


@dataclass(init=False)
class _Asked:
    """What the options amount to."""

    target: Target
    precision: str

    def __init__(
        self,
        name: str | None,
        config: str | None,
        batch: str | None,
        step: str | None,
        optimizer: str | None,
        precision: str | None,
        meta: bool,
    ) -> None:
        if (name is None) == (config is None):
            raise ConfigurationError(
                "name the model either as package.module:Name or by --config, "
                + ("not both." if name is not None else "such as: lightning-remat plan mypackage.model:make_model ...")
            )
        configured = Configured(config) if config is not None else None
        module = configured.module if configured is not None else built("MODULE:NAME", name or "", meta)
        self.assumed: list[str] = []
        self.precision = precision or (configured.precision if configured is not None else None) or "32-true"
        make_batch, of_forward = self._batches(module, batch, configured)
        self.target = Target(
            module=module,
            make_batch=make_batch,
            step=self._step(module, step, of_forward),
            make_optimizers=self._optimizers(module, optimizer, configured),
        )

    def assumptions(self, estimator: Estimator) -> list[str]:
        """Sentences about what was not said."""
        names = ", ".join(estimator.static.optimizers) or "none"
        found = [*self.assumed, f"optimizer {names}, as {self.optimizer_from}.", *_ALWAYS[estimator.device]]
        return [f"Assumed: {sentence}" for sentence in found]

    def _batches(
        self, module: nn.Module, batch: str | None, configured: Configured | None
    ) -> tuple[Callable[[int], Any], bool]:
        """How to make batches, and whether they are what ``forward`` takes rather than ``training_step``."""
        if batch is not None:
            return batches_from("--batch", batch), False
        data = configured.data if configured is not None else None
        own = getattr(type(module), "train_dataloader", None)
        if data is not None:
            data.prepare_data()
            data.setup("fit")
            self.assumed.append(f"samples from {type(data).__name__}.train_dataloader.")
            return batches_of(data.train_dataloader()), False
        if own is not None and not own.__module__.startswith(("lightning.", "pytorch_lightning.")):
            self.assumed.append("samples from the module's train_dataloader.")
            return batches_of(module.train_dataloader()), False  # type: ignore[operator]  # Lightning's hook
        example = getattr(module, "example_input_array", None)
        if example is not None:
            self.assumed.append("batches like example_input_array, and a loss that is the sum of what forward returns.")
            return batches_like(example), True
        raise ConfigurationError(
            f"there is nothing to make a batch of: give --batch package.module:function, a function from a number of "
            f"samples to a batch (or set example_input_array in {type(module).__name__})."
        )

    def _step(self, module: nn.Module, step: str | None, of_forward: bool) -> Any:
        if step is not None:
            function = named("--step", step)
            if not callable(function):
                raise ConfigurationError(
                    f"--step={step!r} is of type {type(function).__name__}: name a function of module and batch."
                )
            return function
        own = None if of_forward else training_step_of(module)
        if own is None and not of_forward:
            self.assumed.append("a loss as forward returns it: 'loss', a single number, or else the sum of everything.")
        return own or forward_step

    def _optimizers(self, module: nn.Module, name: str | None, configured: Configured | None) -> MakeOptimizers:
        if name is not None:
            self.optimizer_from = "--optimizer says"
            return optimizers_named(name)
        if configured is not None and configured.optimizer is not None:
            self.optimizer_from = "the configuration says"
            return _configured_optimizer(*configured.optimizer)
        own = getattr(type(module), "configure_optimizers", None)
        if own is not None and not own.__module__.startswith(("lightning.", "pytorch_lightning.")):
            self.optimizer_from = "configure_optimizers says"
            return optimizers_of
        self.optimizer_from = "nothing else was said (--optimizer)"
        return optimizers_named("adamw")


def _configured_optimizer(path: str, options: dict[str, Any]) -> MakeOptimizers:
    place, _, name = path.rpartition(".")
    try:
        make = getattr(importlib.import_module(place), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigurationError(f"--config: there is no optimizer {path!r} (optimizer: class_path).") from error
    return lambda module: [make([p for p in module.parameters() if p.requires_grad], **options)]


_ALWAYS = {
    "cuda": [
        "one process; kernels as PyTorch chooses them on CUDA; workspaces of cuBLAS and cuDNN, fragmentation and the "
        "CUDA context are in what is left free. Times are of a typical data-centre GPU."
    ],
    "cpu": ["one process. Times are of a few typical cores."],
}
