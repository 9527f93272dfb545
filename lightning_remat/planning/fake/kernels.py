"""What kernels allocate inside, where fake execution cannot see it.

A fake op makes its outputs and nothing else. Most real kernels do the same; the exceptions that matter on the CPU are
here, each derived from what the kernel does and compared with measured allocations (tests/planning/test_kernels.py). On
other devices there are none: workspaces of cuBLAS and cuDNN depend on the card and on what else is in memory.

Known weaknesses: buffers per thread (attention) are left out, they are small; so are oneDNN's scratchpads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Scratch = Callable[[Any, Any], int]
"""(arguments, outputs) of an op -> bytes that its kernel needs while it runs, above inputs and outputs."""


def scratch_bytes(device: str, name: str, args: Any, out: Any) -> int:
    """Bytes that the kernel of an op (such as ``"aten.convolution.default"``) allocates and frees while it runs."""
    find = _CPU.get(name) if device == "cpu" else None
    return find(args, out) if find is not None else 0


def output_bytes(name: str, args: Any, position: int) -> int | None:
    """Bytes of an output whose fake stand-in has another size than the real one; None: it is as it seems."""
    if name == "aten.mkldnn_rnn_layer.default" and position == 3:
        return _lstm_workspace(args)
    return None


def sums_gradients(name: str, args: Any) -> bool:
    """Whether an op in backward looks like autograd adding up the gradients of a tensor that was used twice.

    Outside of a dispatch mode it does that in place where it can.
    """
    return name == "aten.add.Tensor" and len(args) == 2 and args[0].shape == getattr(args[1], "shape", None)


def _size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _copied(tensor: Tensor) -> int:
    """Bytes of the copy that a kernel makes of a tensor which is not laid out as it wants."""
    return 0 if tensor.is_contiguous() else _size(tensor)


# ---------------------------------------------------------------------- convolution (oneDNN)


def _is_blocked(args: Any, data: Tensor, weight: Tensor) -> bool:
    """Whether oneDNN will take this convolution and lay out its tensors in blocks of channels."""
    stride, dilation = args[3], args[5]
    if data.dtype is not torch.float32 or data.is_contiguous(memory_format=torch.channels_last):
        return False
    pointwise = all(k == 1 for k in weight.shape[2:]) and not any(s != 1 for s in (*stride, *dilation))
    # PyTorch's own choice (use_mkldnn in Convolution.cpp).
    return not pointwise or data.shape[0] >= 16 or torch.get_num_threads() > 1


def _blocks(data: Tensor) -> int:
    """Bytes of a blocked copy; few channels (a picture's) are read as they are."""
    return _size(data) if data.shape[1] >= 8 else 0


def _convolution(args: Any, out: Any) -> int:
    data, weight = args[0], args[1]
    shifted = (args[3], args[4], args[5])
    if not _is_blocked((data, weight, None, *shifted), data, weight):
        return 0
    if args[6]:
        return 2 * _size(out)
    # First the blocked input, weight and output are there, then the blocked and the plain output.
    return max(_blocks(data) + _size(weight), _size(out))


def _convolution_backward(args: Any, out: Any) -> int:
    grad, data, weight = args[0], args[1], args[2]
    extra = _copied(grad) if not grad.is_contiguous(memory_format=torch.channels_last) else 0
    if not _is_blocked((data, weight, None, *args[4:7]), data, weight):
        return extra
    made = sum(_size(o) for o in out if o is not None)
    to_data = _size(data) if args[10][0] else 0
    kernel = _size(weight)
    if to_data and any(s != 1 for s in args[4]) and not args[7]:
        kernel = max(kernel, _size(grad))  # seen with strides: the output's gradient is there twice
    # The gradient of the input is there in plain layout while that of the weight is computed from blocked copies.
    return extra + to_data + _size(grad) + _blocks(data) + kernel - made


# ---------------------------------------------------------------------- LSTM (oneDNN)


def _padded(width: int) -> int:
    """Length of a row in oneDNN for a width in floats: whole cache lines, and no multiple of 256 (get_good_ld)."""
    lines = -(-width // 16) * 16
    return lines + 16 if lines % 256 == 0 else lines


def _paged(floats: int) -> int:
    return -(-floats * 4 // 4096) * 4096


def _lstm_sizes(args: Any) -> tuple[int, int, int]:
    """Rows (steps x batch), batch, hidden width."""
    data, hidden = args[0], args[2]
    return data.shape[0] * data.shape[1], data.shape[1], hidden.shape[1]


def _lstm_workspace(args: Any) -> int:
    """Gates and states of every step, which forward keeps for backward (set_workspace_sizes in oneDNN's rnn_utils)."""
    rows, batch, width = _lstm_sizes(args)
    wide = _padded(max(args[0].shape[2], width))
    states = 2 * (rows + batch)
    return (
        _paged(rows * _padded(4 * width))
        + 3 * _paged(states * wide)
        + 2 * _paged(states * _padded(width))
        + _paged(rows * _padded(width))
    )


def _lstm(args: Any, out: Any) -> int:
    """The gates once more, and the weights in another layout."""
    rows, _, width = _lstm_sizes(args)
    return rows * _padded(4 * width) * 4 + _size(args[1]) + _size(args[2])


def _lstm_backward(args: Any, out: Any) -> int:
    """While it runs: gates, weights and their gradients laid out anew, the input's gradient; or the end."""
    grad, rows = args[10], _lstm_sizes(args)[0]
    weights = 2 * (_size(args[1]) + _size(args[2]))
    made = sum(_size(o) for o in out)
    running = rows * _padded(4 * _lstm_sizes(args)[2]) * 4 + weights + _size(args[0])
    return max(running - made, weights) + (_copied(grad) if isinstance(grad, Tensor) else 0)


# ---------------------------------------------------------------------- others


def _batch_norm_backward(args: Any, out: Any) -> int:
    """A temporary of the input's size, in the kernel for tensors without gaps."""
    grad = args[0]
    dense = grad.is_contiguous() or grad.is_contiguous(memory_format=torch.channels_last)
    return _size(args[1]) if args[9][0] and dense else 0


def _safe_softmax(args: Any, out: Any) -> int:
    """A mask of the rows in which nothing is allowed, computed over all elements."""
    elements: int = out.numel()
    return elements


def _elementwise_loss(args: Any, out: Any) -> int:
    """The loss of each element, before it is reduced."""
    return _size(args[0]) if out.numel() < args[0].numel() else 0


def _bce_with_logits(args: Any, out: Any) -> int:
    return 2 * _elementwise_loss(args, out)


def _whole_input(args: Any, out: Any) -> int:
    return _size(args[0])


def _first_copied(args: Any, out: Any) -> int:
    return _copied(args[0])


def _attention_backward(args: Any, out: Any) -> int:
    """The gradient in rows, if it has none (an expanded one)."""
    return 0 if args[0].stride(-1) == 1 else _size(args[0])


def _product(args: Any, out: Any) -> int:
    """BLAS reads rows or columns; anything else (an expanded gradient) is copied first."""
    return sum(_size(a) for a in args if isinstance(a, Tensor) and a.ndim >= 2 and 1 not in a.stride()[-2:])


# Kernels that call contiguous() on their first argument: an input, or the gradient in backward.
_FIRST_COPIED = (
    "embedding_dense_backward _softmax _softmax_backward_data _log_softmax _log_softmax_backward_data "
    "native_layer_norm_backward upsample_nearest2d_backward upsample_bilinear2d_backward upsample_bicubic2d_backward "
    "max_pool2d_with_indices_backward avg_pool2d_backward grid_sampler_2d_backward reflection_pad2d_backward col2im"
)
_CPU: dict[str, Scratch] = {
    **{f"aten.{name}.default": _first_copied for name in _FIRST_COPIED.split()},
    "aten.convolution.default": _convolution,
    "aten.convolution_backward.default": _convolution_backward,
    "aten.mkldnn_rnn_layer.default": _lstm,
    "aten.mkldnn_rnn_layer_backward.default": _lstm_backward,
    "aten.native_batch_norm_backward.default": _batch_norm_backward,
    "aten._safe_softmax.default": _safe_softmax,
    "aten.mse_loss.default": _elementwise_loss,
    "aten.smooth_l1_loss.default": _elementwise_loss,
    "aten.huber_loss.default": _elementwise_loss,
    "aten.binary_cross_entropy_with_logits.default": _bce_with_logits,
    "aten.logsumexp.default": _whole_input,
    "aten.mm.default": _product,
    "aten.addmm.default": _product,
    "aten._scaled_dot_product_flash_attention_for_cpu_backward.default": _attention_backward,
    "aten.im2col.default": _whole_input,
}
