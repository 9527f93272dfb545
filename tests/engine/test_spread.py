"""DTensors in one process; with several: tests/integrations/test_tensor_parallel.py."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from lightning_remat import Remat
from tests.helpers.exact import recompute_all

pytestmark = pytest.mark.usefixtures("one_process")


@pytest.fixture
def every_warning() -> Iterator[None]:
    """PyTorch says some things once in a process only, and another test may have been the first."""
    torch.set_warn_always(True)
    try:
        yield
    finally:
        torch.set_warn_always(False)


def gradients(remat: Remat | None) -> list[Tensor]:
    torch.manual_seed(0)
    pairs = [nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8), nn.Tanh()) for _ in range(3)]
    net = nn.Sequential(*pairs)
    mesh = init_device_mesh("cpu", (1,))
    for pair in pairs:  # all but the first begin with a plain tensor that needs a gradient
        parallelize_module(pair, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    x = torch.randn(4, 8)
    if remat is None:
        net(x).square().mean().backward()
    else:
        remat.bind(net)
        with remat:
            loss = net(x).square().mean()
        loss.backward()
        remat.close()
    return [p.grad.to_local() for p in net.parameters()]


@pytest.mark.usefixtures("every_warning")
@pytest.mark.parametrize("policy", ["selective", recompute_all])
def test_nothing_is_warned_of_that_is_not_plainly(policy: object) -> None:
    plain = gradients(None)
    ours = gradients(Remat(policy=policy))
    assert all(torch.equal(a, b) for a, b in zip(ours, plain, strict=True))
