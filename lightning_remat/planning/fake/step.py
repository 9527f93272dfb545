"""A trace of a training step that never ran: forward, loss and backward on tensors without content.

Fake tensors (``torch._subclasses``) have shapes, dtypes and storages with sizes, and no memory. A step on them runs the
user's Python and autograd as they are, in a fraction of a second, on no device; what is written down is what
:mod:`~lightning_remat.planning.fake.meter` sees.

They always live on the CPU. A step for another device runs there as well, with that device's choice of kernels put in
place (:mod:`~lightning_remat.planning.fake.emulation`): PyTorch without CUDA, as on a laptop, cannot run autograd on
fake CUDA tensors (torch 2.13 ends the process).

Known weaknesses: control flow that depends on activations is refused, as the content is not there; memory that does not
come from ops (workspaces of cuBLAS and cuDNN, fragmentation, what libraries allocate by themselves) is not seen.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_map_only

from lightning_remat.engine.blocks import find_blocks
from lightning_remat.engine.ledger import ModuleStack
from lightning_remat.errors import ConfigurationError
from lightning_remat.planning.fake.emulation import kernels_of
from lightning_remat.planning.fake.known import is_known
from lightning_remat.planning.fake.meter import Meter
from lightning_remat.planning.trace import Trace

_T = TypeVar("_T")
Step = Callable[[nn.Module, Any], Any]
"""(module, batch) -> loss, a tensor with one element."""


def fake_mode() -> FakeTensorMode:
    """A mode for one step; tensors that the program made beforehand may come in."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def fake_module(mode: FakeTensorMode, module: nn.Module, dtype: torch.dtype | None = None) -> nn.Module:
    """A copy of a module whose parameters and buffers are fake; small buffers of whole numbers are copied.

    The module itself is only read. It may be on any device, ``meta`` included.

    Args:
        mode: of the step.
        module: what to copy.
        dtype: of all floating point parameters and buffers of the copy; None: as they are.

    Raises:
        ConfigurationError: it has lazy parameters, or cannot be copied.
    """
    memo: dict[int, Any] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if is_lazy(parameter):
            raise ConfigurationError(
                f"the parameter {name!r} has no shape yet (a lazy module): run the model once on a real batch first."
            )
        if id(parameter) not in memo:
            memo[id(parameter)] = nn.Parameter(_fake(mode, parameter, dtype), parameter.requires_grad)
    for buffer in module.buffers():
        memo[id(buffer)] = _stand_in(mode, buffer, dtype)
    try:
        return copy.deepcopy(module, memo)
    except Exception as error:
        raise ConfigurationError(
            f"{type(module).__name__} cannot be copied ({error}), and an estimate works on a copy: remove what "
            "copy.deepcopy does not like (an open file, a tensor with a history), or give a factory that builds the "
            "module without it."
        ) from error


def fake_batch(mode: FakeTensorMode, batch: _T, dtype: torch.dtype | None = None) -> _T:
    """A batch (tensors in any nesting) with fake tensors; small ones of whole numbers are copied.

    ``dtype`` is that of all floating point tensors in it; None: as they are.
    """
    made: _T = tree_map_only(Tensor, lambda tensor: _stand_in(mode, tensor, dtype), batch)
    return made


def _stand_in(mode: FakeTensorMode, tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    return tensor.detach().cpu().clone() if is_known(tensor) else _fake(mode, tensor, dtype)


def _fake(mode: FakeTensorMode, tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    if dtype is None or not tensor.is_floating_point():
        dtype = tensor.dtype
    with mode:
        if tensor.layout is torch.strided:
            return torch.empty_strided(tensor.size(), tensor.stride(), dtype=dtype, device="cpu")
    return mode.from_tensor(tensor, static_shapes=True)


def fake_trace(step: Step, model: nn.Module, batch: Any, device: str = "cpu") -> Trace:
    """Trace one training step without running it.

    Args:
        step: what computes the loss. It runs once, on copies, in the mode that the model is in.
        model: the module; parameters may be on any device, ``meta`` included. It is not changed.
        batch: what the step is given; tensors in any nesting, on any device.
        device: type of the device that the step is meant for, such as ``"cuda"``; it need not be there.

    Returns:
        A trace whose gradients, like those of the first backward after ``zero_grad()``, come into being in the step.

    Raises:
        ConfigurationError: the step asks for the content of an activation, or does not return a loss.
    """
    mode = fake_mode()
    return trace_of(step, fake_module(mode, model), fake_batch(mode, batch), mode, device)


def trace_of(step: Step, model: nn.Module, batch: Any, mode: FakeTensorMode, device: str = "cpu") -> Trace:
    """:func:`fake_trace` for a module and a batch that are fake already; gradients stay on the module.

    Raises:
        ConfigurationError: as above.
    """
    modules = ModuleStack()
    modules.name(model)
    meter = Meter(device, lambda: modules.current)
    for tensor in (*model.parameters(), *model.buffers()):
        meter.outside(tensor)
    tree_map_only(Tensor, meter.outside, batch)
    with torch.random.fork_rng(devices=[]), kernels_of(device), mode, torch.enable_grad(), modules.watching():
        try:
            with meter.hooks, meter:
                loss = step(model, batch)
                if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
                    raise ConfigurationError(
                        f"the step returned {_shown(loss)}, and a trace needs a loss: one number that requires a "
                        "gradient."
                    )
                meter.leave_step()
                loss.backward()  # type: ignore[no-untyped-call]  # torch's
                del loss
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise ConfigurationError(
                f"the step asks for the content of a tensor that has none in an estimate ({error.func}, in "
                f"module {meter.where!r}). What depends on whole numbers of the batch is answered; what "
                "depends on activations or other floating point numbers is not: switch that part off for the estimate."
            ) from error
    trace = meter.close()
    trace.borders = _borders(trace, model)
    return trace


def _shown(value: object) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"


def _borders(trace: Trace, model: nn.Module) -> list[int]:
    """Ops before which a block begins or ends."""
    blocks = [name for name, _ in find_blocks(model)]
    found = []
    before = ""
    for index, op in enumerate(trace.ops):
        block = next((name for name in blocks if op.module == name or op.module.startswith(f"{name}.")), "")
        if block != before:
            found.append(index)
        before = block
    return found
