"""The process-wide state that a test could leave changed behind it, and how to put it back.

The engine enters dispatch modes and hooks around user code, so "unwound, also after an exception" is a promise that
each test checks on the side: tests/conftest.py takes a snapshot before every test and fails the one that differs from
it afterwards. To watch one more thing, add a line to `WATCHED`.

Known weakness: PyTorch shows only the top of the saved-tensor hook stack, so the same pair of hooks pushed twice over
itself goes unseen. State of other threads is not looked at.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed as dist
from torch.nn.modules import module as torch_module
from torch.overrides import _get_current_function_mode_stack
from torch.overrides import _pop_mode as _pop_function_mode
from torch.utils import _python_dispatch as dispatch


@dataclass(frozen=True, kw_only=True)
class Watched:
    """One piece of state: how to read it as something comparable, and how to return to what was read."""

    read: Callable[[], Any]
    write: Callable[[Any], object]


def _pop_dispatch_modes(before: tuple[Any, ...]) -> None:
    while len(dispatch._get_current_dispatch_mode_stack()) > len(before):
        dispatch._pop_mode()


def _pop_function_modes(before: tuple[Any, ...]) -> None:
    while len(_get_current_function_mode_stack()) > len(before):
        _pop_function_mode()


# A mode sets these beside the stack; one that stays set makes Dynamo skip every later frame without a word.
_DISPATCH_FLAGS = ("_is_in_torch_dispatch_mode", "_is_in_any_mode_without_ignore_compile_internals")


def _read_dispatch_flags() -> tuple[Any, ...]:
    return tuple(getattr(dispatch, name) for name in _DISPATCH_FLAGS)


def _write_dispatch_flags(before: tuple[Any, ...]) -> None:
    for name, value in zip(_DISPATCH_FLAGS, before, strict=True):
        setattr(dispatch, name, value)


def _read_saved_tensor_hooks() -> object:
    # True: also what tracing would hide.
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def _pop_saved_tensor_hooks(before: object) -> None:
    while (top := _read_saved_tensor_hooks()) is not None and top != before:
        torch._C._autograd._pop_saved_tensors_default_hooks()


def _write_saved_tensor_hooks_disabled(message: str | None) -> None:
    if message is None:
        torch._C._autograd._saved_tensors_hooks_enable()
    else:
        torch._C._autograd._saved_tensors_hooks_disable(message)


_HOOK_TABLES = (
    "_global_backward_pre_hooks",
    "_global_backward_hooks",
    "_global_forward_pre_hooks",
    "_global_forward_hooks",
    "_global_forward_hooks_always_called",
    "_global_forward_hooks_with_kwargs",
    "_global_buffer_registration_hooks",
    "_global_module_registration_hooks",
    "_global_parameter_registration_hooks",
)


def _read_module_hooks() -> dict[str, dict[int, Any]]:
    return {name: dict(getattr(torch_module, name)) for name in _HOOK_TABLES}


def _write_module_hooks(before: dict[str, dict[int, Any]]) -> None:
    for name, hooks in before.items():
        table = getattr(torch_module, name)
        table.clear()
        table.update(hooks)


def _read_deterministic() -> tuple[bool, bool, bool]:
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.utils.deterministic.fill_uninitialized_memory,
    )


def _write_deterministic(before: tuple[bool, bool, bool]) -> None:
    enabled, warn_only, fill = before
    torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
    torch.utils.deterministic.fill_uninitialized_memory = fill


def _read_cudnn() -> tuple[bool, bool, bool]:
    # These are flags of the build, readable without a CUDA device.
    return (torch.backends.cudnn.enabled, torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark)


def _write_cudnn(before: tuple[bool, bool, bool]) -> None:
    torch.backends.cudnn.enabled, torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = before


_AUTOCAST_DEVICES = ("cpu", "cuda")


def _read_autocast() -> tuple[Any, ...]:
    return (
        torch.is_autocast_cache_enabled(),
        *((torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in _AUTOCAST_DEVICES),
    )


def _write_autocast(before: tuple[Any, ...]) -> None:
    cache, *per_device = before
    torch.set_autocast_cache_enabled(cache)
    for device, (enabled, dtype) in zip(_AUTOCAST_DEVICES, per_device, strict=True):
        torch.set_autocast_enabled(device, enabled)
        torch.set_autocast_dtype(device, dtype)


def _process_group_exists() -> bool:
    return dist.is_available() and dist.is_initialized()


def _end_process_group(before: bool) -> None:
    if not before and _process_group_exists():
        dist.destroy_process_group()


# Where what we say and what Lightning says is logged; tests of messages read it.
_LOGGERS = ("lightning_remat", "lightning", "lightning.pytorch", "lightning.fabric", "pytorch_lightning", "py.warnings")


def _read_loggers() -> dict[str, tuple[int, bool, bool]]:
    found = {name: logging.getLogger(name) for name in _LOGGERS}
    return {name: (logger.level, logger.disabled, logger.propagate) for name, logger in found.items()}


def _write_loggers(before: dict[str, tuple[int, bool, bool]]) -> None:
    for name, (level, disabled, propagate) in before.items():
        logger = logging.getLogger(name)
        logger.setLevel(level)
        logger.disabled, logger.propagate = disabled, propagate


# The modes come first: what is put back later must not run under a mode that leaked.
WATCHED: dict[str, Watched] = {
    "dispatch modes": Watched(
        read=lambda: tuple(dispatch._get_current_dispatch_mode_stack()), write=_pop_dispatch_modes
    ),
    "dispatch mode flags": Watched(read=_read_dispatch_flags, write=_write_dispatch_flags),
    # torch.set_default_device() is such a mode, too.
    "function modes": Watched(read=lambda: tuple(_get_current_function_mode_stack()), write=_pop_function_modes),
    "saved-tensor hooks": Watched(read=_read_saved_tensor_hooks, write=_pop_saved_tensor_hooks),
    "saved-tensor hooks disabled": Watched(
        read=torch._C._autograd._saved_tensors_hooks_get_disabled_error_message,
        write=_write_saved_tensor_hooks_disabled,
    ),
    "global module hooks": Watched(read=_read_module_hooks, write=_write_module_hooks),
    "grad mode": Watched(read=torch.is_grad_enabled, write=torch.set_grad_enabled),
    # Its only setter is a context manager, so the damage is reported and not mended.
    "inference mode": Watched(read=torch.is_inference_mode_enabled, write=lambda before: None),
    "autocast": Watched(read=_read_autocast, write=_write_autocast),
    "anomaly detection": Watched(
        read=lambda: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        write=lambda before: torch.set_anomaly_enabled(*before),
    ),
    "default dtype": Watched(read=torch.get_default_dtype, write=torch.set_default_dtype),
    "float32 matmul precision": Watched(
        read=torch.get_float32_matmul_precision, write=torch.set_float32_matmul_precision
    ),
    "deterministic algorithms": Watched(read=_read_deterministic, write=_write_deterministic),
    "cudnn flags": Watched(read=_read_cudnn, write=_write_cudnn),
    "number of threads": Watched(read=torch.get_num_threads, write=torch.set_num_threads),
    "loggers": Watched(read=_read_loggers, write=_write_loggers),
    "process group": Watched(read=_process_group_exists, write=_end_process_group),
}


def snapshot() -> dict[str, Any]:
    """Read everything in `WATCHED`."""
    return {name: watched.read() for name, watched in WATCHED.items()}


def difference(before: dict[str, Any], after: dict[str, Any]) -> dict[str, str]:
    """Say, for each name that differs, what it was and what it is."""
    return {name: f"{name}: was {before[name]!r}, is {after[name]!r}" for name in before if before[name] != after[name]}


def restore(before: dict[str, Any]) -> None:
    """Return to a snapshot, so that one leaking test does not fail all that follow."""
    for name, watched in WATCHED.items():
        if watched.read() != before[name]:
            watched.write(before[name])
