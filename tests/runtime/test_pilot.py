"""A budget in a plain loop: whatever the steps are like, every bit is that of plain training, and plans are found."""

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
from lightning_remat.runtime.memory import measure_peak
from lightning_remat.runtime.pilot import MOST_SEQUENCES, Pilot
from tests.helpers.loops import Loop, assert_same_training, run, usual
from tests.helpers.training import Net

PLENTY = "1GiB"
SCARCE = 150_000
"""Less than what the models here take if all is kept, and more than the least they need."""
NOTHING = 1
MANY = 256
"""Rows of a batch whose activations are most of what a step takes."""

BUDGETS = pytest.mark.parametrize("budget", [PLENTY, SCARCE, NOTHING])
infeasible = pytest.mark.filterwarnings("ignore:policy='auto'. budget=.* is not feasible")
"""Said where a test is about something else."""


def net() -> nn.Module:
    return Net(width=16, depth=3)


def batch(rows: int = 64) -> Tensor:
    return torch.linspace(-1, 1, rows * 8).sin().reshape(rows, 8)


def pilot_of(remat: Remat) -> Pilot:
    assert isinstance(remat._pilot, Pilot)
    return remat._pilot


def planned(remat: Remat) -> bool:
    """Whether the last step followed a plan to its end."""
    pilot = pilot_of(remat)
    return pilot._active is not None and not pilot.tape.lost and pilot._learning is None


class Translating(nn.Module):
    """Two lengths that vary for themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 16)
        self.encoder = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.decoder = nn.TransformerDecoderLayer(16, 2, 32, batch_first=True)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        return self.decoder(self.embed(target), self.encoder(self.embed(source)))


class Varying(nn.Module):
    """Runs other ops in every one of ``period`` steps."""

    def __init__(self, period: int) -> None:
        super().__init__()
        self.net = Net(16, 2)
        self.other = nn.Sequential(*[nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.1), nn.Linear(16, 8)) for _ in "ab"])
        self.period = period
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        turn = self.calls % self.period
        self.calls += 1
        if not turn:
            return self.net(x)
        for _ in range(turn):
            x = x.sin()
        return self.other(x)


# ---------------------------------------------------------------------- budgets


def plain_peak() -> int:
    """Of a step in which the optimizer has its state, with all that is there between steps."""
    loop = run(net, [batch(MANY)] * 2)
    x = batch(MANY)
    step = measure_peak(lambda: usual_without_copies(loop, x)).peak_bytes
    return step + sum(4 * p.numel() for p in loop.model.parameters()) * 3


def usual_without_copies(loop: Loop, x: Tensor | None = None) -> None:
    loop.backward(loop.loss(batch() if x is None else x))
    loop.update()


@pytest.mark.parametrize("bind", [False, True], ids=["met", "bound"])
@pytest.mark.parametrize("share", [1.0, 0.6, 0.35])
@infeasible
def test_every_bit_and_the_peak(share: float, bind: bool) -> None:
    """With dropout, BatchNorm and an in-place activation; as long as there is a plan for it the budget holds."""
    budget = int(share * plain_peak())
    remat = Remat(budget=budget)
    loop = assert_same_training(net, [batch(MANY)] * 7, remat=remat, bind=bind)
    assert planned(remat)
    assert remat.plan is not None
    assert remat.plan.budget_bytes == budget
    assert remat.stats.replayed_ops == remat.stats.recorded_ops
    feasible = remat.plan.peak_bytes <= budget
    assert feasible == (share > 0.5)
    x = batch(MANY)
    measured = measure_peak(lambda: usual_without_copies(loop, x)).peak_bytes
    assert measured <= 1.02 * remat.plan.chosen.peak_bytes + 1024


@pytest.mark.parametrize("budget", ["100%", PLENTY])
def test_with_room_enough_nothing_is_dropped(budget: str) -> None:
    remat = Remat(budget=budget)
    assert_same_training(net, [batch()] * 4, remat=remat)
    assert remat.stats.recorded_ops == remat.stats.replayed_ops == 0
    assert planned(remat)


def test_an_infeasible_budget_is_named_once_and_training_goes_on() -> None:
    """With the least that a plan takes, what that consists of, and the way out."""
    remat = Remat(budget="20KiB")
    with pytest.warns(UserWarning, match="not feasible") as caught:
        assert_same_training(net, [batch()] * 6, remat=remat)
    assert len(caught) == 1
    message = str(caught[0].message)
    for part in ("budget=20.0 KiB is not feasible", "parameters", "optimizer state", "activations", "smaller batch"):
        assert part in message
    assert remat.plan is not None
    assert remat.plan.chosen.peak_bytes == remat.plan.smallest.peak_bytes
    assert planned(remat)
    # It points at the line that begins the step, not at one of ours.
    assert caught[0].filename.endswith("loops.py")


def test_the_memory_between_steps_counts_as_soon_as_it_is_there() -> None:
    """The optimizer's state comes with its first step, after the first plan maybe."""

    def rare(loop: Loop, x: Any) -> None:
        loop.backward(loop.loss(x))
        loop.note()
        if loop.steps % 4 == 0:
            loop.update()

    remat = Remat(budget=2 * SCARCE)
    loop = assert_same_training(net, [batch()] * 14, rare, remat=remat)
    state = sum(t.numel() * 4 for s in loop.optimizer.state.values() for t in s.values())
    for known in pilot_of(remat).known.roots.values():
        assert known.parts["optimizer state"] == state
        assert known.parts["gradients"] == (known.parts["parameters"] if known is remat_root(remat, True) else 0)


