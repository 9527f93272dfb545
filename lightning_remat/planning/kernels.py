"""What kernels allocate inside, where fake execution cannot see it.

A fake op makes its outputs and nothing else. Most real kernels do the same; the exceptions that matter on the CPU are
here, each derived from what the kernel does and compared with measured allocations (``tests/planning/test_kernels.py``).
On other devices there are none: workspaces of cuBLAS and cuDNN depend on the card and on what else is in memory.

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


def output_bytes(device: str, name: str, args: Any, position: int) -> int | None:
    """Bytes of an output whose fake stand-in has another size than the real one; None: it is as it seems."""
    if device == "cpu" and name == "aten.mkldnn_rnn_layer.default" and position == 3:
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
    times = 2 if args[7] else 1
    # The gradient of the input is there in plain layout while that of the weight is computed from blocked copies.
    for_weight = to_data + times * _size(grad) + _blocks(data) + kernel
    return extra + max(for_weight, 2 * to_data + _blocks(data)) - made


# ---------------------------------------------------------------------- LSTM (oneDNN)


def _padded(width: int) -> int:
    """oneDNN's row length for a width in floats: whole cache lines, and no multiple of 256 (get_good_ld)."""
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
    grad = args[10]
    return _lstm(args, out) + (_copied(grad) if isinstance(grad, Tensor) else 0)


# ---------------------------------------------------------------------- others


def _batch_norm_backward(args: Any, out: Any) -> int:
    """A temporary of the input's size, whatever its layout."""
    return _size(args[1]) if args[9][0] else 0


def _safe_softmax(args: Any, out: Any) -> int:
    """A mask of the rows in which nothing is allowed, computed over all elements."""
    elements: int = out.numel()
    return elements


def _embedding_backward(args: Any, out: Any) -> int:
    return _copied(args[0])


_CPU: dict[str, Scratch] = {
    "aten.convolution.default": _convolution,
    "aten.convolution_backward.default": _convolution_backward,
    "aten.mkldnn_rnn_layer.default": _lstm,
    "aten.mkldnn_rnn_layer_backward.default": _lstm_backward,
    "aten.native_batch_norm_backward.default": _batch_norm_backward,
    "aten._safe_softmax.default": _safe_softmax,
    "aten.embedding_dense_backward.default": _embedding_backward,
}
