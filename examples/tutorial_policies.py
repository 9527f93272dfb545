"""Four policies on one GPT: what each keeps, what it costs, and that the results are the same in every bit.

python examples/tutorial_policies.py
"""

import statistics
import time

import torch
from byte_gpt import ByteGPT, stdlib_batches
from figures import curve, save_figures
from torch import Tensor, nn

from lightning_remat import OpInfo, Remat
from lightning_remat.runtime.memory import measure_peak

BLOCKS, STEPS, ROUNDS = 9, 3, 5
POLICIES = ["none", "full", "every:2", "sqrt", "every:9", "selective"]


class Training:
    """A GPT that is trained under a policy, always from the same seed."""

    # --8<-- [start:training]
    def __init__(self, remat: Remat) -> None:
        torch.manual_seed(0)
        self.remat = remat
        self.model = ByteGPT(blocks=BLOCKS, width=128, heads=4, context=128, dropout=0.1)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.batches = iter(stdlib_batches(context=128, batch=4))

    def forward_and_backward(self) -> Tensor:
        batch = next(self.batches)
        with self.remat:
            loss = self.model.loss(batch)
        loss.backward()
        return loss.detach()

    def step(self) -> Tensor:
        loss = self.forward_and_backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss

    # --8<-- [end:training]


def look_at_full() -> None:
    print("\n== Full")
    # --8<-- [start:full]
    training = Training(Remat(policy="full"))
    training.step()
    print(training.remat.report())
    # --8<-- [end:full]


def look_at_selective() -> dict[str, object]:
    print("\n== Selective")
    # --8<-- [start:selective]
    training = Training(Remat(policy="selective"))
    training.step()
    print(training.remat.report())
    # --8<-- [end:selective]

    print("\n== A function")

    # --8<-- [start:function]
    def gelu_and_norms(op: OpInfo) -> str:
        return "recompute" if op.name in ("aten.gelu.default", "aten.native_layer_norm.default") else "keep"

    training = Training(Remat(policy=gelu_and_norms))
    training.step()
    print(f"{training.remat.stats.replayed_ops} operations ran again")
    # --8<-- [end:function]
    return {"function_replayed": training.remat.stats.replayed_ops, "function_peak_bytes": peak_of(training)}


def peak_of(training: Training) -> int:
    return measure_peak(training.step).peak_bytes


def compare() -> dict[str, object]:
    print("\n== Compared")
    # --8<-- [start:compare]
    trainings = {policy: Training(Remat(policy=policy)) for policy in POLICIES}
    for training in trainings.values():
        training.step()  # a first step allocates what stays: optimizer state, workspaces
    seconds: dict[str, list[float]] = {policy: [] for policy in POLICIES}
    for _ in range(ROUNDS):  # policies take turns, so that what else the machine does hits all alike
        for policy, training in trainings.items():
            began = time.process_time()
            training.step()
            seconds[policy].append(time.process_time() - began)
    memory = {policy: measure_peak(training.step) for policy, training in trainings.items()}
    # --8<-- [end:compare]

    figures: dict[str, object] = {"rounds": ROUNDS}
    print(f"{'policy':10} {'peak':>10} {'of none':>8} {'time':>9} {'of none':>8} {'run again':>10}")
    for policy, training in trainings.items():
        peak, taken = memory[policy].peak_bytes, statistics.median(seconds[policy])
        share, ratio = peak / memory["none"].peak_bytes, taken / statistics.median(seconds["none"])
        again = training.remat.stats.replayed_ops
        print(f"{policy:10} {peak / 2**20:6.1f} MiB {share:8.2f} {taken * 1e3:6.0f} ms {ratio:8.2f} {again:6} ops")
        name = policy.replace(":", "_")
        times, levels = curve(memory[policy].timeline)
        figures |= {
            f"{name}_peak_bytes": peak,
            f"{name}_peak_share": share,
            f"{name}_seconds": taken,
            f"{name}_time_ratio": ratio,
            f"{name}_replayed": again,
            f"{name}_times": times,
            f"{name}_levels": levels,
        }
    return figures


def try_a_deep_chain() -> dict[str, object]:
    print("\n== A deep chain")
    # --8<-- [start:chain]
    chain = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(64)))
    x = torch.randn(2048, 64)

    def chain_step(remat: Remat) -> None:
        with remat:
            loss = chain(x).square().mean()
        loss.backward()
        chain.zero_grad()

    peaks = {}
    for policy in ("none", "full", "every:2", "sqrt", "every:32"):
        remat = Remat(policy=policy)
        chain_step(remat)
        peaks[policy] = measure_peak(lambda remat=remat: chain_step(remat)).peak_bytes
        print(f"{policy:10} {peaks[policy] / 2**20:6.1f} MiB")
    # --8<-- [end:chain]
    return {f"chain_{policy.replace(':', '_')}_bytes": peak for policy, peak in peaks.items()}


def check_the_bits() -> dict[str, object]:
    print("\n== Same bits")

    # --8<-- [start:bits]
    def results(policy: object) -> list[Tensor]:
        training = Training(Remat(policy=policy))
        losses = [training.step() for _ in range(STEPS)]
        losses.append(training.forward_and_backward())
        parameters = list(training.model.parameters())
        return [*losses, *(p.grad for p in parameters), *parameters, torch.get_rng_state()]

    plain = results("none")
    same = {}
    for policy in POLICIES[1:]:
        found = results(policy)
        same[policy] = all(torch.equal(a, b) for a, b in zip(plain, found, strict=True))
        print(f"{policy:10} losses, gradients, weights and random state the same: {same[policy]}")
    # --8<-- [end:bits]
    return {"steps": STEPS, "all_same": str(all(same.values())), "tensors_compared": len(plain)}


def main() -> None:
    Training(Remat(policy="full")).step()  # what PyTorch sets up once is not of any policy, and is out of the tables
    look_at_full()
    figures = look_at_selective()
    figures |= try_a_deep_chain()
    figures |= compare()
    figures |= check_the_bits()
    save_figures(**figures)


if __name__ == "__main__":
    main()
