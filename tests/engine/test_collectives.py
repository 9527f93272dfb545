"""Collectives that write: torch.distributed's schemas do not tell, and no version counter moves.

In one process, where what others would have sent is the process's own. With several: tests/integrations.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, distributed, nn

from lightning_remat.engine.rules import rule_for
from tests.helpers.kernels import X, every_way


def _waited(out: Tensor, of: Tensor) -> None:
    work = distributed.all_gather([out], of, async_op=True)
    work.wait()


INTO: dict[str, Callable[[Tensor, Tensor], object]] = {
    "all_gather": lambda out, of: distributed.all_gather([out], of),
    "all_gather, waited for": _waited,
    "all_to_all_single": distributed.all_to_all_single,
    "reduce_scatter": lambda out, of: distributed.reduce_scatter(out, [of]),
    "scatter": lambda out, of: distributed.scatter(out, [of]),
    "gather": lambda out, of: distributed.gather(of, [out]),
}


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("name", INTO)
def test_what_is_received_into_a_result_is_what_a_replay_reads(name: str) -> None:
    def step(net: nn.Module) -> Tensor:
        h = net.get_submodule("a")(X).tanh()
        out = h.detach().cos()  # would be computed again
        before = out.square()  # read before: a replay needs the old content
        INTO[name](out, h.detach().exp())
        return net.get_submodule("b")(before * out.sigmoid() * h.exp() + out.sin() * h).square().mean()

    every_way(step)


@pytest.mark.parametrize(
    "name", ["allreduce_", "allreduce_coalesced_", "broadcast_", "reduce_", "recv_", "recv_any_source_", "alltoall_"]
)
def test_what_changes_nothing_in_one_process_is_known_to_write(name: str) -> None:
    rule = rule_for(getattr(torch.ops.c10d, name).default)
    assert (rule.form, rule.writes, rule.kind) == ("write", (0,), "fixed")


def test_what_only_sends_writes_nothing() -> None:
    assert rule_for(torch.ops.c10d.send.default).form == "pure"
