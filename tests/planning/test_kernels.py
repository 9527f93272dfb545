"""What CPU kernels allocate inside, as it is written down, against what they do allocate."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_remat.planning.fake.kernels import output_bytes, scratch_bytes
from lightning_remat.planning.fake.roofline import tensors_of
from lightning_remat.runtime.memory import measure_peak


class Compare(TorchDispatchMode):
    """Runs every op under the profiler; notes (op, what it allocated beyond its outputs, what the table says)."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, int, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {t.untyped_storage().data_ptr() for t in tensors_of(args)}
        outs: list[Any] = []
        peak = measure_peak(lambda: outs.append(func(*args, **(kwargs or {})))).peak_bytes
        made = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors_of(outs)}
        own = sum(nbytes for pointer, nbytes in made.items() if pointer not in known)
        self.found.append((str(func), peak - own, scratch_bytes("cpu", str(func), args, outs[0])))
        if str(func) == "aten.mkldnn_rnn_layer.default":
            workspace = outs[0][3].untyped_storage().nbytes()
            self.found.append(("workspace", workspace, output_bytes(str(func), args, 3) or 0))
        return outs[0]


def leaf(*size: int) -> Tensor:
    return torch.randn(size, requires_grad=True)


def conv(channels: int, out: int, kernel: int, stride: int = 1, size: int = 32) -> Callable[[], Tensor]:
    return lambda: F.conv2d(leaf(16, channels, size, size), leaf(out, channels, kernel, kernel), None, stride, 1).exp()


CASES: dict[str, Callable[[], Tensor]] = {
    "convolution": conv(32, 32, 3),
    "wider": conv(16, 64, 3),
    "strided": conv(32, 64, 3, 2),
    "of pictures": lambda: F.conv2d(torch.randn(16, 3, 64, 64), leaf(32, 3, 7, 7), None, 2, 3).exp(),
    "channels last": lambda: F.conv2d(
        leaf(16, 32, 32, 32).contiguous(memory_format=torch.channels_last), leaf(32, 32, 3, 3), None, 1, 1
    ).exp(),
    "transposed": lambda: F.conv_transpose2d(leaf(8, 64, 32, 32), leaf(64, 32, 2, 2), stride=2).exp(),
    "norm": lambda: nn.BatchNorm2d(32)(leaf(16, 32, 32, 32)).exp(),
    "norm of an expanded gradient": lambda: nn.BatchNorm2d(32)(leaf(16, 32, 32, 32)),
    "lstm": lambda: nn.LSTM(128, 128)(leaf(64, 16, 128))[0].exp(),
    "wide lstm": lambda: nn.LSTM(512, 320)(leaf(10, 32, 512))[0].exp(),
    "losses": lambda: (
        F.mse_loss(leaf(512, 512), torch.rand(512, 512))
        + F.smooth_l1_loss(leaf(512, 512), torch.rand(512, 512))
        + F.binary_cross_entropy_with_logits(leaf(512, 512), torch.rand(512, 512))
    ),
    "expanded gradient of a product": lambda: leaf(512, 512) @ leaf(512, 512),
    "softmax of a transposed tensor": lambda: leaf(8, 64, 256).mT.softmax(-1),
    "nothing inside": lambda: F.gelu(F.layer_norm(leaf(64, 1024), (1024,), leaf(1024), leaf(1024))).cumsum(0).exp(),
}

EMPTY = {"channels last", "norm of an expanded gradient", "nothing inside"}


@pytest.mark.parametrize("name", CASES)
def test_scratch_is_what_the_kernels_allocate(name: str) -> None:
    """To 5 %, or to 128 KiB where that is more."""
    with Compare() as compare:
        CASES[name]().sum().backward()
    wrong = [entry for entry in compare.found if abs(entry[1] - entry[2]) > max(0.05 * entry[1], 2**17)]
    assert not wrong
    if name not in EMPTY:
        assert any(said > 2**16 for _, _, said in compare.found)


def test_other_devices_have_no_entries() -> None:
    """Their workspaces depend on the card: nothing is claimed."""
    args: Sequence[Any] = (torch.ones(4, 4).expand(4, 4).mT[:1].expand(4, 4), torch.ones(4, 4))
    assert scratch_bytes("cuda", "aten.mm.default", args, torch.ones(4, 4)) == 0
