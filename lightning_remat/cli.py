"""The command line: finds what was asked for and hands over. Nothing is computed here."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Annotated

import typer

from lightning_remat import io_command, plan_command, quiz_command
from lightning_remat.__about__ import __version__
from lightning_remat.shipped import shipped_folder

# Help texts here are plain: no shell completion is installed, and square brackets in them mean what they say.
app = typer.Typer(
    name="lightning-remat",
    help="Activation recomputation for PyTorch Lightning: less memory, the same results bit for bit.",
    no_args_is_help=True,
    add_completion=False,
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"lightning-remat {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    """Options that stand before a command."""


@app.command(
    # The demo has its own options and its own --help; they are passed on as they are.
    add_help_option=False,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    help="Train a small GPT under several policies and compare memory, time and results. See: demo --help",
)
def demo(context: typer.Context) -> None:
    """Run ``examples/demo_gpt.py`` with the remaining arguments."""
    run: typer.Typer = load_example("demo_gpt").app
    run(args=context.args, prog_name=context.command_path)


app.command(
    epilog=plan_command.EPILOG,
    help="Say without a GPU whether a model fits into so much memory, under which plan, at which price in time, and "
    "with which batch size. Everything it says is an estimate.",
)(plan_command.plan)

app.command(
    name="bench-io",
    epilog=io_command.EPILOG,
    help="Measure how fast a disk, or host memory, takes activations that leave the device and gives them back, and "
    "what that costs in processor time: by this, offload= is worth its while or not. Writes --size bytes to a file "
    "without a name, which is gone when the command ends.",
)(io_command.bench_io)

app.add_typer(quiz_command.app, name="quiz")


def load_example(name: str) -> ModuleType:
    """Import ``name.py`` from the examples, which import one another by their plain names, as scripts do."""
    folder = str(shipped_folder("examples", holds="demo_gpt.py"))
    if folder not in sys.path:
        sys.path.insert(0, folder)
    return importlib.import_module(name)