def remat_root(remat: Remat, accumulating: bool) -> Any:
    return pilot_of(remat).known.roots[accumulating]


# ---------------------------------------------------------------------- shapes and sequences

SHAPES = {
    "smaller last": [64, 64, 64, 20, 64, 64, 20],
    "larger later": [20, 20, 20, 64, 20, 64, 64],
    "alternating": [64, 32, 64, 32, 64, 32, 64],
    "another each time": [64, 8, 10, 32, 65, 12, 90, 40],
    "one row more": [2, 2, 3, 2, 3, 3],
}


@BUDGETS
@pytest.mark.parametrize("rows", SHAPES.values(), ids=SHAPES)
@infeasible
def test_batches_of_several_sizes(rows: list[int], budget: Any) -> None:
    """A new size is learned in one step; from the next time on it has a plan of its own, without being traced."""
    remat = Remat(budget=budget)
    assert_same_training(net, [batch(n) for n in rows], remat=remat)
    pilot = pilot_of(remat)
    assert len(pilot.known.all) == len(set(rows)) - (0 if planned(remat) else 1)
    assert sum(known.traced for known in pilot.known.all) == 1
    assert planned(remat) == (rows[-1] in rows[:-1])


@pytest.mark.parametrize("first", [0, 1])
@infeasible
def test_a_first_batch_that_says_little(first: int) -> None:
    """Nothing can be foreseen from an empty batch, and little from a small one: a larger one is traced as well."""
    remat = Remat(budget=SCARCE)

    def make() -> nn.Module:
        return nn.Sequential(*[nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 8)) for _ in range(3)])

    assert_same_training(make, [batch(n) for n in (first, 64, 64, 64, first, 64)], remat=remat)
    assert planned(remat)
    assert [known.traced for known in pilot_of(remat).known.all] == [True, True]
    assert remat.stats.recorded_ops > 0


@pytest.mark.parametrize("budget", [PLENTY, NOTHING])
@infeasible
def test_two_lengths_that_vary(budget: Any) -> None:
    def pair(source: int, target: int) -> tuple[Tensor, Tensor]:
        return batch(2 * source).reshape(2, source, 8), batch(2 * target).reshape(2, target, 8)

    lengths = [(4, 5), (4, 5), (4, 7), (6, 5), (6, 7), (4, 7), (6, 7), (4, 5)]
    remat = Remat(budget=budget)
    assert_same_training(Translating, [pair(*both) for both in lengths], remat=remat)
    assert planned(remat)
    assert len(pilot_of(remat).known.all) == 4


@BUDGETS
@infeasible
def test_two_sequences_of_ops_in_turn(budget: Any) -> None:
    """As in adversarial training: both get plans, also if they alternate strictly."""
    remat = Remat(budget=budget)
    assert_same_training(lambda: Varying(2), [batch()] * 9, remat=remat)
    pilot = pilot_of(remat)
    assert [known.traced for known in pilot.known.all] == [True, True]
    assert planned(remat)
    assert not pilot._to_trace


def test_another_sequence_at_intervals() -> None:
    """Too rare to come up in the next few steps; it is waited for."""
    remat = Remat(budget=PLENTY)

    class Fifth(Varying):
        def forward(self, x: Tensor) -> Tensor:
            self.period = 2 if self.calls % 10 == 9 else 1
            return super().forward(x)

    assert_same_training(lambda: Fifth(1), [batch(4)] * 40, remat=remat)
    assert len(pilot_of(remat).known.all) == 2
    assert planned(remat)


