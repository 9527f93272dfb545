"""What the tutorial on running out of memory says is so."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.examples.scripts import run_script


@pytest.mark.skipif(sys.platform != "linux", reason="the limit is one of Linux")
def test_out_of_memory(tmp_path: Path) -> None:
    """Under a real limit plain training fails, ours ends in the same weights, and the last word names what is short."""
    printed, found = run_script("out_of_memory", tmp_path)

    assert found["same"] == "True"
    assert found["failed_at"] == 3
    assert "can't allocate memory" in " ".join(printed["Plainly"].split())
    # The first long batch is run again; from then on values are evicted, and nothing is run again.
    assert found["retries"] == 1
    assert found["evictions"] >= found["first_evictions"] > 0
    assert "under policy 'full'" in " ".join(printed["Attempt"].split())
    assert printed["Lightning"].endswith("the same in every bit: True")
    assert f"steps {found['batches']}," in printed["Lightning"]

    last = " ".join(printed["Nothing fits"].split())
    for words in (
        "does not fit on cpu",
        "What holds memory: ",
        "What was tried: ",
        "What would help: ",
        "No batch was",
    ):
        assert words in last
    assert "the limit on address space" in last

    untold, told = printed["Not undone"].rsplit("\n", 1)
    assert "was changed in the step, not by an optimizer step that was expected" in " ".join(untold.split())
    assert told == "attempt(step, module, optimizer): batches run again: 1"
