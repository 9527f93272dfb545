"""Aliases: the same memory without history, and the same version counter."""

from __future__ import annotations

import torch
from torch import Tensor

_detach = torch._C.TensorBase.detach
_set_excluded = torch._C._dispatch_tls_set_dispatch_key_excluded
_is_excluded = torch._C._dispatch_tls_is_dispatch_key_excluded
VERSIONED = torch._C.DispatchKey.ADInplaceOrView


def alias(tensor: Tensor) -> Tensor:
    """The same storage without history, sharing the version counter.

    Inside ``__torch_dispatch__`` the key that makes aliases share it is excluded, and a plain ``detach`` would start a
    counter of its own: a write after the step would go unseen.
    """
    before = _is_excluded(VERSIONED)
    _set_excluded(VERSIONED, False)
    try:
        return _detach(tensor)
    finally:
        _set_excluded(VERSIONED, before)
