"""A budget in a plain loop, and who else is about: exceptions, profilers, threads, copies, other models; what stays."""

import copy
import gc
import pickle
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_remat import Remat
from tests.helpers.loops import Loop, assert_same_training, usual
from tests.helpers.pilots import (
    NOTHING,
    PLENTY,
    SCARCE,
    batch,
    infeasible,
    inside,
    net,
    never,
    pilot_of,
    planned,
    usual_without_copies,
)
from tests.helpers.training import Net

# ---------------------------------------------------------------------- exceptions


class Failure(Exception):
    pass


def fail(*args: Any) -> None:
    raise Failure


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("at", [[0], [1], [2], [0, 1, 2, 4]], ids=str)
@pytest.mark.parametrize("budget", [PLENTY, NOTHING])
@infeasible
def test_an_exception(at: list[int], where: str, budget: Any) -> None:
    """Traced, planned or measured: the step is over, and the next one is as in plain training."""

    def failing(loop: Loop, x: Tensor) -> None:
        fails = loop.steps - 1 in at
        layer = loop.model.layers[1]
        handle = None
        if fails and where == "forward":
            handle = layer.act.register_forward_hook(fail)
        elif fails:
            handle = layer.register_forward_hook(lambda module, args, out: out.register_hook(fail) and None)
        try:
            usual(loop, x)
        except Failure:
            loop.note()
            loop.optimizer.zero_grad()
        finally:
            if handle is not None:
                handle.remove()

    remat = Remat(budget=budget)
    assert_same_training(net, [batch(16)] * 8, failing, remat=remat)
    assert planned(remat)
    assert remat.plan is not None
    assert not pilot_of(remat).given_up


# ---------------------------------------------------------------------- others who are about


@pytest.mark.parametrize("around", ["step", "backward", "training", "schedule"])
def test_a_profiler_of_the_users(around: str) -> None:
    """It comes first: it sees what it would see, and the step is traced once it has ended."""
    seen: list[set[str]] = []
    scheduled = around == "schedule"

    def profiler() -> Any:
        return torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU],
            schedule=torch.profiler.schedule(wait=1, warmup=1, active=2, repeat=1) if scheduled else None,
            on_trace_ready=lambda p: seen.append({event.name for event in p.events()}),
        )

    remat = Remat(budget=PLENTY)
    loop = Loop(net(), remat)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if around in ("training", "schedule"):
            with profiler() as active:
                for _ in range(5):
                    usual_without_copies(loop)
                    active.step()
        elif around == "step":
            for _ in range(2):
                with profiler():
                    usual_without_copies(loop)
        else:
            for _ in range(2):
                loss = loop.loss(batch())
                with profiler():
                    loop.backward(loss)
                loop.update()
        for _ in range(4):
            usual_without_copies(loop)
    assert seen
    assert all("AddmmBackward0" in names for names in seen)
    told = [str(w.message) for w in caught if "profiler is running" in str(w.message)]
    assert len(told) == (around in ("step", "training"))
    assert planned(remat)
    assert not torch.autograd._profiler_enabled()
    assert remat.plan is not None
    assert remat.plan.plain.peak_bytes > 20_000


def test_two_engines_in_turn() -> None:
    """Each has its own model, plans and count."""

    def train(*engines: Remat | None) -> list[Any]:
        seen: list[Any] = []
        torch.manual_seed(1)
        loops = [Loop(net(), engine) for engine in engines]
        for n in (16, 16, 32, 16, 32, 16):
            for loop in loops:
                usual(loop, batch(n))
                seen += loop.seen
        return seen

    from tests.helpers.bits import difference_in_bits

    engines = Remat(budget=PLENTY), Remat(budget=SCARCE)
    assert difference_in_bits(train(None, None), train(*engines)) == []
    assert all(planned(engine) for engine in engines)


@pytest.mark.allow_leak("dispatch mode flags")  # PyTorch keeps one for all threads, and puts back what another one set
@pytest.mark.filterwarnings("ignore:policy='auto'. a profiler is running")  # that is the case
def test_a_loop_on_each_of_several_threads() -> None:
    """PyTorch has one profiler for the whole process: one step is traced at a time, and all get their plans."""
    from threading import Thread

    from tests.helpers.bits import difference_in_bits

    def train(remat: Remat | None, results: list[Any]) -> None:
        torch.manual_seed(0)  # of the whole process: no dropout here
        model = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)])
        with torch.no_grad():
            for i, p in enumerate(model.parameters()):
                p.copy_(torch.linspace(-1, 1 + i, p.numel()).reshape(p.shape))
        loop = Loop(model, remat)
        for _ in range(12):
            usual_without_copies(loop)
        results.append([p.detach() for p in model.parameters()])

    plain: list[Any] = []
    train(None, plain)
    ours: list[Any] = []
    engines = [Remat(budget=PLENTY) for _ in range(3)]
    threads = [Thread(target=train, args=(engine, ours)) for engine in engines]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(ours) == 3
    assert all(difference_in_bits(plain[0], one) == [] for one in ours)
    assert not torch.autograd._profiler_enabled()


def test_each_step_on_a_thread_of_its_own() -> None:
    """One engine, and no thread that lives on."""
    from threading import Thread

    remat = Remat(budget=PLENTY)
    loop = Loop(net(), remat)
    for way in (never, usual, never, usual, usual, usual):
        thread = Thread(target=way, args=(loop, batch(8)))
        thread.start()
        thread.join()
    assert planned(remat)


# ---------------------------------------------------------------------- copies, other models, what stays


