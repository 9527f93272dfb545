"""The model, the data and the optimizer that a LightningCLI configuration names, without the trainer it names."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from torch import nn

from lightning_remat.errors import ConfigurationError
from lightning_remat.integrations.bases import NAMESPACES
from lightning_remat.runtime.target import shown


class Configured:
    """What a configuration file names.

    Attributes:
        module: the model.
        data: the data module, or None.
        optimizer: ``(class, options)`` of an optimizer that the file names, or None.
        precision: the trainer's, or None.
    """

    def __init__(self, path: str) -> None:
        """Read and build.

        Raises:
            ConfigurationError: the file cannot be read, names no model by ``class_path``, or something in it cannot be
                built.
        """
        self.path = path
        content = self._read()
        self.module: nn.Module = self._built("model", nn.Module, content)
        self.data: Any = self._built("data", _data_modules(), content) if content.get("data") else None
        self.optimizer = self._optimizer(content.get("optimizer"))
        trainer = content.get("trainer")
        precision = trainer.get("precision") if isinstance(trainer, dict) else None
        self.precision = None if precision is None else str(precision)

    def _read(self) -> dict[str, Any]:
        try:
            import yaml  # type: ignore[import-untyped]  # it has no types of its own
        except ModuleNotFoundError as error:
            raise self._no_parser() from error
        try:
            content = yaml.safe_load(Path(self.path).read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigurationError(f"--config={self.path!r} cannot be read: {error.strerror}.") from error
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise ConfigurationError(f"--config={self.path!r} is not YAML: {error}.") from error
        if isinstance(content, dict) and isinstance(content.get("fit"), dict):
            content = content["fit"]  # a file with subcommands
        if not isinstance(content, dict) or not isinstance(content.get("model"), dict):
            raise ConfigurationError(f"--config={self.path!r} has no 'model:' section.")
        if "class_path" not in content["model"]:
            raise ConfigurationError(
                f"--config={self.path!r}: 'model:' does not say which class it is for (class_path), as it is when a "
                "script gives LightningCLI its class. Give model: {class_path: package.module.Name, init_args: ...}."
            )
        return content

    def _built(self, key: str, base: Any, content: dict[str, Any]) -> Any:
        """An object by the parser that LightningCLI uses: types are checked, nested classes built."""
        try:
            import jsonargparse
        except ModuleNotFoundError as error:
            raise self._no_parser() from error
        section = content[key]
        if not isinstance(section, dict) or "class_path" not in section:
            raise ConfigurationError(
                f"--config={self.path!r}: '{key}:' does not say which class it is for (class_path); give it, or leave "
                "the section out."
            )
        parser = jsonargparse.ArgumentParser(exit_on_error=False)
        parser.add_subclass_arguments(base, key, required=True)
        try:
            parsed = parser.parse_object({key: section})
            build = getattr(parser, "instantiate", None) or parser.instantiate_classes  # renamed in 4.49
            return build(parsed)[key]
        except Exception as error:
            text = shown(error) if not isinstance(error, jsonargparse.ArgumentError) else str(error).strip()
            raise ConfigurationError(f"--config={self.path!r}: '{key}:' cannot be built: {text}") from error

    def _optimizer(self, section: Any) -> tuple[str, dict[str, Any]] | None:
        if not isinstance(section, dict) or "class_path" not in section:
            return None
        return str(section["class_path"]), dict(section.get("init_args") or {})

    def _no_parser(self) -> ConfigurationError:
        return ConfigurationError(
            f"--config={self.path!r}: reading it takes what LightningCLI itself takes: pip install "
            "'jsonargparse[signatures]'. Or name the model: lightning-remat plan package.module:Name --batch ..."
        )


def _data_modules() -> tuple[type, ...]:
    found = []
    for namespace in NAMESPACES:
        try:
            found.append(importlib.import_module(namespace).LightningDataModule)
        except ModuleNotFoundError:
            continue
    return tuple(found)
