"""Steps under plans of one's own, and all that a step leaves behind, to compare with the plain step."""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from time import process_time
from typing import Any

import torch
from torch import Tensor, nn

from lightning_remat import Remat
from lightning_remat.engine.planned import script_for
from lightning_remat.engine.verify import same_bits
from lightning_remat.planning.moving import fetch_order
from lightning_remat.planning.simulation import simulate
from lightning_remat.planning.simulator import Simulator
from lightning_remat.planning.trace import Trace
from lightning_remat.planning.transfer import Transfer
from lightning_remat.runtime.memory import measure_peak
from lightning_remat.runtime.static import static_parts
from tests.helpers.zoo import Batch, loss_of

CLOSE = 0.002
"""How far a measured peak may be from a simulated one. As a rule they agree to the byte."""

BUDGET = 2**40
"""For those who want a traced step and an engine that plans, and nothing from the planner."""


class Run:
    """A model that is trained, plainly or under an engine.

    Args:
        model: trained as it is.
        batch: of every step.
        remat: the engine; None for the plain run.
    """

    def __init__(self, model: nn.Module, batch: Batch, remat: Remat | None = None) -> None:
        self.model = model
        self.batch = batch
        self.remat = remat
        self.optimizer = torch.optim.AdamW(model.parameters())
        self.loss = torch.empty(0)

    def forward_backward(self) -> None:
        """What a peak is about."""
        with self.remat or nullcontext():
            loss = loss_of(self.model, self.batch)
        loss.backward()
        self.loss = loss.detach()

    def finish(self) -> None:
        """The rest of a step."""
        self.optimizer.step()
        self.forget()

    def forget(self) -> None:
        """The rest of a step that changes no weights."""
        self.optimizer.zero_grad(set_to_none=True)

    def step(self, seed: int) -> float:
        """A whole step; returns processor seconds of forward and backward."""
        torch.manual_seed(seed)
        start = process_time()
        self.forward_backward()
        seconds = process_time() - start
        self.finish()
        return seconds

    def measured(self, seed: int) -> int:
        """The peak of forward and backward, counted from outside; what they leave is still there afterwards."""
        torch.manual_seed(seed)
        return measure_peak(self.forward_backward).peak_bytes

    def left(self) -> dict[str, Tensor | None]:
        """Copies of what forward and backward leave behind."""
        found: dict[str, Tensor | None] = {"loss": self.loss.clone(), "random state": torch.get_rng_state()}
        for name, p in self.model.named_parameters():
            found[f"gradient of {name}"] = None if p.grad is None else p.grad.clone()
        found |= {f"buffer {name}": b.clone() for name, b in self.model.named_buffers()}
        return found

    def static_bytes(self) -> int:
        """What is there between steps."""
        return sum(static_parts([self.model], [self.optimizer], torch.device("cpu")).values())


def differences(expected: dict[str, Tensor | None], found: dict[str, Tensor | None]) -> list[str]:
    """Names of what is not the same in every bit."""
    wrong = []
    for name in expected.keys() | found.keys():
        a, b = expected.get(name), found.get(name)
        if (a is None) != (b is None) or (a is not None and b is not None and not same_bits(a, b)):
            wrong.append(name)
    return sorted(wrong)


@dataclass
class Expected:
    """A step whose result is known, from weights that stay: any plan must give the same."""

    state: dict[str, Tensor]
    left: dict[str, Tensor | None]
    seed: int

    @classmethod
    def of(cls, plain: Run, seed: int) -> Expected:
        """Run one plainly."""
        state = {name: t.clone() for name, t in plain.model.state_dict().items()}
        torch.manual_seed(seed)
        plain.forward_backward()
        expected = cls(state, plain.left(), seed)
        plain.forget()
        plain.model.load_state_dict(state)
        return expected

    def under(
        self, run: Run, drop: Sequence[bool], move: Sequence[bool] = (), transfer: Transfer | None = None
    ) -> tuple[int, list[str]]:
        """Run it under a plan; returns its measured peak, and the names of what differs."""
        run.model.load_state_dict(self.state)
        follow(run.remat, drop, move, transfer)
        peak = run.measured(self.seed)
        wrong = differences(self.left, run.left())
        run.forget()
        return peak, wrong


def follow(
    remat: Remat | None, drop: Sequence[bool], move: Sequence[bool] = (), transfer: Transfer | None = None
) -> None:
    """Make an engine that has traced a step, and planned for it, follow another plan from now on."""
    known = _known(remat)
    known.script = script_for(known.functions, [op.size for op in known.trace.ops], drop, move)
    known.result = replace(known.result, transfer=transfer)
    known.transfer = transfer
    known.order = fetch_order(known.trace, drop, move, transfer) if transfer is not None else []


def trace_of(remat: Remat | None) -> Trace:
    """The step that an engine has traced."""
    trace: Trace = _known(remat).trace
    return trace


def measured_peak(remat: Remat) -> int:
    """What an engine has measured of its own plan."""
    peak: int = _known(remat).measured.peak_bytes
    return peak


def _known(remat: Remat | None):
    assert remat is not None
    return remat._pilot.known.roots[False]


def random_plan(trace: Trace, generator: random.Random) -> list[bool]:
    """Drop a random share of all ops, or whole stretches of them as good plans do."""
    share = generator.random()
    if generator.random() < 0.5:
        return [op.droppable and generator.random() < share for op in trace.ops]
    length = generator.randrange(2, max(3, len(trace.ops) // 4))
    chosen = [generator.random() < share for _ in range(len(trace.ops) // length + 1)]
    return [op.droppable and chosen[o // length] for o, op in enumerate(trace.ops)]


class Traced:
    """A model of which one step has been traced, and which is ready for steps under any plan."""

    def __init__(self, model: nn.Module, batch: Batch, **options: Any) -> None:
        self.run = Run(copy.deepcopy(model), batch, Remat(policy="auto", budget=BUDGET, **options))
        pilot: Any = self.run.remat._pilot
        torch.manual_seed(1)
        self.run.forward_backward()
        tracer = pilot._tracer
        self.trace = tracer.trace()
        self.lean_measured = tracer.measured().peak_bytes
        self.lean_simulated = Simulator(self.trace, tracer.tape.drop(), tracer.tape.kept_values).run().peak
        kept = tracer.tape.kept_values
        self.full = [op.droppable and not kept.intersection(op.outputs) for op in self.trace.ops]
        self.run.finish()
        plain = Run(copy.deepcopy(self.run.model), batch)
        plain.step(2)  # what PyTorch makes once is there from now on
        plain = Run(copy.deepcopy(self.run.model), batch)
        self.expected = Expected.of(plain, 3)
        self.run.step(2)

    def check(self, drop: list[bool]) -> None:
        """Exact, and as large as the simulator says."""
        measured, differing = self.expected.under(self.run, drop)
        assert differing == []
        assert abs(simulate(self.trace, drop).peak - measured) <= CLOSE * measured


def check_all(traced: Traced, plans: int) -> None:
    """The traced step, plain, all but borders dropped, everything dropped, and random plans."""
    assert traced.lean_simulated == traced.lean_measured
    traced.check([False] * len(traced.trace.ops))
    traced.check(traced.full)
    traced.check([op.droppable for op in traced.trace.ops])
    generator = random.Random(1)
    for _ in range(plans):
        traced.check(random_plan(traced.trace, generator))
