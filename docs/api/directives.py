"""Two directives: what the commands of a typer application say of themselves, and the tree at the head of errors.py."""

from __future__ import annotations

import importlib
from typing import Any

import typer
from docutils import nodes
from docutils.parsers.rst import Directive
from typer.testing import CliRunner


class CommandLine(Directive):
    """``.. command-line:: module:app``: what ``--help`` shows, of the application and of each command."""

    required_arguments = 1
    has_content = False

    def run(self) -> list[nodes.Node]:
        """Make a section for each."""
        module, _, attribute = self.arguments[0].partition(":")
        app: typer.Typer = getattr(importlib.import_module(module), attribute)
        root: Any = typer.main.get_command(app)
        shown = [nodes.literal_block("", help_of(app, []), language="text")]
        for name, command in root.commands.items():
            if command.hidden:
                continue
            full = f"{root.name} {name}"
            section = nodes.section(ids=[nodes.make_id(full)], names=[nodes.fully_normalize_name(full)])
            section += nodes.title("", "", nodes.literal("", full))
            section += nodes.literal_block("", help_of(app, [name]), language="text")
            self.state.document.note_implicit_target(section)
            shown.append(section)
        return shown


def help_of(app: typer.Typer, command: list[str]) -> str:
    """What a command says of itself, in 88 columns without colours."""
    result = CliRunner().invoke(app, [*command, "--help"], env={"COLUMNS": "88", "NO_COLOR": "1", "TERM": "dumb"})
    if result.exit_code:
        raise RuntimeError(f"{command} --help: {result.output}")
    return "\n".join(line.rstrip() for line in result.output.splitlines()).strip("\n")


class ErrorTree(Directive):
    """``.. error-tree:: module``: the rest of a module's docstring after its first line, as it stands."""

    required_arguments = 1
    has_content = False

    def run(self) -> list[nodes.Node]:
        """Make the block."""
        documentation = importlib.import_module(self.arguments[0]).__doc__ or ""
        tree = documentation.partition("\n")[2].strip()
        return [nodes.literal_block(tree, tree, language="text")]


def setup(app: Any) -> dict[str, bool]:
    """Make the directives known."""
    app.add_directive("command-line", CommandLine)
    app.add_directive("error-tree", ErrorTree)
    return {"parallel_read_safe": True}
