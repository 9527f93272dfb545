"""What a run has learned as plain data: there and back, cut to size, damaged, or from another run than this one."""

import copy
import gc
import io
import json
import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import optimizer as optimizer_module
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lightning_remat import ConfigurationError, Offload, Remat
from lightning_remat.planning.planfile import PlanFile
from lightning_remat.runtime.static import Optimizers
from lightning_remat.runtime.tuning import pilot as pilot_module
from lightning_remat.runtime.tuning.known import KnownSteps
from lightning_remat.runtime.tuning.remembering import VERSION
from lightning_remat.runtime.tuning.written import overload, pack, read_steps, unpack, write_steps
from lightning_remat.sizes import format_bytes
from tests.helpers.bits import difference_in_bits
from tests.helpers.loops import Loop, run, usual
from tests.helpers.pilots import MANY, NOTHING, PLENTY, batch, infeasible, net, pilot_of, planned
from tests.helpers.seed import seed_everything
from tests.helpers.training import Net

ROOM = 300_000
"""Less than what all activations take, and more than the least."""
LITTLE = 100_000
"""Less than the least, and more than what is there between steps."""

SHAPES = (64, 64, MANY, 64, 100, MANY, 30, 30, 100)
# What is damaged on purpose is said to be; that it is said has a test of its own.
damaged = pytest.mark.filterwarnings("ignore:the state of recomputation in the checkpoint cannot be used")
pytestmark = infeasible


@contextmanager
def nothing_traced(unless: bool = False) -> Iterator[None]:
    """Fail where a step would be traced."""
    with pytest.MonkeyPatch.context() as patch:
        if not unless:
            patch.setattr(pilot_module, "Tracer", _tracer)
        yield


def _tracer(*args: Any, **kwargs: Any) -> None:
    raise AssertionError("a step is traced")


def learned(*rows: int) -> Remat:
    """An engine that has trained."""
    remat = Remat(budget=ROOM)
    remat.loop = run(net, [batch(n) for n in rows or SHAPES], usual, remat)  # type: ignore[attr-defined]  # lives on
    return remat


_STATES: dict[Any, dict[str, Any]] = {}


def state_after(*rows: int) -> dict[str, Any]:
    if rows not in _STATES:
        _STATES[rows] = learned(*rows).state_dict()
    return copy.deepcopy(_STATES[rows])


def exact_with(
    state: Any, *rows: int, bind: bool = False, budget: Any = ROOM, model: Any = net, traced: bool = False
) -> Remat:
    """Fail unless training that starts from a state is plain training in every bit, and traces nothing."""
    batches = [batch(n) for n in rows or (64, MANY, 64, 100)]
    plain = run(model, batches)
    remat = Remat(budget=budget)
    remat.load_state_dict(state)
    with nothing_traced(unless=traced):
        ours = run(model, batches, usual, remat, bind=bind)
    assert difference_in_bits(plain.seen, ours.seen) == []
    remat.loop = ours  # type: ignore[attr-defined]  # lives on
    return remat


@pytest.mark.parametrize("rows", [(), (64,), (64, 64), SHAPES], ids=str)
def test_there_and_back(rows: tuple[int, ...]) -> None:
    """Through JSON, or through a file that is read with weights_only, and then written again."""
    remat = learned(*rows) if rows else Remat(budget=ROOM)
    state = remat.state_dict()
    assert state["version"] == VERSION
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    assert torch.load(file, weights_only=True) == state
    again = Remat(budget=ROOM)
    again.load_state_dict(json.loads(json.dumps(state)))
    assert again.state_dict() == state
    assert (again.plan is None) == (len(rows) < 2)
    if again.plan is not None and remat.plan is not None:
        assert again.plan == remat.plan
        assert again.summary.split(",")[0] == remat.summary.split(",")[0]


@pytest.mark.parametrize("bind", [False, True])
@pytest.mark.parametrize("rows", [(64,), (64, 64), SHAPES], ids=str)
def test_training_goes_on_in_every_bit_and_traces_nothing(rows: tuple[int, ...], bind: bool) -> None:
    remat = exact_with(state_after(*rows), 64, 64, MANY, 64, bind=bind)
    assert planned(remat)
    assert len(pilot_of(remat).roots) == 1


