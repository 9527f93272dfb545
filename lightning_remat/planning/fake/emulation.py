"""The kernels that PyTorch would choose on another device, chosen on the CPU.

Most ops are the same everywhere; a few are taken apart above the level at which ops are recorded, and differently for
each type of device. While :func:`kernels_of` lasts, these few are answered for the CPU as they would be on CUDA:

- ``dropout``: one fused op with a mask of one byte per element, not a float mask and a product;
- ``scaled_dot_product_attention``: flash attention (half precision, no mask), else memory-efficient attention, else the
  product of matrices, by the rules of PyTorch's ``sdp_utils.cpp``;
- ``rms_norm``: one fused op;
- autocast: the ops that CUDA runs in float32, and the CPU does not.

Known weaknesses: recurrent layers are estimated with the CPU's kernel, which keeps more than cuDNN's; which card it is
(cuDNN attention on H100, no flash attention before Ampere) is not asked. The registrations are process-wide while they
last, so nothing else should compute on the CPU meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_HALF = (torch.float16, torch.bfloat16)
_aten = torch.ops.aten
# Run in float32 by autocast on CUDA (ATen/autocast_mode.h). The CPU has kernels of its own for some; these stay.
_FLOAT32 = (
    "acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan "
    "pow.Tensor_Scalar pow.Tensor_Tensor pow.Scalar softplus "
    "layer_norm native_layer_norm rms_norm group_norm cosine_similarity dist cdist renorm logsumexp "
    "poisson_nll_loss cosine_embedding_loss nll_loss nll_loss2d hinge_embedding_loss kl_div l1_loss smooth_l1_loss "
    "huber_loss mse_loss margin_ranking_loss soft_margin_loss triplet_margin_loss binary_cross_entropy_with_logits "
    "prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm sum sum.dim_IntList"
)


@contextmanager
def kernels_of(device: str) -> Iterator[None]:
    """Choose kernels as on ``device`` (a type) for tensors on the CPU; for ``"cpu"`` this does nothing."""
    if device == "cpu":
        yield
        return
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("scaled_dot_product_attention", _attention, "AutogradCPU")
        library.impl("dropout", _dropout, "AutogradCPU")
        library.impl("rms_norm", _rms_norm, "AutogradCPU")
        for name in _FLOAT32.split():
            if not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "AutocastCPU"):
                library.impl(name, _in_float32(name), "AutocastCPU")
        with _AllHere(device):
            yield


class _AllHere(TorchFunctionMode):
    """Where the program names the device that it is meant for (``x.to("cuda")``), everything is there already."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.device = device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") == self.device:  # x.cuda()
            return args[0]
        kwargs = {name: self._here(value) if name == "device" else value for name, value in (kwargs or {}).items()}
        if func is Tensor.to:
            args = (args[0], *map(self._here, args[1:]))
        return func(*args, **kwargs)

    def _here(self, value: Any) -> Any:
        if isinstance(value, (str, torch.device)) and torch.device(value).type == self.device:
            return torch.device("cpu")
        return value


def _dropout(data: Tensor, p: float, train: bool) -> Tensor:
    if not train or p == 0 or data.numel() == 0:
        return data
    if p == 1:
        return data * 0
    return _aten.native_dropout(data, p, True)[0]  # type: ignore[no-any-return]  # ops have no types


def _rms_norm(data: Tensor, shape: list[int], weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    return _aten._fused_rms_norm(data, shape, weight, eps)[0]  # type: ignore[no-any-return]  # ops have no types


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    width = query.shape[-1]
    simple = query.ndim == 4 and key.shape[-1] == width and query.stride(-1) == 1
    if simple and attn_mask is None and query.dtype in _HALF and width <= 256 and value.shape[-1] == width:
        padding = -width % 8
        if padding:
            query, key, value = (torch.nn.functional.pad(t, (0, padding)) for t in (query, key, value))
        scale = scale if scale is not None else width**-0.5
        out = _aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, False, scale=scale)[0]
        return out[..., :width] if padding else out  # type: ignore[no-any-return]  # ops have no types
    if simple and not enable_gqa and query.dtype in (*_HALF, torch.float32):
        if attn_mask is not None and attn_mask.dtype is torch.bool:
            nothing = torch.zeros((), dtype=query.dtype, device=query.device)
            attn_mask = torch.where(attn_mask, nothing, float("-inf"))
        if attn_mask is not None:
            attn_mask = attn_mask.expand(*query.shape[:2], query.shape[2], key.shape[2])
        grad = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
        return _aten._scaled_dot_product_efficient_attention(  # type: ignore[no-any-return]  # ops have no types
            query, key, value, attn_mask, grad, dropout_p, is_causal, scale=scale
        )[0]
    return _aten._scaled_dot_product_attention_math(  # type: ignore[no-any-return]  # ops have no types
        query, key, value, attn_mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa
    )[0]


def _in_float32(name: str) -> Callable[..., Any]:
    packet, _, overload = name.partition(".")
    op = getattr(getattr(_aten, packet), overload or "default")

    def call(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast("cpu", enabled=False):
            wide = [a.float() if isinstance(a, Tensor) and a.dtype in _HALF else a for a in args]
            return op(*wide, **kwargs)

    return call
