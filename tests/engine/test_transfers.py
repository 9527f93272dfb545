"""Copies to another device are kept; a cast that names the device it is on already is recomputed like any other."""

from __future__ import annotations

import pytest
import torch

from lightning_remat import Remat


def recompute(op: object) -> str:
    return "recompute"


@pytest.mark.parametrize(("to", "recorded"), [({}, 1), ({"device": "cpu"}, 1), ({"device": "meta"}, 0)])
def test_what_crosses_the_bus_is_kept(to: dict[str, str], recorded: int) -> None:
    x = torch.ones(3, requires_grad=True)
    remat = Remat(policy=recompute)
    for _ in range(2):
        with remat:
            x.to(dtype=torch.float64, **to)
        assert remat.stats.recorded_ops == recorded