def test_the_plan_in_force_is_that_of_before_from_the_first_step_on() -> None:
    before = learned(MANY, MANY, MANY)
    drop = before.plan.chosen.drop
    assert any(drop)
    after = exact_with(before.state_dict(), MANY)
    assert after.plan is not None
    assert after.plan.chosen.drop == drop
    assert after.stats.recorded_ops == before.stats.recorded_ops
    assert pilot_of(after).main.measured is not None


def test_a_budget_that_no_plan_fits_is_named_as_it_was_given() -> None:
    """Also where measured peaks have moved the target that plans are looked for under, and under the right name."""
    options: dict[str, Any] = {"policy": "offload_only", "offload": Offload("disk", min_bytes=0), "budget": LITTLE}
    first, second = Remat(**options), Remat(**options)
    for remat in (first, second):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            run(net, [batch(MANY)] * 6, usual, remat)
        said = [str(w.message) for w in caught if "not feasible" in str(w.message)]
        assert len(said) == 1
        assert said[0].startswith(f"policy='offload_only': budget={format_bytes(LITTLE)} is not feasible")
        second.load_state_dict(remat.state_dict())
        remat.close()


def test_a_state_outlives_bind_before_and_after_it() -> None:
    """A strategy binds twice; what has been used once is not taken for another model that comes later."""
    seed_everything(3)
    model, other = net(), Net(width=24, depth=2)
    remat = Remat(budget=ROOM)
    remat.bind(model)
    remat.load_state_dict(state_after(*SHAPES))
    remat.bind(model)
    loop = Loop(model, remat)
    with nothing_traced():
        usual(loop, batch(64))
    assert planned(remat)
    remat.bind(other)
    assert remat.plan is None


@pytest.mark.parametrize("budget", [PLENTY, 200_000, NOTHING, 0.5])
@pytest.mark.parametrize("rows", [(64,), SHAPES], ids=str)
def test_under_another_budget_plans_are_made_from_the_traces(rows: tuple[int, ...], budget: Any) -> None:
    budget = "50%" if budget == 0.5 else budget
    remat = exact_with(state_after(*rows), MANY, 64, 64, budget=budget)
    assert planned(remat)
    assert remat.plan is not None
    if isinstance(budget, int):
        assert remat.plan.budget_bytes == budget


def test_the_optimizers_state_counts_before_it_is_met() -> None:
    """A plan that is made when training goes on leaves room for what the first optimizer step will touch."""
    remat = Remat(budget="1GiB")
    remat.load_state_dict(state_after(64))
    model = net()
    remat.bind(model)
    loop = Loop(model, remat)
    usual(loop, batch(64))
    parts = pilot_of(remat).known.all[0].parts
    assert parts["optimizer state"] == state_after(64)["budget"]["static"]["optimizer state"] > 0


