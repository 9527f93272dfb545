"""What a training step changes in Lightning's loops, taken before it and put back when the batch is run again.

That is what was logged, what the loops count, and what the module notes on the way. Goes by what objects have and not
by their classes, so it serves `lightning.pytorch` and `pytorch_lightning` alike and imports neither.

Not covered: attributes of callbacks that count in hooks within the step (``on_before_backward`` and the like), and what
was sent to loggers directly.
"""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any

from torch import nn

from lightning_remat.errors import RestoreError
from lightning_remat.runtime.recovery.snapshot_parts.attributes import Attributes

_MODULE = ("_current_fx_name", "_param_requires_grad_state", "_metric_attributes")
_CONNECTOR = ("_current_fx", "_first_loop_iter", "_progress_bar_metrics", "_logged_metrics", "_callback_metrics")
_CONSTANT = (int, float, bool, str, type(None))


class LoopState:
    """State of a trainer's loops before a step.

    Args:
        trainer: the trainer; its fit loop must be running when the state is taken.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._values: list[tuple[Any, dict[str, Any]]] = []
        self._dicts: list[tuple[dict[Any, Any], dict[Any, Any]]] = []
        self._metrics: Attributes | None = None
        self._known: list[nn.Module] = []
        self._counting: list[tuple[Any, tuple[str, ...]]] = []  # loops and their counters, with what is noted of each
        self._links: list[tuple[dict[str, Any], str, Any]] = []  # by which they hang together
        self._sizes: list[tuple[dict[str, Any], int]] = []

    def take(self) -> None:
        """Note the present state."""
        trainer = self._trainer
        self._dicts = []
        epoch_loop = trainer.fit_loop.epoch_loop
        if not self._counting or not self._is_laid_out():
            self._lay_out(
                (trainer.fit_loop, epoch_loop, epoch_loop.automatic_optimization, epoch_loop.manual_optimization)
            )
        self._values = [(held, {n: held.__dict__[n] for n in names}) for held, names in self._counting]
        self._note(epoch_loop.manual_optimization, ("_output",))
        self._note(trainer, ("should_stop",))
        connector = trainer._logger_connector
        self._note(connector, _CONNECTOR)
        for name in _CONNECTOR:
            self._dict(getattr(connector, name, None))
        if trainer.lightning_module is not None:
            self._note(trainer.lightning_module, _MODULE)
            self._dict(trainer.lightning_module._param_requires_grad_state)
        # A failure between start and stop of an action would leave it running, and then it cannot be started again.
        self._dict(getattr(trainer.profiler, "current_actions", None))
        self._results(epoch_loop._results)

    def why_not(self) -> str | None:
        """Why :meth:`restore` would refuse, or None."""
        return None if self._metrics is None else self._metrics.why_not()

    def restore(self, *, leave: frozenset[str] = frozenset()) -> None:
        """Put everything back; can be repeated after each try.

        Raises:
            RestoreError: a logged metric cannot be put back. Nothing was.
        """
        if (reason := self.why_not()) is not None:
            raise RestoreError(f"The step cannot be run again: {reason}.")
        for held, values in self._values:
            for name, value in values.items():
                if held.__dict__.get(name) is not value:
                    held.__dict__[name] = value
        for present, before in self._dicts:
            dict.clear(present)
            dict.update(present, before)
        if self._metrics is not None:
            self._metrics.restore()

    def release(self) -> None:
        """Let go of what was noted."""
        self._values, self._dicts = [], []
        if self._metrics is not None:
            self._metrics.release()

    def _note(self, held: Any, names: tuple[str, ...]) -> None:
        """Which objects these attributes are."""
        self._values.append((held, {n: held.__dict__[n] for n in names if n in held.__dict__}))

    def _dict(self, held: Any) -> None:
        if isinstance(held, dict):
            self._dicts.append((held, dict(held)))

    def _is_laid_out(self) -> bool:
        """Whether the loops have the same attributes and counters as the last time."""
        return all(len(d) == n for d, n in self._sizes) and all(d.get(name) is v for d, name, v in self._links)

    def _lay_out(self, loops: tuple[Any, ...]) -> None:
        """Find the loops' own numbers, and their counters of progress."""
        self._counting, self._links, self._sizes = [], [], []
        for loop in loops:
            self._sizes.append((loop.__dict__, len(loop.__dict__)))
            self._counting.append((loop, tuple(n for n, v in loop.__dict__.items() if isinstance(v, _CONSTANT))))
            for name, value in loop.__dict__.items():
                if is_dataclass(value) and not isinstance(value, type):
                    self._progress(loop, name, value)

    def _progress(self, parent: Any, name: str, progress: Any) -> None:
        self._links.append((parent.__dict__, name, progress))
        self._counting.append((progress, tuple(progress.__dict__)))
        for field in fields(progress):
            inner = getattr(progress, field.name)
            if is_dataclass(inner) and not isinstance(inner, type):
                self._progress(progress, field.name, inner)

    def _results(self, results: Any) -> None:
        """What was logged: which keys, and the state of each; also metrics of the user's that were logged as such."""
        self._dict(results)
        self._note(results, ("batch", "batch_size", "dataloader_idx"))
        modules: dict[int, nn.Module] = {}
        for metric in results.values():
            modules[id(metric)] = metric
            value = metric.__dict__.get("value")
            if isinstance(value, nn.Module):  # also found from the model, if it is a part of that
                modules.update((id(m), m) for m in value.modules())
        found = list(modules.values())
        anew = len(found) != len(self._known) or any(a is not b for a, b in zip(found, self._known, strict=True))
        if self._metrics is None:
            self._metrics = Attributes()
        self._known = found
        names = [f"the logged {getattr(getattr(m, 'meta', None), 'name', type(m).__name__)}" for m in found]
        self._metrics.take(found, names, anew=anew)
