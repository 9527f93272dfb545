"""DeepSpeed's stages 1 and 2 under recomputation, two processes: bit for bit what they give by themselves."""

from pathlib import Path

from tests.helpers.forks import run_ranks
from tests.helpers.runif import RunIf


@RunIf(package="deepspeed")
def test_each_stage_gives_what_it_gives_by_itself(tmp_path: Path) -> None:
    """Losses, weights and random streams on each rank; and a step that runs out of memory is not run again."""
    ranks = run_ranks("tests.integrations.deepspeed_worker", tmp_path, seconds=400)
    assert len(ranks) == 2
    for found in ranks:
        failed = found.pop("failed")
        assert "cannot be run again" in failed
        assert "DeepSpeed's engine" in failed
        assert len(found) == 8
        for name, scenario in found.items():
            assert scenario["difference"] == [], name
            assert scenario["replayed"] > 0, name
