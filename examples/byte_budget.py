"""A byte budget: say how much memory a step may take, and get the cheapest plan that fits, with its report.

python examples/byte_budget.py
"""

import torch
from byte_gpt import ByteGPT, stdlib_batches

from lightning_remat import Remat
from lightning_remat.runtime.memory import measure_peak

STEPS = 6
SHARE = 0.4  # of what the step takes plainly


def train(remat: Remat) -> tuple[list[float], int, int]:
    """Train from a fixed seed; returns the losses, what lies in memory between steps, and the peak of one more step."""
    torch.manual_seed(0)
    model = ByteGPT(blocks=6, width=128, heads=4, context=128)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batches = iter(stdlib_batches(context=128, batch=4))

    def step() -> float:
        with remat:
            loss = model.loss(next(batches))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    losses = [step() for _ in range(STEPS)]
    state = [t for state in optimizer.state.values() for t in state.values() if isinstance(t, torch.Tensor)]
    static = sum(t.nbytes for t in [*model.parameters(), *model.buffers(), *state])
    return losses, static, measure_peak(step).peak_bytes


def main() -> None:
    plain_losses, static, plain_peak = train(Remat(policy="none"))
    budget = static + int(SHARE * plain_peak)
    remat = Remat(policy="auto", budget=budget)  # the first step is traced, the second and all further ones are planned
    losses, _, peak = train(remat)

    print(remat.report())
    remat.report().save("plan.html")  # also .svg, .png, .json, .txt
    remat.save_plan("plan.json")  # for Remat(policy="plan.json") in another run
    print(f"plain: loss {plain_losses[-1]:.6f}, peak {(static + plain_peak) / 2**20:.1f} MiB")
    print(f"budget {budget / 2**20:.1f} MiB: loss {losses[-1]:.6f}, peak {(static + peak) / 2**20:.1f} MiB")
    print(f"losses equal: {losses == plain_losses}; within the budget: {static + peak <= budget}")


if __name__ == "__main__":
    main()
