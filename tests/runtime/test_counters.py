"""What steps have moved, in all and in the last one."""

import pytest
import torch

from lightning_remat import Offload, Remat
from lightning_remat.engine.offload.place import Traffic
from lightning_remat.integrations.monitor import figures
from lightning_remat.runtime.counters import Counters


def test_traffic_of_the_last_step_and_in_all() -> None:
    counters = Counters()
    assert (counters.hidden, counters.last_hidden) == (None, None)
    counters.moved(Traffic(100, 90, seconds_out=2.0, seconds_in=1.0, waited_seconds=3.0, failures=1, refused=2))
    assert (counters.hidden, counters.last_hidden) == (0.0, 0.0)
    counters.step_begins()
    counters.moved(Traffic(6, 0, seconds_out=0.5))
    counters.moved(Traffic(4, 10, seconds_out=0.0, seconds_in=0.5, waited_seconds=0.25, refused=1))
    assert (counters.bytes_out, counters.bytes_in) == (110, 100)
    assert (counters.last_bytes_out, counters.last_bytes_in) == (10, 10)
    assert (counters.transfer_seconds, counters.waited_seconds) == (4.0, 3.25)
    assert (counters.last_transfer_seconds, counters.last_waited_seconds) == (1.0, 0.25)
    assert (counters.offload_failures, counters.offload_refused) == (1, 3)
    assert counters.hidden == pytest.approx(1 - 3.25 / 4)
    assert counters.last_hidden == 0.75


def test_more_waiting_than_transfers() -> None:
    """Waiting for a queue, too, is waiting: nothing was hidden."""
    counters = Counters()
    counters.moved(Traffic(1, 1, seconds_out=1.0, waited_seconds=2.0))
    assert counters.hidden == 0.0


def test_metrics_are_those_of_the_last_step() -> None:
    """Only where something may be moved; a share only where something was."""
    remat = Remat("full", offload="disk")
    ours = {"offloaded_bytes", "fetched_bytes", "transfer_wait_seconds"}
    assert ours <= figures(remat).keys()
    assert "transfer_hidden" not in figures(remat)
    for size in (1000, 10):
        remat.counters.step_begins()
        remat.counters.moved(Traffic(size, size, seconds_out=1.0, seconds_in=1.0, waited_seconds=0.5))
    found = figures(remat)
    assert {name: found[name] for name in (*ours, "transfer_hidden")} == {
        "offloaded_bytes": 10.0,
        "fetched_bytes": 10.0,
        "transfer_wait_seconds": 0.5,
        "transfer_hidden": 0.75,
    }
    assert not (ours | {"transfer_hidden"}) & figures(Remat("full")).keys()


def test_counters_are_up_to_date_between_steps() -> None:
    """Also in a plain loop, where nobody else asks: with what backward has moved after the step was left."""
    remat = Remat("offload_only", offload=Offload("disk", min_bytes=0, in_flight=1))
    net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
    for step in (1, 2):
        with remat:
            loss = net(torch.ones(2, 4)).exp().sum()
        loss.backward()
        counters = remat.counters
        assert counters.last_bytes_out > 0
        assert counters.last_bytes_in > 0
        assert counters.bytes_out == step * counters.last_bytes_out
    remat.close()