class Otherwise(nn.Module):
    """Ends as Net does, after other ops."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x.cos().sin())


@pytest.mark.parametrize("bind", [False, True])
@pytest.mark.parametrize("make", [lambda: Net(width=24, depth=2), Otherwise], ids=["other parameters", "other ops"])
def test_another_model_is_noticed(make: Any, bind: bool) -> None:
    """By its parameters before the first step, else by its ops in the course of it; either way it is traced."""
    remat = exact_with(state_after(*SHAPES), *[64] * 8, bind=bind, model=make, traced=True)
    assert planned(remat)
    assert pilot_of(remat).known.sequences <= 2


def test_another_version_of_pytorch_has_peaks_measured_again() -> None:
    state = state_after(MANY, MANY, MANY)
    state["torch"] = "1.0"
    before = state["budget"]["steps"][0]["tuning"]["measured_peak_bytes"]
    remat = exact_with(state, MANY, MANY)
    remat.close()
    assert pilot_of(remat).main.measured.peak_bytes == before
    assert pilot_of(remat).main.tries == 0


def test_an_op_that_is_not_there_takes_its_steps_along() -> None:
    """The others stay, if a way leads to them."""
    known, unknown = read_steps(renamed(state_after(*SHAPES), "aten.addmm.default", "elsewhere.addmm.default"))
    assert unknown == ["elsewhere.addmm.default"]
    assert known.all == []
    state = state_after(64)
    state["budget"] = renamed(state, "aten.addmm.default", "elsewhere.addmm.default")
    assert planned(exact_with(state, 64, 64, traced=True))


def renamed(state: dict[str, Any], old: str, new: str) -> dict[str, Any]:
    pilot: dict[str, Any] = state["budget"]
    for step in pilot["steps"]:
        if step["trace"] is not None:
            trace = unpack(step["trace"])
            for op in trace["ops"]:
                op[0] = new if op[0] == old else op[0]
            step["trace"] = pack(trace)
    return pilot


@pytest.mark.parametrize(
    "name",
    ["aten.addmm", "aten.nothing.default", "load_library.x.y", "__class__.x.y", "a.b.c.d", "", "aten.addmm.out2"],
)
def test_names_that_are_no_op(name: str) -> None:
    assert overload(name) is None
    assert overload("aten.addmm.default") is torch.ops.aten.addmm.default


def test_ops_that_differed_are_never_dropped_whatever_the_plans_say() -> None:
    state = state_after(MANY, MANY)
    kept = "aten.relu_.default"
    assert any(op.name == kept and op.droppable for op in _known(state).all[0].trace.ops)
    state["kept_ops"] = [kept]
    remat = exact_with(state, MANY, MANY)
    assert remat._kept_ops == {kept}
    assert remat.plan is not None
    assert not any(d for op, d in zip(remat.plan.trace.ops, remat.plan.chosen.drop, strict=True) if op.name == kept)
    assert remat.state_dict()["kept_ops"] == [kept]
    fixed = Remat(policy="full")
    fixed.load_state_dict(state)
    assert fixed.state_dict()["kept_ops"] == [kept]
    assert fixed.state_dict()["budget"] is None


def _known(state: dict[str, Any]) -> KnownSteps:
    return read_steps(state["budget"])[0]


def test_counters_go_on() -> None:
    remat = Remat(policy="full")
    counters = remat.counters
    counters.steps, counters.evicted_bytes, counters.peak_bytes, counters.notes = 3, 7, 11, [str(i) for i in range(500)]
    again = Remat(policy="full")
    held = again.counters
    again.load_state_dict(remat.state_dict())
    assert (held.steps, held.evicted_bytes, held.peak_bytes, held.kept_bytes) == (3, 7, 11, None)
    assert held.notes == [str(i) for i in range(400, 500)]


def test_too_many_sequences_are_too_many_after_as_before() -> None:
    remat = Remat(budget=ROOM)
    model = net()
    remat.bind(model)
    with pytest.warns(UserWarning, match="different sequences"):
        pilot_of(remat)._give_up("sequences", "the model ran 7 different sequences of ops so far")
    state = remat.state_dict()
    again = Remat(budget=ROOM)
    again.load_state_dict(state)
    assert again.state_dict() == state
    assert pilot_of(exact_with(state, 64, 64)).given_up


@pytest.mark.parametrize("share", [0.0, 0.3, 0.6, 0.9, 1.0])
def test_the_largest_shapes_are_worth_most(share: float) -> None:
    """What is written stays within its bound, and comes with all that it needs."""
    known = _known(state_after(*SHAPES))
    whole = len(json.dumps(write_steps(known)))
    cut = write_steps(known, int(share * whole))
    assert sum(len(json.dumps(step, separators=(",", ":"))) for step in cut["steps"]) <= share * whole
    back = read_steps(cut)[0]
    assert len(back.all) == len(cut["steps"])
    if share == 1.0:
        assert len(back.all) == len(known.all)
    if back.all and len(back.all) > 1:
        assert max(k.nbytes for k in back.all) == max(k.nbytes for k in known.all)


def test_what_was_scaled_is_written_as_its_sizes() -> None:
    state = state_after(*SHAPES)
    steps = state["budget"]["steps"]
    assert [step["trace"] is None for step in steps] == [not step["traced"] for step in steps]
    assert sum(not step["traced"] for step in steps) >= 2


@pytest.mark.parametrize(
    "state", [None, 3, [], "x", {}, {"version": 2}, {"version": True}, {"version": VERSION}], ids=str
)
def test_what_is_no_state_is_passed_over(state: Any) -> None:
    remat = Remat(budget=ROOM)
    with pytest.warns(UserWarning, match="cannot be used"):
        remat.load_state_dict(state)
    assert remat.state_dict() == Remat(budget=ROOM).state_dict()


def test_a_state_that_knows_nothing_takes_nothing_away() -> None:
    remat = learned(64, 64)
    plan = remat.plan
    assert plan is not None
    remat.load_state_dict(Remat(budget=ROOM).state_dict())
    assert remat.plan is plan


def places(content: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where there is something that could be damaged."""
    items: Any = (
        content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else []
    )
    return [path for key, value in items for path in [(*at, key), *places(value, (*at, key))]]


VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 400), st.just(2**70), st.floats(), st.text(max_size=3),
    st.lists(st.integers(-1, 3), max_size=3), st.just({}), st.just("removed"),
)  # fmt: skip
PACKED = ("trace", "sizes", "others", "candidates")


@damaged
# Numbers that make no sense may leave the planner without a plan, which it says.
@pytest.mark.filterwarnings("ignore:policy='auto'. no plan could be made")
@settings(max_examples=150)
@given(choice=st.integers(0, 10**6), within=st.integers(0, 10**6), value=VALUES)
def test_a_damaged_state_never_raises(choice: int, within: int, value: Any) -> None:
    """Whatever is put into any place, also inside of what is packed: it is taken or passed over; training works."""
    state = state_after(*SHAPES[:6])
    where = places(state)
    path = where[choice % len(where)]
    holder = state
    for key in path[:-1]:
        holder = holder[key]
    old = holder[path[-1]]
    if path[-1] in PACKED and isinstance(old, str) and within % 2:
        content = unpack(old)
        inner = [p for p in places(content) if p]
        if inner:
            inside: Any = content
            spot = inner[within % len(inner)]
            for key in spot[:-1]:
                inside = inside[key]
            inside[spot[-1]] = value
        holder[path[-1]] = pack(content)
    elif value == "removed":
        del holder[path[-1]]
    else:
        holder[path[-1]] = value
    remat = Remat(budget=ROOM)
    remat.load_state_dict(state)
    if choice % 3 == 0:
        exact_with(state, 64, MANY, 64, traced=True)


def test_the_smallest_plan_as_a_file(tmp_path: Any) -> None:
    """For a restart after memory ran out: the largest step that is known, whether or not there was a plan for it."""
    path = tmp_path / "tight.json"
    remat = Remat(budget=PLENTY)
    with pytest.raises(ConfigurationError, match="no step is known"):
        remat.save_tightened_plan(path)
    run(net, [batch(MANY)], usual, remat)
    remat.close()
    remat.save_tightened_plan(path)
    without = PlanFile.load(path)
    run(net, [batch(MANY)] * 2, usual, remat)
    assert remat.plan is not None
    assert not any(remat.plan.chosen.drop)
    remat.save_tightened_plan(path)
    plan = PlanFile.load(path)
    assert plan.drop == plan.lean == without.drop
    assert any(plan.drop)
    assert plan.peak_bytes - plan.static_bytes < remat.plan.chosen.peak_bytes
    with pytest.raises(ConfigurationError, match="ending"):
        remat.save_tightened_plan(tmp_path / "tight.txt")
    tight = Remat(policy=str(path))
    ours = run(net, [batch(MANY)] * 2, usual, tight)
    assert difference_in_bits(run(net, [batch(MANY)] * 2).seen, ours.seen) == []
    assert tight.stats.replayed_ops


def test_an_engine_may_be_collected_while_an_optimizer_goes_through_its_hooks() -> None:
    """A state waits for its first step under a global hook, which must not go in the midst of others."""
    gc.collect()
    before = set(optimizer_module._global_optimizer_pre_hooks)
    holder: list[Any] = [Remat(budget=ROOM)]
    holder[0].load_state_dict(state_after(64))
    holder.append(holder)
    waiting = weakref.ref(holder[0])
    hooks = [holder]
    del holder

    def collecting(*args: Any) -> None:
        hooks.clear()
        gc.collect()

    first = register_optimizer_step_pre_hook(collecting)
    optimizer_module._global_optimizer_pre_hooks.move_to_end(first.id, last=False)
    model = net()
    try:
        usual(Loop(model, None), batch(64))
    finally:
        first.remove()
    assert waiting() is None
    Optimizers().stop()
    assert set(optimizer_module._global_optimizer_pre_hooks) <= before
