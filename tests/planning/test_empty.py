"""Steps of which nothing can be planned: all of them is compiled, or no op of theirs was seen."""

import pytest

from lightning_remat.errors import BudgetError
from lightning_remat.planning.planner import plan
from lightning_remat.planning.trace import OTHER, Trace


def test_a_budget_that_is_too_small_is_refused_in_words() -> None:
    """The smallest peak is that of others' memory, and no op is named."""
    trace = Trace(events=[(OTHER, 1000, 500), (OTHER, -1, -500)])
    assert plan(trace, 1500, 500).chosen.peak_bytes == 1000
    with pytest.raises(BudgetError, match=r"1,500 bytes .*no op of it can be planned") as caught:
        plan(trace, 1499, 500)
    assert caught.value.smallest_bytes == 1500
