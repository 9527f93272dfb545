"""Watch the tuner choose: predictions that are 8 % too low, and a search that takes only what was measured to fit.

python examples/how_tuner.py [--json FILE]

No step runs here. The plans and their measured peaks are made up; the choice is the one that training makes.
"""

import argparse
import json
from pathlib import Path

from lightning_remat.runtime.tuning.tuner import Tuner

ROOM = 100_000_000  # bytes that a step may take
PREDICTED = [35_000_000 + 1_500_000 * i for i in range(60)]  # peaks of all the plans there are


def measured(predicted: int) -> int:
    """What a step under the plan really takes, in this made-up world."""
    return predicted * 108 // 100 + 1_000_000


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    # --8<-- [start:loop]
    tuner = Tuner()
    tuner.fit_to(ROOM)
    while not tuner.settled:
        target = tuner.target
        predicted = max((p for p in PREDICTED if p <= target), default=PREDICTED[0])
        if tuner.seen(predicted):
            tuner.again(target, predicted)  # no further step for a plan that is known already
            continue
        peak = measured(predicted)
        tuner.learn(target, predicted, peak)
        fits = "fits" if peak <= ROOM else "does not fit"
        print(f"target {target:11,}: predicted {predicted:11,}, measured {peak:11,}, {fits}")
    print(f"settled: {tuner.why}")
    # --8<-- [end:loop]
    best = tuner.best
    if options.json is not None and best is not None:
        figures = {"trials": len(tuner.trials), "room_bytes": ROOM, "best_bytes": best.measured, "why": tuner.why}
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
