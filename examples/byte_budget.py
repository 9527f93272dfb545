"""A byte budget: say how much memory a step may take, and get the cheapest plan that fits, with its report.

python examples/byte_budget.py

It writes plan.html (the report with plots, in one file) and plan.json (the plan, for another run) into this folder.
"""

import os
import textwrap
import warnings

import torch
from byte_gpt import ByteGPT, stdlib_batches
from figures import curve, save_figures

from lightning_remat import Remat
from lightning_remat.runtime.memory import PeakResult, measure_peak

STEPS = 6
SHARE = 0.4  # of what the step takes plainly, on top of what is there between steps
MIB = 2**20


class Training:
    """A GPT that is trained from a fixed seed."""

    def __init__(self, remat: Remat) -> None:
        torch.manual_seed(0)
        self.remat = remat
        self.model = ByteGPT(blocks=6, width=128, heads=4, context=128)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.batches = iter(stdlib_batches(context=128, batch=4))
        self.losses: list[float] = []

    # --8<-- [start:step]
    def step(self) -> None:
        batch = next(self.batches)
        with self.remat:
            loss = self.model.loss(batch)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.item())

    # --8<-- [end:step]

    @property
    def static_bytes(self) -> int:
        """What lies in memory between steps: parameters, buffers and the optimizer's state."""
        states = [t for state in self.optimizer.state.values() for t in state.values() if isinstance(t, torch.Tensor)]
        return sum(t.nbytes for t in [*self.model.parameters(), *self.model.buffers(), *states])

    def run(self) -> PeakResult:
        """Train, and count the memory of one more step."""
        for _ in range(STEPS):
            self.step()
        return measure_peak(self.step)


def train_plainly() -> tuple[Training, PeakResult, int]:
    print("== Plain")
    # --8<-- [start:plain]
    plain = Training(Remat(policy="none"))
    memory = plain.run()
    static = plain.static_bytes
    print(f"between steps: {static / MIB:.1f} MiB; a step adds {memory.peak_bytes / MIB:.1f} MiB")
    budget = static + int(SHARE * memory.peak_bytes)
    print(f"budget: {budget} bytes, {budget / MIB:.1f} MiB")
    # --8<-- [end:plain]
    return plain, memory, budget


def train_under(budget: int) -> Training:
    print("\n== First steps")
    # --8<-- [start:first]
    training = Training(Remat(budget=budget))
    for number in range(1, 4):
        training.step()
        print(f"step {number}: {training.remat.summary}")
    # --8<-- [end:first]
    return training


def main() -> None:
    plain, plain_memory, budget = train_plainly()
    static = plain.static_bytes
    training = train_under(budget)
    remat = training.remat
    for _ in range(STEPS - 3):
        training.step()

    print("\n== Report")
    # --8<-- [start:report]
    print(remat.report())
    remat.report().save("plan.html")  # also .svg, .png, .json, .txt
    # --8<-- [end:report]

    print("\n== Predicted and measured")
    # --8<-- [start:measured]
    predicted = remat.plan.peak_bytes
    memory = measure_peak(training.step)  # counted once more, over all of it
    peak, batch_bytes = static + memory.peak_bytes, next(training.batches).nbytes
    print(f"predicted: {predicted} bytes; measured by it: {remat.measured_peak_bytes} bytes")
    print(f"counted by us: {peak} bytes, with the batch of {batch_bytes} bytes, drawn before Remat's step begins")
    equal = training.losses == plain.losses
    print(f"plain: loss {plain.losses[-1]:.6f}, peak {(static + plain_memory.peak_bytes) / MIB:.1f} MiB")
    print(f"budget {budget / MIB:.1f} MiB: loss {training.losses[-1]:.6f}, peak {peak / MIB:.1f} MiB")
    print(f"losses equal: {equal}; within the budget: {peak - batch_bytes <= budget}")
    # --8<-- [end:measured]

    print("\n== Plan file")
    # --8<-- [start:file]
    remat.save_plan("plan.json")

    again = Training(Remat(policy="plan.json"))  # in another run
    again_memory = again.run()
    print(again.remat.summary)
    print(f"peak {(static + again_memory.peak_bytes) / MIB:.1f} MiB; losses equal: {again.losses == plain.losses}")
    # --8<-- [end:file]

    print("\n== Infeasible")
    # --8<-- [start:infeasible]
    small = Training(Remat(budget="20MiB"))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        small_memory = small.run()
    for warning in said:
        print(textwrap.fill(f"{warning.category.__name__}: {warning.message}", 98))
    print(f"peak {(static + small_memory.peak_bytes) / MIB:.1f} MiB; losses equal: {small.losses == plain.losses}")
    # --8<-- [end:infeasible]

    result = remat.report().result
    front = [*result.front] + ([result.plain] if result.plain not in result.front else [])
    save_figures(
        static_bytes=static,
        plain_peak_bytes=static + plain_memory.peak_bytes,
        plain_step_bytes=plain_memory.peak_bytes,
        budget_bytes=budget,
        share=SHARE,
        predicted_peak_bytes=predicted,
        reported_peak_bytes=remat.measured_peak_bytes,
        peak_bytes=peak,
        batch_bytes=batch_bytes,
        replayed=remat.stats.replayed_ops,
        operations=len(result.trace.ops),
        plan_file_bytes=os.path.getsize("plan.json"),
        file_peak_bytes=static + again_memory.peak_bytes,
        small_peak_bytes=static + small_memory.peak_bytes,
        small_warnings=len(said),
        losses_equal=str(training.losses == again.losses == small.losses == plain.losses),
        smallest_peak_bytes=static + result.smallest.peak_bytes,
        plans=len(front),
        front_bytes=[static + candidate.peak_bytes for candidate in front],
        front_seconds=[candidate.extra_seconds for candidate in front],
        **{
            f"{name}_{axis}": values
            for name, one in (("plain", plain_memory), ("planned", memory), ("small", small_memory))
            for axis, values in zip(("times", "levels"), above(static, one), strict=True)
        },
    )


def above(static: int, memory: PeakResult) -> tuple[list[float], list[int]]:
    """Memory over time to draw, with what is there between steps."""
    times, levels = curve(memory.timeline)
    return times, [static + level for level in levels]


if __name__ == "__main__":
    main()
