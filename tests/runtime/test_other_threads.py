"""Values of a traced step that another thread lets go of, as gloo's do with buffers of collectives."""

import threading

import pytest
import torch
from torch import Tensor, nn

from lightning_remat import Remat


@pytest.mark.filterwarnings("ignore:.*not feasible")  # asked for on purpose
def test_a_step_is_traced_although_another_thread_lets_go_of_its_values() -> None:
    """Marks of threads that the profiler does not follow would be missing from the count, and with them the trace."""
    net = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(3)))
    remat = Remat(budget=1)

    def step() -> None:
        with remat:
            held: list[Tensor] = [torch.ones(64, 8, requires_grad=True) * 2]
            x = net(held[0].detach() + 1)
            thread = threading.Thread(target=held.clear)
            thread.start()
            thread.join()
            loss = x.square().mean()
        loss.backward()

    for _ in range(3):
        step()
    assert remat.plan is not None
    assert remat.stats.replayed_ops > 0
    remat.close()