def test_a_sequence_that_comes_up_once_is_not_looked_for_for_ever() -> None:
    """A few steps are traced in the hope for it, a few times."""
    remat = Remat(budget=PLENTY)

    class Rarely(Varying):
        def forward(self, x: Tensor) -> Tensor:
            self.period = 2 if self.calls in range(3, 200, 10) else 1
            return super().forward(x)

    traced = []
    loop = Loop(Rarely(1), remat)
    for _ in range(70):
        usual(loop, batch(4))
        traced.append(pilot_of(remat)._active is None)
    assert 4 < sum(traced) < 20
    assert not any(traced[-10:])


def test_another_sequence_in_every_step() -> None:
    """It is given up, which is said once; what follows is a fixed policy."""
    remat = Remat(budget=PLENTY)
    with pytest.warns(UserWarning, match=f"{MOST_SEQUENCES + 1} different sequences.*fixed policy") as caught:
        assert_same_training(lambda: Varying(100), [batch(8)] * 18, remat=remat)
    assert len(caught) == 1
    assert pilot_of(remat).given_up
    assert "no plan" in remat.summary
    assert remat.plan is None
    assert remat.stats.recorded_ops > 0
    assert str(remat.report())


# ---------------------------------------------------------------------- ways in which a step can go


def accumulated(loop: Loop, x: Tensor) -> None:
    loop.backward(loop.loss(x))
    loop.note()
    if loop.steps % 3 == 0:
        loop.update()


def zeroed(loop: Loop, x: Tensor) -> None:
    loop.backward(loop.loss(x))
    loop.note()
    loop.optimizer.step()
    loop.optimizer.zero_grad(set_to_none=False)


def two_roots(loop: Loop, x: Tensor) -> None:
    """The loop calls the parts of its model one by one."""
    with loop.recorded():
        h = loop.model.stem(x)
        for layer in loop.model.layers:
            h = layer(h)
        loss = loop.model.head(h).square().mean()
    loop.backward(loss)
    loop.note()
    loop.update()


def two_losses(loop: Loop, x: Tensor) -> None:
    with loop.recorded():
        out = loop.model(x)
        first, second = out.square().mean(), out.sin().sum()
    first.backward(retain_graph=True)
    loop.note()
    second.backward()
    loop.note()
    loop.update()


def retained(loop: Loop, x: Tensor) -> None:
    """A graph that outlives its step, with its loss."""
    loss = loop.loss(x)
    loop.backward(loss, retain_graph=True)
    loop.held = loss
    loop.note()
    loop.update()


def inside(loop: Loop, x: Tensor) -> None:
    with loop.recorded():
        loss = loop.model(x).square().mean()
        loss.backward()
        loop.optimizer.step()
        loop.optimizer.zero_grad()
    loop.losses.append(loss.detach())


def two_updates_inside(loop: Loop, x: Tensor) -> None:
    """Forward, backward and optimizer twice in one step."""
    with loop.recorded():
        for part in (x, x.flip(0)):
            loss = loop.model(part).square().mean()
            loss.backward()
            loop.optimizer.step()
            loop.optimizer.zero_grad()
    loop.losses.append(loss.detach())


