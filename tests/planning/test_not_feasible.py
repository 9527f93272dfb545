"""Budgets that no plan fits: what is said of the step, also where nothing of it can be planned."""

import re

import pytest

from lightning_remat.errors import BudgetError
from lightning_remat.planning.planner import plan
from lightning_remat.planning.trace import OTHER, Trace
from tests.planning.small_traces import Writer


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("aten.addmm.default", "the largest single op, aten.addmm.default, takes 3.0 KiB"),
        # What FSDP 2 begins with: what follows until the next op is memory of its hooks.
        ("profiler._record_function_enter_new.default", "the largest single part, hooks or collectives, takes 3.0 KiB"),
    ],
    ids=["op", "hooks"],
)
def test_the_largest_part_is_named(name: str, said: str) -> None:
    writer = Writer()
    (value,) = writer.run("aten.relu.default", sizes=[1024])
    writer.free(value)
    (value,) = writer.run(name, sizes=[1024], scratch=2048)
    writer.free(value)
    with pytest.raises(BudgetError, match=re.escape(said)):
        plan(writer.trace, 1, 0)


def test_where_nothing_can_be_planned() -> None:
    """All of it is compiled, or no op was seen. The smallest peak is that of others' memory, and no op is named."""
    trace = Trace(events=[(OTHER, 1000, 500), (OTHER, -1, -500)])
    assert plan(trace, 1500, 500).chosen.peak_bytes == 1000
    with pytest.raises(BudgetError, match=r"1,500 bytes .*no op of it can be planned") as caught:
        plan(trace, 1499, 500)
    assert caught.value.smallest_bytes == 1500
