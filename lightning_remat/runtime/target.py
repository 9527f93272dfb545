"""What an estimate is about, found by name: a module, its batches, its step, its optimizers.

Everything that is assumed rather than known is said, in :attr:`Target.assumed`.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer
from torch.utils._pytree import tree_leaves, tree_map_only

from lightning_remat.errors import ConfigurationError
from lightning_remat.planning.fake.step import Step

MakeBatch = Callable[[int], Any]
"""Number of samples -> a batch of that many."""
MakeOptimizers = Callable[[nn.Module], "list[Optimizer]"]


@dataclass(frozen=True, kw_only=True)
class Target:
    """One model, as it is trained.

    Attributes:
        module: never run itself; estimates are made on copies.
        make_batch: see :data:`MakeBatch`.
        step: see :data:`~lightning_remat.planning.fake.step.Step`.
        make_optimizers: for the copy that it is given.
        assumed: sentences about what was not said.
    """

    module: nn.Module
    make_batch: MakeBatch
    step: Step
    make_optimizers: MakeOptimizers
    assumed: tuple[str, ...] = field(default=())


def named(option: str, text: str) -> Any:
    """The object that ``package.module:name`` names; the current folder counts as a place for modules.

    Args:
        option: the option that it was given to, for errors.
        text: what was given.

    Raises:
        ConfigurationError: it names nothing, with what is near.
    """
    place, separator, name = text.partition(":")
    if not separator or not place or not name:
        raise ConfigurationError(
            f"{option}={text!r}: give a module and a name in it, with a colon in between: 'package.module:Name'."
        )
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        module = importlib.import_module(place)
    except ModuleNotFoundError as error:
        raise ConfigurationError(
            f"{option}={text!r}: there is no module {error.name!r}. Run the command in the folder that holds it, or "
            "install it into this environment."
        ) from error
    except Exception as error:
        raise ConfigurationError(f"{option}={text!r}: importing {place!r} failed with {shown(error)}.") from error
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            near = difflib.get_close_matches(part, dir(found), n=3)
            hint = f" Near it: {', '.join(near)}." if near else ""
            raise ConfigurationError(f"{option}={text!r}: {place!r} has no {name!r}.{hint}")
        found = getattr(found, part)
    return found


def shown(error: BaseException) -> str:
    """An exception with the place in the user's code where it came up."""
    trace = error.__traceback__
    place = ""
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if "site-packages" not in file and "lightning_remat" not in file and not file.startswith("<"):
            place = f" (at {file}:{trace.tb_lineno})"
        trace = trace.tb_next
    text = str(error).strip().split("\n")[0]
    return f"{type(error).__name__}: {text}{place}"


def built(option: str, text: str, on_meta: bool) -> nn.Module:
    """The module that a name stands for: a module, or a class or function without arguments that makes one.

    Args:
        option: for errors.
        text: ``package.module:name``.
        on_meta: build it on the meta device, which takes no memory.

    Raises:
        ConfigurationError: it cannot be built, or is no module.
    """
    found = named(option, text)
    if not isinstance(found, nn.Module):
        if not callable(found):
            raise ConfigurationError(
                f"{option}={text!r} is of type {type(found).__name__}: name a module, or a class or function that "
                "makes one."
            )
        try:
            with torch.device("meta") if on_meta else nullcontext():
                found = found()
        except Exception as error:
            raise ConfigurationError(
                f"{option}={text!r}: calling it without arguments failed with {shown(error)}. Name a function that "
                "needs none and returns the module."
            ) from error
    if not isinstance(found, nn.Module):
        raise ConfigurationError(f"{option}={text!r} made a {type(found).__name__}, and an estimate needs a module.")
    if hasattr(found, "configure_model"):
        with torch.device("meta") if on_meta else nullcontext():
            found.configure_model()  # type: ignore[operator]  # Lightning's hook for large models
    return found


# ---------------------------------------------------------------------- batches


def batches_from(option: str, text: str) -> MakeBatch:
    """The user's function from a number of samples to a batch.

    Raises:
        ConfigurationError: it is no function; later, that it failed or made no tensors.
    """
    function = named(option, text)
    if not callable(function):
        raise ConfigurationError(
            f"{option}={text!r} is of type {type(function).__name__}: name a function of the batch size."
        )

    def make(count: int) -> Any:
        try:
            batch = function(count)
        except Exception as error:
            raise ConfigurationError(
                f"{option}={text!r}: called with {count} it failed with {shown(error)}."
            ) from error
        if not any(isinstance(leaf, Tensor) for leaf in tree_leaves(batch)):
            raise ConfigurationError(f"{option}={text!r}: called with {count} it returned no tensor.")
        return batch

    return make


def batches_like(example: Any) -> MakeBatch:
    """Batches made by repeating an example along the first dimension of each of its tensors."""

    def make(count: int) -> Any:
        def repeated(tensor: Tensor) -> Tensor:
            return tensor[torch.arange(count) % len(tensor)] if tensor.ndim else tensor

        return tree_map_only(Tensor, repeated, example)

    return make


