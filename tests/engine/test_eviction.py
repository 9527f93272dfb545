"""An op runs out of memory: kept values are dropped, it runs again, and every bit is that of plain PyTorch."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_remat.engine.eviction import Eviction
from lightning_remat.engine.policies import KEEP_ALL, SELECTIVE
from lightning_remat.engine.tape import Tape
from tests.helpers.evicting import (
    NETS,
    Failing,
    Limited,
    evicting,
    net,
    on,
    outcome,
    planned_tape,
    policy_tape,
    retryable,
)
from tests.helpers.exact import assert_same
from tests.helpers.memory import LiveBytes, live_records, no_collector

ALL = 1 << 60
"""More bytes than there are: evict whatever can be."""

TAPES: dict[str, Callable[[nn.Module, Tensor], Tape]] = {
    "plan that keeps all": lambda model, x: planned_tape(model, x, lambda i: False),
    "plan that keeps some": lambda model, x: planned_tape(model, x, lambda i: i % 3 == 0),
    "keep": lambda model, x: policy_tape(KEEP_ALL),
    "selective": lambda model, x: policy_tape(SELECTIVE),
}

each_net = pytest.mark.parametrize("name", NETS)
each_tape = pytest.mark.parametrize("make", TAPES.values(), ids=TAPES)
Make = Callable[[nn.Module, Tensor], Tape]


# ---------------------------------------------------------------------- forward


@each_net
@each_tape
def test_every_op_of_forward_fails_once(name: str, make: Make) -> None:
    model, x = net(name)
    tape = make(model, x)
    eviction = evicting(tape)
    seen = Failing()
    ends: list[int] = []
    plain = outcome(model, x, None, Failing())
    assert_same(plain, outcome(model, x, tape, seen, before_backward=lambda: ends.append(seen.calls)))
    failed = 0
    for n in range(ends[0]):
        failing = Failing([n], may=retryable)
        assert_same(plain, outcome(model, x, tape, failing))
        failed += len(failing.failed)
    assert eviction.failures == failed > 10
    assert eviction.evictions > 5
    assert eviction.evicted_bytes > 0


@each_net
@each_tape
def test_several_failures_in_a_step(name: str, make: Make) -> None:
    model, x = net(name)
    tape = make(model, x)
    evicting(tape)
    plain = outcome(model, x, None, Failing())
    most = 0
    for n in range(5):
        failing = Failing(range(n, 200, 5), may=lambda func: not tape.paused and retryable(func))
        assert_same(
            plain, outcome(model, x, tape, failing, backward=lambda loss, f=failing: (f.at.clear(), loss.backward()))
        )
        most = max(most, len(failing.failed))
    assert most > 2


def test_an_op_fails_several_times_in_a_row() -> None:
    """Each time room is made for twice as much as the time before; it succeeds in the end."""
    model, x = net("gpt")
    tape = policy_tape(KEEP_ALL)
    eviction = evicting(tape)
    plain = outcome(model, x, None, Failing())
    for n in range(75, 130, 4):
        before, eviction.evicted_bytes = eviction.failures, 0
        failing = Failing(range(n, n + 4), may=retryable)
        assert_same(plain, outcome(model, x, tape, failing))
        if len(failing.failed) == 4:
            assert eviction.failures == before + 4
            assert eviction.evicted_bytes >= 64 * (1 + 2 + 4 + 8)


def test_an_op_that_goes_on_failing_raises_in_the_end() -> None:
    """There is nothing left to evict then; the step after it is as ever."""
    model, x = net("gpt")
    tape = policy_tape(KEEP_ALL)
    eviction = evicting(tape)
    plain = outcome(model, x, None, Failing())
    with pytest.raises(torch.OutOfMemoryError, match="made up"):
        outcome(model, x, tape, Failing(range(60, 10_000), may=retryable))
    assert eviction.evictions > 5
    assert_same(plain, outcome(model, x, tape, Failing()))


@pytest.mark.parametrize("op", ["aten.relu_.default", "aten.native_batch_norm.default", "aten.bernoulli_.float"])
def test_an_op_that_may_have_changed_something_is_not_run_again(op: str) -> None:
    model, x = net("gpt" if "bernoulli" in op else "cnn")
    tape = policy_tape(KEEP_ALL)
    eviction = evicting(tape)
    with pytest.raises(torch.OutOfMemoryError):
        outcome(model, x, tape, Failing(range(1000), may=lambda func: str(func) == op))
    assert eviction.failures == 0


def test_other_errors_go_up_as_they_are() -> None:
    tape = policy_tape(KEEP_ALL)
    eviction = evicting(tape)
    with on(tape), pytest.raises(RuntimeError, match="size of tensor"):
        torch.ones(2, requires_grad=True) + torch.ones(3)
    assert eviction.failures == 0


def test_a_random_op_whose_state_is_recorded_starts_from_it_again() -> None:
    """Attention draws its mask inside; what a failed call drew must not count."""

    class Draws(Failing):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if str(func) == "aten.native_dropout.default" and not self.failed:
                func(*args, **(kwargs or {}))
                self.failed.append("drawn")
                raise torch.OutOfMemoryError("CUDA out of memory (made up).")
            return func(*args, **(kwargs or {}))

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        y = model(x).exp()
        return torch.ops.aten.native_dropout(y.sin(), 0.5, True)[0].square().sum()

    model, x = nn.Linear(4, 4), torch.ones(3, 4)
    tape = planned_tape(model, x, lambda i: i > 1, loss)
    evicting(tape)
    mode = Draws()
    assert_same(outcome(model, x, None, loss=loss), outcome(model, x, tape, mode, loss=loss))
    assert mode.failed


# ---------------------------------------------------------------------- replay


@each_net
@each_tape
def test_every_op_of_replay_fails_once(name: str, make: Make) -> None:
    """What the ops still to run read must stay; what has been computed and waits for backward may go again."""
    model, x = net(name)
    tape = make(model, x)
    eviction = evicting(tape)
    replayed: list[int] = []

    class Replays(Failing):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if tape.paused and retryable(func):
                replayed.append(self.calls)
            return super().__torch_dispatch__(func, types, args, kwargs)

    def evict_half() -> None:
        eviction.make_room(eviction_bytes(eviction) // 2)

    plain = outcome(model, x, None, Failing())
    assert_same(plain, outcome(model, x, tape, Replays(), before_backward=evict_half))
    numbers = list(replayed)
    assert numbers
    before = eviction.failures
    for n in numbers:
        failing = Failing([n], may=lambda func: tape.paused and retryable(func))
        assert_same(plain, outcome(model, x, tape, failing, before_backward=evict_half))
    assert eviction.failures > before


def eviction_bytes(eviction: Eviction) -> int:
    from lightning_remat.engine.lineage import evictable_bytes

    return sum(evictable_bytes(s) for r in eviction.known if (s := r()) is not None and s.recipe is not None)


# ---------------------------------------------------------------------- what is evicted


@each_net
@each_tape
def test_everything_is_evicted_before_backward(name: str, make: Make) -> None:
    model, x = net(name)
    tape = make(model, x)
    eviction = evicting(tape)
    freed: list[int] = []
    plain = outcome(model, x, None, steps=2)
    got = outcome(model, x, tape, steps=2, before_backward=lambda: freed.append(eviction.make_room(ALL)))
    assert_same(plain, got)
    assert len(freed) == 2
    assert freed[0] > 0
    assert sum(freed) == eviction.evicted_bytes


@pytest.mark.parametrize("name", ["gpt", "lstm"])
@pytest.mark.parametrize("share", [0.9, 0.75, 0.6])
def test_a_step_that_does_not_fit_plainly(name: str, share: float) -> None:
    model, _ = net(name)
    words = 11 if name == "gpt" else 7
    x = torch.arange(8 * 24).reshape(8, 24) * 3 % words
    measured = Limited()
    plain = outcome(model, x, None, measured)
    limit = int(share * measured.peak)
    with pytest.raises(torch.OutOfMemoryError):
        outcome(model, x, None, Limited(limit))
    tape = planned_tape(model, x, lambda i: False)
    eviction = evicting(tape)
    limited = Limited(limit)
    assert_same(plain, outcome(model, x, tape, limited))
    assert limited.failures > 0
    assert eviction.evictions > 0
    assert limited.peak <= limit


def test_the_cheapest_per_byte_goes_first_by_the_times_of_a_plan() -> None:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        y = model(x)
        return (y.exp() * y.sin() * y.tanh()).sum()

    model, x = nn.Linear(4, 4), torch.ones(3, 4)
    for cheapest in ("exp", "sin", "tanh"):
        tape = planned_tape(model, x, lambda i: False, loss)
        names = [str(function).split(".")[1] for function, _, _ in tape.script]
        eviction = evicting(tape, seconds=lambda i, c=cheapest, n=names: 1e-6 if n[i] == c else 1.0)
        calls: list[int] = []
        eviction.on_eviction = calls.append
        failing = Failing()
        outcome(model, x, tape, failing, loss=loss, before_backward=lambda e=eviction: e.make_room(1))
        assert calls == [48]
        replayed = failing.names[failing.calls - len(failing.names) :]
        assert replayed.count(f"aten.{cheapest}.default") == 2


def test_what_somebody_else_holds_is_left_alone() -> None:
    """Dropping it would free nothing."""
    tape = policy_tape(KEEP_ALL)
    eviction = evicting(tape)
    x = torch.ones(5, requires_grad=True)
    with on(tape):
        y = x.exp()
        z = y.sin()
    assert eviction.make_room(ALL) == 0
    del y
    assert eviction.make_room(ALL) == 20
    z.sum().backward()


def test_what_is_gone_cannot_be_computed_from() -> None:
    """The batch was let go of, and nobody saved it."""
    tape = policy_tape(KEEP_ALL)
    eviction = evicting(tape)
    w = torch.ones(5, requires_grad=True)
    with on(tape):
        z = (torch.ones(5) * 2 * w).exp()
    assert eviction.make_room(ALL) == 0
    z.sum().backward()


# ---------------------------------------------------------------------- nothing else changes


class Timeline(LiveBytes):
    """The bytes alive after every op."""

    def __init__(self) -> None:
        super().__init__()
        self.line: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if str(func) != "aten.detach.default":  # makes no memory, and is how we hold some
            self.line.append((str(func), self.count()))
        return out


@pytest.fixture
def _no_collection() -> Iterator[None]:
    gc.collect()
    with no_collector():
        yield


@each_net
@each_tape
@pytest.mark.usefixtures("_no_collection")
def test_without_a_failure_everything_lives_as_long_as_without_an_eviction(name: str, make: Make) -> None:
    model, x = net(name)
    without, looked_after = make(model, x), make(model, x)
    eviction = evicting(looked_after)
    before, after = Timeline(), Timeline()
    outcome(model, x, without, before, steps=2)
    outcome(model, x, looked_after, after, steps=2)
    assert before.line == after.line
    assert eviction.failures == 0


@each_net
@each_tape
@pytest.mark.usefixtures("_no_collection")
def test_nothing_stays_alive(name: str, make: Make) -> None:
    """Neither after a step with evictions, nor after one that was given up in forward."""
    model, x = net(name)
    tape = make(model, x)
    eviction = evicting(tape)
    with on(tape):
        loss = model(x)
    eviction.make_room(ALL)
    loss.backward()
    del loss
    with on(tape):
        lost = model(x)
    eviction.make_room(ALL)
    del lost
    eviction.prune()
    assert not live_records()
    assert not eviction.known


# ---------------------------------------------------------------------- writes, and other ways to run backward


def test_a_saved_tensor_that_is_changed_raises_as_ever() -> None:
    """Before or after an eviction of others, in the step and after it."""
    for inside in (True, False):
        tape = policy_tape(KEEP_ALL)
        eviction = evicting(tape)
        x = torch.ones(5, requires_grad=True)
        with on(tape):
            y = x.exp()
            z = y.sin().exp()
            if inside:
                y.add_(1)
        if not inside:
            y.add_(1)
        eviction.make_room(ALL)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            z.sum().backward()


def test_a_write_through_data_is_used_as_plain_pytorch_uses_it() -> None:
    """No counter moves, so nothing is raised, and the gradient is that of the new content."""
    x = torch.ones(5, requires_grad=True)

    def gradient(tape: Tape | None, eviction: Eviction | None) -> Tensor:
        x.grad = None
        with on(tape):
            y = x * 2
            z = y * y.sin()
            y.data.mul_(3)
            del y
        if eviction is not None:
            eviction.make_room(ALL)
        z.sum().backward()
        assert x.grad is not None
        return x.grad

    tape = policy_tape(KEEP_ALL)
    assert torch.equal(gradient(None, None), gradient(tape, evicting(tape)))


def test_what_was_computed_from_overwritten_content_is_computed_from_the_old_one() -> None:
    """y is written to after exp has read it; both its old and its new content can be asked for."""
    x = torch.linspace(0, 1, 5, requires_grad=True)

    def gradient(tape: Tape | None, eviction: Eviction | None) -> Tensor:
        x.grad = None
        with on(tape):
            y = x * 2
            z = y.exp().tanh()
            y.add_(1)
            loss = (z * y.sin()).sum()
            del y, z
        if eviction is not None:
            assert eviction.make_room(ALL) > 0
        loss.backward()
        assert x.grad is not None
        return x.grad

    tape = policy_tape(KEEP_ALL)
    assert torch.equal(gradient(None, None), gradient(tape, evicting(tape)))


def _twice(loss: Tensor) -> None:
    loss.backward(retain_graph=True)
    loss.backward()


@each_net
@each_tape
def test_retain_graph(name: str, make: Make) -> None:
    model, x = net(name)
    tape = make(model, x)
    eviction = evicting(tape)
    plain = outcome(model, x, None, backward=_twice)
    got = outcome(model, x, tape, backward=_twice, before_backward=lambda: eviction.make_room(ALL))
    assert_same(plain, got)


@each_tape
def test_a_gradient_of_a_gradient_in_the_step(make: Make) -> None:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        y = model(x)
        if evictions:
            evictions[0].make_room(ALL)
        (g,) = torch.autograd.grad(y.tanh().square().sum(), model.weight, create_graph=True)
        if evictions:
            evictions[0].make_room(ALL)
        return g.square().sum() + y.exp().sin().sum()

    evictions: list[Eviction] = []
    model, x = nn.Linear(4, 4), torch.linspace(-1, 1, 12).reshape(3, 4)
    plain = outcome(model, x, None, loss=loss)
    tape = (
        make(model, x) if make in (TAPES["keep"], TAPES["selective"]) else planned_tape(model, x, lambda i: False, loss)
    )
    evictions.append(evicting(tape))
    got = outcome(model, x, tape, loss=loss, before_backward=lambda: evictions[0].make_room(ALL))
    assert_same(plain, got)
    assert evictions[0].evictions > 0


def test_an_eviction_that_leaves_a_tape_leaves_what_it_evicted_computable() -> None:
    model, x = net("gpt")
    tape = policy_tape(KEEP_ALL)
    eviction = evicting(tape)

    def leave() -> None:
        eviction.make_room(ALL)
        eviction.detach(tape)

    assert_same(outcome(model, x, None), outcome(model, x, tape, before_backward=leave))
    assert eviction.evictions > 0
    assert tape.eviction is None
