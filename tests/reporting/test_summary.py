"""The summary of a training as text."""

from dataclasses import fields

from lightning_remat.reporting.summary import MOST_NOTES, Training, in_lines, shortened, since
from lightning_remat.runtime.counters import Counters


def told(counters: Counters, **options: object) -> str:
    given: dict[str, object] = {
        "policy": "recomputation policy selective, no blocks",
        "predicted_peak_bytes": None,
        "seconds": 50.0,
        "recompute_seconds": 2.0,
        "verifies": False,
    }
    return in_lines(Training(counters=counters, **(given | options)))


def test_what_did_not_happen_has_no_line() -> None:
    assert told(Counters(steps=1200, replayed_ops=34)).splitlines() == [
        "Recomputation in this training: 1,200 steps, 50.0 s",
        "  in force    recomputation policy selective, no blocks",
        "  run again   34 ops in the last step; 2.00 s in all, 4.00 % of the time",
    ]


def test_everything_that_can_happen() -> None:
    counters = Counters(
        steps=1,
        out_of_memory=2,
        evictions=5,
        evicted_bytes=3 * 2**30,
        retries=3,
        retried_batches=1,
        peak_bytes=19 * 2**30,
        kept_bytes=2**20,
        budget_bytes=20 * 2**30,
        replayed_ops=1,
        verified=7,
        verified_different=1,
        notes=["budget 20 GiB", "tightened", "tightened"],
    )
    lines = told(counters, predicted_peak_bytes=18 * 2**30, verifies=True).splitlines()
    assert lines[0] == "Recomputation in this training: 1 step, 50.0 s"
    assert lines[2:] == [
        "  peak        predicted 18.00 GiB, measured 19.00 GiB, budget 20.00 GiB",
        "  kept        1.0 MiB for backward",
        "  run again   1 op in the last step; 2.00 s in all, 4.00 % of the time",
        "  memory ran out 2 times",
        "  evicted     5 values of 3.00 GiB together",
        "  retried     1 batch, 3 times in all",
        "  verified    7 comparisons, 1 differed",
        "  decided     budget 20 GiB",
        "              tightened",
    ]
    assert "none differed" in told(Counters(steps=1, verified=7), verifies=True)


def test_no_time_at_all() -> None:
    assert "0.00 % of the time" in told(Counters(steps=1), seconds=0.0, recompute_seconds=0.0)


def test_many_notes_lose_their_middle() -> None:
    notes = [str(i) for i in range(40)]
    short = shortened(notes)
    assert len(short) == MOST_NOTES
    assert short[0] == "0"
    assert short[-1] == "39"
    assert f"... ({40 - MOST_NOTES + 1} more)" in short


def test_what_was_moved() -> None:
    """Totals of the training, how much of the transfers was hidden, and what did not work."""
    counters = Counters(steps=10, bytes_out=3 * 2**30, bytes_in=2**30, transfer_seconds=40.0, waited_seconds=4.0)
    assert told(counters).splitlines()[3:] == [
        "  moved       3.00 GiB out, 1.00 GiB back; waited 4.00 s for 40.0 s of transfers, 90 % hidden",
    ]
    counters = Counters(steps=10, bytes_out=2**20, offload_failures=1, offload_refused=2)
    assert told(counters).splitlines()[3:] == [
        "  moved       1.0 MiB out, 0 B back; waited 0 s for 0 s of transfers",
        "  no room     for 2 contents that were to leave: they stayed",
        "  failed      1 transfer",
    ]
    assert "  no room     for 1 content that was to leave: it stayed" in told(Counters(steps=1, offload_refused=1))


def test_counts_of_this_training_only() -> None:
    """Everything that is counted is the difference, every other field is as it is now, and none is forgotten."""
    names = [field.name for field in fields(Counters) if field.name != "notes"]
    as_they_are = {name for name in names if name.startswith("last_")}
    as_they_are |= {
        "peak_bytes",
        "kept_bytes",
        "budget_bytes",
        "replayed_ops",
        "recompute_seconds",
        "activation_budget",
    }
    before = Counters(*range(1, 1 + len(names)), notes=["old"])
    now = Counters(*range(101, 101 + len(names)), notes=["old", "new"])
    found = since(now, before)
    assert found.notes == ["new"]
    for name in names:
        assert getattr(found, name) == (getattr(now, name) if name in as_they_are else 100), name