def penalty(loop: Loop, x: Tensor) -> None:
    x = x.clone().requires_grad_()
    with loop.recorded():
        loss = loop.model(x).square().mean()
        (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
        loss = loss + gradient.square().sum()
    loop.backward(loss)
    loop.note()
    loop.update()


def penalty_after(loop: Loop, x: Tensor) -> None:
    """The gradient is taken after the step was left, with a graph, and a second backward goes through that."""
    x = x.clone().requires_grad_()
    loss = loop.loss(x)
    (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
    (loss + gradient.square().sum()).backward()
    loop.note()
    loop.update()


def now_and_then(loop: Loop, x: Tensor) -> None:
    """Every second loss is only looked at."""
    loss = loop.loss(x)
    if loop.steps % 3:
        loop.backward(loss)
        loop.note()
        loop.update()


def never(loop: Loop, x: Tensor) -> None:
    loop.loss(x)


def validated(loop: Loop, x: Tensor) -> None:
    usual(loop, x)
    loop.model.eval()
    with torch.no_grad(), loop.recorded():
        loop.losses.append(loop.model(x).sum())
    loop.model.train()


def evaluated_with_gradients(loop: Loop, x: Tensor) -> None:
    usual(loop, x)
    loop.model.eval()
    (gradient,) = torch.autograd.grad(loop.loss(x), [loop.model.head.weight])
    loop.losses.append(gradient)
    loop.model.train()


def recorded_twice(loop: Loop, x: Tensor) -> None:
    """A step inside a step is the same step."""
    with loop.recorded():
        usual(loop, x)


def autocast(loop: Loop, x: Tensor) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        loss = loop.loss(x)
    loop.backward(loss)
    loop.note()
    loop.update()


def searching(loop: Loop, x: Tensor) -> None:
    """An optimizer that runs the step itself, several times."""
    if not isinstance(loop.optimizer, torch.optim.LBFGS):
        loop.optimizer = torch.optim.LBFGS(loop.model.parameters(), lr=0.1, max_iter=3)

    def closure() -> Tensor:
        loop.optimizer.zero_grad()
        loss = loop.loss(x)
        loop.backward(loss)
        return loss

    loop.optimizer.step(closure)


WAYS = (
    accumulated, zeroed, two_roots, two_losses, retained, inside, two_updates_inside, penalty, penalty_after,
    now_and_then, never, validated, evaluated_with_gradients, recorded_twice, autocast, searching,
)  # fmt: skip


@pytest.mark.filterwarnings("ignore:policy='auto'. no backward was seen")
@pytest.mark.parametrize("budget", [PLENTY, NOTHING])
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@infeasible
def test_every_bit_however_a_step_goes(way: Callable[[Loop, Tensor], None], budget: Any) -> None:
    remat = Remat(budget=budget)
    assert_same_training(net, [batch(16)] * 8, way, remat=remat)
    assert planned(remat) or way is never
    assert not torch.autograd._profiler_enabled()
    remat.close()


def test_steps_whose_backward_nobody_sees() -> None:
    """Such as one on another thread: there is no plan, which is said once."""
    from threading import Thread

    def elsewhere(loop: Loop, x: Tensor) -> None:
        loss = loop.loss(x)
        thread = Thread(target=loss.backward)
        thread.start()
        thread.join()
        loop.note()
        loop.update()

    remat = Remat(budget=PLENTY)
    with pytest.warns(UserWarning, match="no backward was seen.*fixed policy") as caught:
        assert_same_training(net, [batch(16)] * 8, elsewhere, remat=remat)
    assert len(caught) == 1
    assert remat.stats.replayed_ops > 0
    remat.close()


def test_verify_under_a_budget() -> None:
    """What gives other bits is kept, in the plan as well."""
    remat = Remat(budget=NOTHING, verify=True)
    with pytest.warns(UserWarning, match="not feasible"):
        assert_same_training(net, [batch(16)] * 5, remat=remat)
    assert remat.verifier is not None
    assert remat.verifier.checked
    assert not remat.verifier.different
    assert planned(remat)


def test_an_op_that_differs_is_kept_by_every_plan() -> None:
    remat = Remat(budget=NOTHING, verify=True)
    loop = Loop(net(), remat)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for i in range(5):
            usual(loop, batch(16))
            if i == 2:
                remat._never_again("aten.addmm.default")
    assert remat.plan is not None
    dropped = {op.name for op, drop in zip(remat.plan.trace.ops, remat.plan.chosen.drop, strict=True) if drop}
    assert dropped
    assert "aten.addmm.default" not in dropped


def test_a_model_in_which_nothing_can_be_dropped() -> None:
    """There is nothing to plan, and tracing comes to an end."""
    remat = Remat(budget=PLENTY)
    assert_same_training(lambda: nn.Linear(8, 2), [batch(4)] * 4, remat=remat)
    assert planned(remat)
    assert str(remat.report())


def test_a_step_without_a_model() -> None:
    """Tensors only."""
    weight = torch.ones(8, requires_grad=True)
    plain = torch.autograd.grad(((batch() * weight).sin() * weight).sum(), weight)[0]
    remat = Remat(budget=PLENTY)
    for _ in range(4):
        with remat:
            loss = ((batch() * weight).sin() * weight).sum()
        assert torch.equal(torch.autograd.grad(loss, weight)[0], plain)
    assert planned(remat)


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
@pytest.mark.filterwarnings("ignore:policy='auto'. a profiler is running")
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


@pytest.mark.filterwarnings("ignore:policy='auto'. no backward was seen")
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
    facts = report.facts  # type: ignore[union-attr]
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