@pytest.mark.parametrize("after", [1, 4])
def test_copies_in_the_middle_of_a_training(after: int) -> None:
    """A copy has the options and begins anew; the original goes on."""
    remat = Remat(budget=PLENTY)
    loop = Loop(net(), remat)
    for _ in range(after):
        usual(loop, batch(8))
    for made in (copy.deepcopy(remat), pickle.loads(pickle.dumps(remat))):
        assert made.plan is None
        assert_same_training(net, [batch(8)] * 4, remat=made)
        assert made.plan is not None
    model = copy.deepcopy(loop.model)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    usual(loop, batch(8))
    usual(loop, batch(8))
    assert planned(remat)


@pytest.mark.parametrize("other", [net, lambda: Net(24, 2)], ids=["of the same kind", "another"])
@pytest.mark.parametrize("bind", [False, True], ids=["met", "bound"])
def test_another_model_takes_the_place_of_the_first(other: Callable[[], nn.Module], bind: bool) -> None:
    """Its memory counts from then on, and the first one's goes."""
    from weakref import ref

    remat = Remat(budget=SCARCE)
    loop = assert_same_training(net, [batch(8)] * 4, remat=remat, bind=bind)
    first = ref(loop.model)
    del loop
    loop = assert_same_training(other, [batch(8)] * 9, remat=remat, bind=bind)
    gc.collect()
    assert first() is None
    assert planned(remat)
    parameters = sum(p.numel() * 4 for p in loop.model.parameters())
    assert pilot_of(remat).known.all[-1].parts["parameters"] == parameters
    assert len(remat.blocks) == len(loop.model.layers)


@pytest.fixture
def _no_collector() -> Iterator[None]:
    from tests.helpers.memory import no_collector

    with no_collector():
        yield


@pytest.mark.filterwarnings("ignore:policy='auto'. no backward was seen")  # that is the case
@pytest.mark.usefixtures("_no_collector")
@pytest.mark.parametrize(
    "way",
    ["usual", "inside", "never", "shapes"],
)
def test_nothing_stays(way: str) -> None:
    """After step 30 as many bytes and objects live as after step 6; no profiler, no hook on optimizers, no patch."""
    from torch.optim import optimizer as optimizers

    from tests.helpers.memory import LiveBytes, live_objects, live_records

    def step(number: int) -> None:
        if way == "inside":
            inside(loop, batch(8))
        elif way == "never":
            loop.loss(batch(8))
        elif way == "shapes":
            loop.backward(loop.loss(batch(8 + number % 3)))
            loop.update()
        else:
            usual_without_copies(loop)
        loop.losses.clear()

    backward, hooks = torch.autograd._engine_run_backward, dict(optimizers._global_optimizer_pre_hooks)
    with LiveBytes() as live:
        remat = Remat(budget=PLENTY)
        loop = Loop(net(), remat)
        for number in range(6 if way != "shapes" else 15):
            step(number)
        remat.close()  # of a trace that waits for its backward
        live_objects()
        before, objects = live.count(), live_objects()
        assert not live_records()
        for number in range(24):
            step(number)
        remat.close()
        after, grown = live.count(), live_objects()
    assert after == before
    assert not live_records()
    grown.subtract(objects)
    # Steps that never get a backward are traced now and then, and PyTorch's profilers are cycles.
    assert way == "never" or not {name: n for name, n in grown.items() if n >= 12}
    assert not torch.autograd._profiler_enabled()
    assert optimizers._global_optimizer_pre_hooks == hooks
    assert torch.autograd._engine_run_backward is backward


def test_an_engine_that_is_let_go_of_in_the_middle_leaves_nothing() -> None:
    """Of a step that is traced and whose backward never comes."""
    from torch.optim import optimizer as optimizers

    backward, hooks = torch.autograd._engine_run_backward, dict(optimizers._global_optimizer_pre_hooks)
    for _ in range(2):
        never(Loop(net(), Remat(budget=PLENTY)), batch(8))
        assert not torch.autograd._profiler_enabled()
        assert optimizers._global_optimizer_pre_hooks == hooks
        assert torch.autograd._engine_run_backward is backward


def test_the_report() -> None:
    """Predicted and measured peak and time, once there is a plan."""
    remat = Remat(budget=SCARCE)
    loop = Loop(net(), remat)
    assert "no step yet" in str(remat.report())
    for _ in range(5):
        usual_without_copies(loop)
    report = remat.report()
    facts = report.facts
    assert facts.measured_peak_bytes is not None
    assert abs(facts.measured_peak_bytes - facts.predicted_peak_bytes) < 0.02 * facts.predicted_peak_bytes
    assert facts.measured_extra_seconds is not None
    assert facts.measured_extra_seconds > 0
    assert dict(facts.static_parts)["parameters"] > 0
    assert "layers" in str(report)


@pytest.mark.filterwarnings("ignore:policy='auto'. a profiler is running")  # the first one's step is traced first
def test_two_models_forward_before_either_goes_backward() -> None:
    """The backward, and the optimizer's step, of the one are not the end of the other's step."""
    engines = [Remat(budget=PLENTY), Remat(budget=PLENTY)]
    loops = [Loop(net(), engine) for engine in engines]
    for _ in range(5):
        losses = [loop.loss(batch(16)) for loop in loops]
        for loop, loss in zip(loops, losses, strict=True):
            loop.backward(loss)
            loop.update()
    assert all(planned(engine) for engine in engines)
    assert all(engine.plan is not None and engine.plan.plain.peak_bytes > 40_000 for engine in engines)
