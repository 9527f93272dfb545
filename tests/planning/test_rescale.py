"""Traces of one shape turned into estimates for another, held against what a step of that shape takes."""

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn

from lightning_remat import Remat
from lightning_remat.planning.plan import PlanResult, judged
from lightning_remat.planning.rescale import rescaled
from lightning_remat.planning.simulation import simulate
from lightning_remat.planning.trace import Trace
from lightning_remat.runtime.memory import measure_peak
from lightning_remat.runtime.tuning.known import Known
from lightning_remat.runtime.tuning.pilot import Pilot
from tests.helpers.loops import Loop
from tests.helpers.traces import transformer_trace
from tests.helpers.training import Net


def rows(count: int, columns: int = 8) -> Tensor:
    return torch.linspace(-1, 1, count * columns).sin().reshape(count, columns)


class Encoder(nn.Module):
    """Attention, whose weights grow with the square of the length, and dropout."""

    def __init__(self, fast: bool = True) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 32)
        self.layers = nn.ModuleList([nn.TransformerEncoderLayer(32, 2, 64, batch_first=True) for _ in range(3)])
        self.head = nn.Linear(32, 50)
        self.fast = fast

    def forward(self, x: Tensor) -> Tensor:
        backends = [torch.nn.attention.SDPBackend.MATH] if not self.fast else list(_ALL)
        with torch.nn.attention.sdpa_kernel(backends):
            x = self.embed(x)
            for layer in self.layers:
                x = layer(x)
        return self.head(x).log_softmax(-1)


_ALL = (torch.nn.attention.SDPBackend.FLASH_ATTENTION, torch.nn.attention.SDPBackend.MATH)


class Pictures(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *[nn.Sequential(nn.Conv2d(c, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(True)) for c in (3, 8, 8)]
        )
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x).mean((2, 3)))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(8, 16, batch_first=True)
        self.layers = nn.ModuleList([Net(16, 2)])
        self.down = nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[0](self.down(self.gru(x)[0]).flatten(0, 1))


def sequence(batch: int, length: int) -> Tensor:
    return rows(batch * length).reshape(batch, length, 8)


def picture(batch: int, side: int) -> Tensor:
    return rows(batch * 3 * side, side).reshape(batch, 3, side, side)


CASES: dict[str, tuple[Callable[[], nn.Module], Tensor, list[Tensor]]] = {
    "rows": (lambda: Net(16, 3), rows(64), [rows(8), rows(32), rows(96), rows(256)]),
    "batch": (Encoder, sequence(4, 16), [sequence(2, 16), sequence(8, 16)]),
    "length": (Encoder, sequence(4, 16), [sequence(4, 8), sequence(4, 24), sequence(4, 48)]),
    "length, all weights": (lambda: Encoder(False), sequence(4, 16), [sequence(4, 8), sequence(4, 48)]),
    "both": (Encoder, sequence(4, 16), [sequence(8, 8), sequence(2, 48)]),
    "pictures": (Pictures, picture(4, 16), [picture(2, 16), picture(8, 16)]),
    "pictures of another size": (Pictures, picture(4, 16), [picture(3, 12), picture(4, 24)]),
}


def step_of(loop: Loop, x: Tensor) -> Callable[[], None]:
    def step() -> None:
        loop.backward(loop.loss(x))
        loop.update()

    return step


def trained_once(make: Callable[[], nn.Module], x: Tensor) -> tuple[Loop, Known]:
    """A training after its first step, which is traced; it is not planned for."""
    remat = Remat(budget="1GiB")
    loop = Loop(make(), remat)
    step_of(loop, x)()
    pilot = remat._pilot
    assert isinstance(pilot, Pilot)
    pilot._conclude()
    (known,) = pilot.known.all
    return loop, known


def traced(make: Callable[[], nn.Module], x: Tensor) -> Trace:
    return trained_once(make, x)[1].trace


def measured(make: Callable[[], nn.Module], drop: Sequence[bool], x: Tensor) -> int:
    """Peak of a step under a plan, above what is there before it."""
    loop, known = trained_once(make, x)
    plan = judged(known.trace, drop)
    known.follow(
        PlanResult(
            trace=known.trace, static_bytes=0, budget_bytes=2**40, chosen=plan, front=(plan,), plain=plan
        ), 0, {},
    )  # fmt: skip
    step_of(loop, x)()
    loop.losses.clear()
    return measure_peak(step_of(loop, x)).peak_bytes


def plans(trace: Trace) -> dict[str, list[bool]]:
    return {
        "keep all": [False] * len(trace.ops),
        "drop cheap ops": [op.droppable and op.kind == "cheap" for op in trace.ops],
    }


@pytest.mark.parametrize("name", CASES)
def test_the_peak_at_another_size(name: str) -> None:
    """Within 5 percent; convolutions take workspaces that do not grow with the picture."""
    make, x, others = CASES[name]
    share = 0.1 if name == "pictures of another size" else 0.05
    trace = traced(make, x)
    for other in (x, *others):
        sizes = [op.size for op in traced(make, other).ops]
        estimate = rescaled(trace, sizes)
        for plan, drop in plans(trace).items():
            predicted, real = simulate(estimate, drop).peak, measured(make, drop, other)
            assert abs(predicted - real) <= share * real + 1024, f"{tuple(other.shape)}, {plan}: {predicted} for {real}"


def test_the_same_size_is_the_same_trace() -> None:
    trace = traced(lambda: Net(16, 3), rows(64))
    again = rescaled(trace, [op.size for op in trace.ops])
    assert again == trace


def test_there_and_back() -> None:
    """Sizes scale as they are, whatever rounding does on the way."""
    trace = transformer_trace(3)
    sizes = [op.size for op in trace.ops]
    double = rescaled(trace, [2 * s for s in sizes])
    assert double.nbytes == [2 * b for b in trace.nbytes]
    assert [op.seconds for op in double.ops] == [2 * op.seconds for op in trace.ops]
    back = rescaled(double, sizes)
    assert back.nbytes == trace.nbytes
    plain = [False] * len(sizes)
    assert abs(simulate(back, plain).peak - simulate(trace, plain).peak) <= 0.01 * simulate(trace, plain).peak


@pytest.mark.parametrize("factor", [0.01, 0.5, 1.7, 40])
def test_the_books_close(factor: float) -> None:
    """What is left after the step is what the gradients of weights take, at any size and under any plan."""
    trace = transformer_trace(3, dropout=True)
    estimate = rescaled(trace, [round(op.size * factor) for op in trace.ops])
    for drop in ([False] * len(trace.ops), [op.droppable for op in trace.ops]):
        levels = simulate(estimate, drop, timeline=True).levels
        assert min(levels) >= -64 * len(trace.events)  # a byte of rounding here and there


def test_sizes_that_are_not_known_change_nothing() -> None:
    trace = transformer_trace(2)
    again = rescaled(trace, [-1] * len(trace.ops))
    assert again.nbytes == trace.nbytes
    empty = rescaled(trace, [0] * len(trace.ops))
    assert empty.nbytes == trace.nbytes


def test_another_number_of_ops_is_refused() -> None:
    trace = transformer_trace(2)
    with pytest.raises(ValueError, match="zip"):
        rescaled(trace, [1])