def batches_of(loader: Any) -> MakeBatch:
    """Batches of any size out of a data loader's samples, put together by its own ``collate_fn``.

    Raises:
        ConfigurationError: it has neither samples nor a way to put them together.
    """
    if isinstance(loader, (list, tuple)) and loader:
        loader = loader[0]
    collate, samples = getattr(loader, "collate_fn", None), getattr(loader, "dataset", None)
    unbatched = getattr(loader, "batch_size", 1) is None  # samples that are batches already
    if collate is None or samples is None or unbatched:
        raise ConfigurationError(
            f"the training data ({type(loader).__name__}) is no DataLoader whose samples could be put together to "
            "batches of any size: give --batch."
        )
    drawn: list[Any] = []

    def make(count: int) -> Any:
        try:
            if hasattr(samples, "__getitem__") and hasattr(samples, "__len__"):
                return collate([samples[i % len(samples)] for i in range(count)])
            stream = iter(samples)
            while len(drawn) < count:
                drawn.append(next(stream))
            return collate(drawn[:count])
        except Exception as error:
            raise ConfigurationError(
                f"a batch of {count} could not be made from the training data: {shown(error)}. Give --batch."
            ) from error

    return make


# ---------------------------------------------------------------------- steps


def training_step_of(module: nn.Module) -> Step | None:
    """A LightningModule's own step, which returns its loss; None for other modules.

    Raises:
        ConfigurationError: manual optimization, where the step itself runs backward.
    """
    own = getattr(type(module), "training_step", None)
    if own is None or own.__module__.startswith(("lightning.pytorch.", "pytorch_lightning.")):
        return None
    if not getattr(module, "automatic_optimization", True):
        raise ConfigurationError(
            f"{type(module).__name__} optimizes by hand (automatic_optimization=False): an estimate needs a step that "
            "returns the loss. Give one with --step."
        )
    count = len(inspect.signature(own).parameters) - 1

    def step(copy: nn.Module, batch: Any) -> Any:
        out = copy.training_step(batch, 0) if count > 1 else copy.training_step(batch)  # type: ignore[operator]  # Lightning's
        return out["loss"] if isinstance(out, Mapping) else out

    return step


def forward_step(module: nn.Module, batch: Any) -> Any:
    """Call a module on a batch and find a loss in what it returns: ``loss``, a single number, or the sum of it all."""
    if isinstance(batch, Mapping):
        out = module(**batch)
    elif isinstance(batch, (tuple, list)):
        out = module(*batch)
    else:
        out = module(batch)
    loss = out.get("loss") if isinstance(out, Mapping) else getattr(out, "loss", None)
    if isinstance(loss, Tensor):
        return loss
    if isinstance(out, Tensor) and out.numel() == 1:
        return out
    leaves = tree_leaves(dict(out) if isinstance(out, Mapping) else out)
    parts = [leaf.float().sum() for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]
    return sum(parts) if parts else None


# ---------------------------------------------------------------------- optimizers

_SGD = {"sgd": {}, "sgd-momentum": {"momentum": 0.9}}


def optimizers_named(name: str) -> MakeOptimizers:
    """One optimizer of ``torch.optim`` over all parameters, by its name in any case; ``none`` for none.

    Raises:
        ConfigurationError: there is no such optimizer, with what is near.
    """
    known = {
        attribute.lower(): value
        for attribute, value in vars(torch.optim).items()
        if isinstance(value, type) and issubclass(value, Optimizer) and value is not Optimizer
    }
    wanted = name.lower()
    if wanted == "none":
        return lambda module: []
    if wanted not in known and wanted not in _SGD:
        near = difflib.get_close_matches(wanted, [*known, *_SGD], n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(near)}? " if near else ""
        raise ConfigurationError(
            f"--optimizer={name!r} is unknown; {hint}Give none, sgd-momentum or a class of torch.optim: "
            f"{', '.join(sorted(known))}."
        )
    make: Any = known.get(wanted, torch.optim.SGD)
    options: dict[str, Any] = {"lr": 1e-3, **_SGD.get(wanted, {})}
    return lambda module: [make([p for p in module.parameters() if p.requires_grad], **options)]


def optimizers_of(module: nn.Module) -> list[Optimizer]:
    """What a LightningModule's ``configure_optimizers`` makes; none if it makes none.

    Raises:
        ConfigurationError: it failed.
    """
    configure = getattr(module, "configure_optimizers", None)
    if configure is None:
        return []
    try:
        found = configure()
    except Exception as error:
        raise ConfigurationError(
            f"configure_optimizers failed in the estimate with {shown(error)}. Say what it makes with --optimizer."
        ) from error
    return list({id(o): o for o in _optimizers_in(found)}.values())


def _optimizers_in(value: Any) -> list[Optimizer]:
    if isinstance(value, Optimizer):
        return [value]
    if isinstance(value, Mapping):
        return _optimizers_in(value.get("optimizer"))
    if isinstance(value, (tuple, list)):
        return [optimizer for entry in value for optimizer in _optimizers_in(entry)]
    return []
