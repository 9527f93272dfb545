"""What can happen while contents are on their way to a disk: every bit is that of plain PyTorch, or it is refused."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_remat import Offload, OffloadError, Remat, ReplayError
from lightning_remat.engine.offload.depot import Depot
from lightning_remat.engine.offload.disk import DiskContent
from lightning_remat.engine.verify import same_bits
from tests.helpers.exact import EVERYTHING, recompute_all

LOOSE = Offload("disk", min_bytes=0)
"""Everything leaves, and stays in the window."""

POLICIES = {"offload only": "offload_only", "full": "full", "selective": "selective", "recompute all": recompute_all}
each_policy = pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
each_window = pytest.mark.parametrize("offload", [EVERYTHING, LOOSE], ids=["nothing resident", "all resident"])


class Gate:
    """Holds writes to a disk up until it is opened."""

    def __init__(self) -> None:
        self.opened = threading.Event()
        self.log: list[str] = []

    def open(self) -> None:
        self.log.append("opened")
        self.opened.set()


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    held = Gate()
    write, wait = DiskContent._write, Depot.wait

    def held_up(self: DiskContent, *args: Any) -> None:
        held.opened.wait()
        write(self, *args)

    def opening(self: Depot, transfer: Any, patience: float) -> bool:
        if not held.opened.is_set() and transfer.outward:
            held.log.append("waited")
            held.open()
        return wait(self, transfer, patience)

    monkeypatch.setattr(DiskContent, "_write", held_up)
    monkeypatch.setattr(Depot, "wait", opening)
    yield held
    held.opened.set()


def engine(policy: Any = "offload_only", offload: Offload = LOOSE, warm: bool = True) -> Remat:
    """An engine whose first step, which keeps books, is over."""
    remat = Remat(policy=policy, offload=offload, blocks="0" if policy == "full" else None)
    if warm:
        with remat:
            nn.Sequential(nn.Linear(1, 1))(torch.ones(1))
    return remat


def place_of(remat: Remat) -> Any:
    assert remat.offloading is not None
    assert remat.offloading.mover is not None
    return remat.offloading.mover.place


# ---------------------------------------------------------------------- writes


def test_a_write_that_the_tape_sees_waits_until_the_old_content_is_out(gate: Gate) -> None:
    x = torch.linspace(0, 1, 6, requires_grad=True)

    def gradient(remat: Remat | None) -> Tensor:
        x.grad = None
        y = x * 2
        z = y.detach() * x  # saves y's content
        y.detach().mul_(3)
        assert remat is None or gate.log == ["waited", "opened"]
        z.backward(torch.ones(6))
        assert x.grad is not None
        return x.grad

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        gradient(None)
    remat = engine()
    with remat, pytest.raises(RuntimeError, match="modified by an inplace operation"):
        gradient(remat)
    remat.close()


def test_what_a_recorded_op_has_read_is_written_to_while_it_leaves(gate: Gate) -> None:
    """Plain PyTorch does not mind, since the product with a number saves nothing; the old content is needed."""
    x = torch.linspace(0, 1, 6, requires_grad=True)

    def gradient(remat: Remat | None) -> Tensor:
        x.grad = None
        y = x + 1
        z = (y * 2).sin()
        y.add_(5)
        (z * y.sin()).sum().backward()
        assert x.grad is not None
        return x.grad

    plain = gradient(None)
    remat = engine(lambda op: "keep" if op.name.startswith("aten.add.") else "recompute")
    with remat:
        got = gradient(remat)
    assert same_bits(got, plain)
    assert gate.log == ["waited", "opened"]
    remat.close()


@each_policy
@each_window
@pytest.mark.parametrize("where", ["in the step", "after it"])
def test_a_saved_content_that_is_written_to_is_refused(policy: Any, offload: Offload, where: str) -> None:
    """As in plain PyTorch, or, where it had left for good, computed with the content that was saved."""
    x = torch.linspace(0, 1, 6, requires_grad=True)
    y = x * 2
    expected = torch.autograd.grad((y * y.sin()).sum(), x)[0]
    remat = engine(policy, offload)
    with remat:
        y = x * 2
        loss = (y * y.sin()).sum()
        if where == "in the step":
            y.detach().add_(1)
    if where == "after it":
        y.detach().add_(1)
    said = ""
    try:
        loss.backward()
    except RuntimeError as error:
        said = str(error)
    if said:
        assert "modified by an inplace operation" in said
    else:
        assert where == "after it"
        assert x.grad is not None
        assert same_bits(x.grad, expected)
    remat.close()


@each_window
def test_a_write_through_data_in_the_step_is_refused(offload: Offload) -> None:
    """Plain PyTorch silently takes the new content; what has left has the old one, and that is said."""
    x = torch.linspace(0, 1, 6, requires_grad=True)
    remat = engine("offload_only", offload)
    with remat:
        y = x * 2
        loss = (y * y.sin()).sum()
        y.data.mul_(3)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    remat.close()


def test_what_only_recorded_ops_read_is_changed_after_the_step() -> None:
    """Without offload this is refused; a content that is out is safe, one on its way out is refused with a way out."""

    def keep_sums(op: Any) -> str:
        return "keep" if op.name.startswith("aten.add.") else "recompute"

    x = torch.linspace(0, 1, 6, requires_grad=True)
    (expected,) = torch.autograd.grad(((x + 1) * 2).sin().sum(), x)
    for offload in (EVERYTHING, LOOSE):
        x.grad = None
        remat = engine(keep_sums, offload)
        with remat:
            y = x + 1
            loss = (y * 2).sin().sum()
        y.detach().mul_(7)
        if offload is EVERYTHING:
            loss.backward()
            assert x.grad is not None
            assert same_bits(x.grad, expected)
        else:
            with pytest.raises(ReplayError, match="while it was leaving"):
                loss.backward()
        remat.close()


@pytest.mark.parametrize("saved", [False, True], ids=["read", "saved"])
@each_window
def test_moved_in_place_after_it_came_back(saved: bool, offload: Offload) -> None:
    """`unsqueeze_` on what a backward pass in the step has had back: no byte changes, its version does."""
    x = torch.arange(6.0, requires_grad=True)

    def gradient() -> Tensor:
        x.grad = None
        y = x + 1
        first = y.sin() if saved else (y * 2).sin()
        first.sum().backward(retain_graph=True)
        y.unsqueeze_(0)
        (y * 3).sin().sum().backward()
        if not saved:
            first.sum().backward()
        assert x.grad is not None
        return x.grad

    plain = gradient()
    remat = engine(lambda op: "keep" if op.name.startswith("aten.add.") else "recompute", offload)
    for _ in range(2):
        with remat:
            got = gradient()
        assert same_bits(got, plain)
    remat.close()


# ---------------------------------------------------------------------- coming and going


def test_what_is_asked_for_while_it_is_written_is_there_at_once(gate: Gate) -> None:
    x = torch.linspace(0, 1, 6, requires_grad=True)
    (expected,) = torch.autograd.grad((x.exp().sin() * x.cos()).sum(), x)
    remat = engine()
    with remat:
        loss = (x.exp().sin() * x.cos()).sum()
    loss.backward()
    assert x.grad is not None
    assert same_bits(x.grad, expected)
    assert gate.log == []
    gate.open()
    remat.close()


def test_what_is_let_go_of_while_it_is_written_gives_its_room_back(gate: Gate) -> None:
    """A step without backward; its contents are still on their way when nobody can ask for them any more."""
    x = torch.ones(1000, requires_grad=True)
    remat = engine()
    with remat:
        loss = (x * 2).sin().exp().sum()
    place = place_of(remat)
    assert place.used_bytes > 0
    assert remat.offloading.mover.resident_bytes > 0
    del loss
    assert remat.offloading.mover.resident_bytes == 0
    with remat:  # the next one goes its way
        loss = (x * 2).sin().exp().sum()
    gate.open()
    loss.backward()
    del loss
    remat.close()
    assert place.used_bytes == 0


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(6, 6), nn.GELU(), nn.Dropout(0.2)) for _ in range(3)])
        self.norm = nn.BatchNorm1d(6)
        self.fail = ""

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            x = x + layer(x)
            if self.fail == "forward" and number == 1:
                raise ValueError("on purpose")
        x = self.norm(x)
        if self.fail == "backward":
            x.register_hook(_raise)
        return x.square().mean()


def _raise(gradient: Tensor) -> None:
    raise ValueError("on purpose")


Training = Callable[[Net, Any], list[Tensor]]


def batch(number: int) -> Tensor:
    return torch.linspace(-1, 1, 24).reshape(4, 6) * (number + 1)


def forward(net: Net, remat: Remat | None, number: int) -> Tensor:
    if remat is None:
        return net(batch(number))
    with remat:
        return net(batch(number))


def failing(where: str) -> Training:
    def train(net: Net, remat: Remat | None) -> list[Tensor]:
        for number in range(4):
            net.fail = where if number in (1, 2) else ""
            try:
                forward(net, remat, number).backward()
            except ValueError:
                continue
        return []

    return train


def interleaved(*order: int) -> Training:
    """Several forward passes before the backward passes, these in some order."""

    def train(net: Net, remat: Remat | None) -> list[Tensor]:
        for _ in range(2):
            losses = [forward(net, remat, number) for number in range(len(order))]
            for number in order:
                losses[number].backward()
        return []

    return train


def later(net: Net, remat: Remat | None) -> list[Tensor]:
    """A graph of an earlier step is gone through again, after others have come and gone."""
    old = forward(net, remat, 0)
    old.backward(retain_graph=True)
    older = forward(net, remat, 1)
    for number in range(3):
        forward(net, remat, number).backward()
    old.backward()
    older.backward()
    return [old, older]


def given_up(net: Net, remat: Remat | None) -> list[Tensor]:
    """Every second step never gets a backward pass; one is kept for long."""
    kept = []
    for number in range(6):
        loss = forward(net, remat, number)
        if number % 2:
            loss.backward()
        elif number == 2:
            kept.append(loss)
    return kept


def other_thread(net: Net, remat: Remat | None) -> list[Tensor]:
    """Backward runs where forward did not."""
    for number in range(3):
        loss = forward(net, remat, number)
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()
    return []


def part_by_part(net: Net, remat: Remat | None) -> list[Tensor]:
    """Gradients with respect to some inputs, twice through the same part, and a gradient of a gradient."""
    found: list[Tensor] = []
    for number in range(2):
        x = batch(number).requires_grad_()
        if remat is None:
            loss = net(x)
            (g,) = torch.autograd.grad(loss, x, create_graph=True)
        else:
            with remat:
                loss = net(x)
                (g,) = torch.autograd.grad(loss, x, create_graph=True)
        found.append(torch.autograd.grad(loss, net.layers[0][0].weight, retain_graph=True)[0])
        (loss + g.square().sum()).backward()
    return found


def copied(net: Net, remat: Remat | None) -> list[Tensor]:
    """Copies of the model and of the engine are made in mid-step, and used."""
    found: list[Tensor] = []
    for number in range(2):
        clones: list[Net] = []
        handle = net.layers[1].register_forward_hook(lambda *a, c=clones: c.append(copy.deepcopy(net)))
        loss = forward(net, remat, number)
        handle.remove()
        other = pickle.loads(pickle.dumps(copy.deepcopy(remat))) if remat is not None else None
        again = forward(clones[0], other, number)
        again.backward()
        loss.backward()
        if other is not None:
            other.close()
        found += [p.grad for p in clones[0].parameters() if p.grad is not None]
    return found


TRAININGS: dict[str, Training] = {
    "an error in forward": failing("forward"),
    "an error in backward": failing("backward"),
    "two steps alive": interleaved(0, 1),
    "two steps alive, the second goes first": interleaved(1, 0),
    "three steps alive": interleaved(1, 2, 0),
    "an earlier step later": later,
    "steps that are given up": given_up,
    "backward on another thread": other_thread,
    "part by part": part_by_part,
    "copies in mid-step": copied,
}


def run(train: Training, remat: Remat | None) -> list[Tensor]:
    torch.manual_seed(0)
    net = Net()
    torch.manual_seed(1)
    found = train(net, remat)
    left = [p.grad.clone() for p in net.parameters() if p.grad is not None]
    return [t.detach().clone() for t in [*found, *left, *net.buffers(), torch.get_rng_state()]]


@each_policy
@each_window
@pytest.mark.parametrize("name", TRAININGS)
def test_a_training_is_that_of_plain_pytorch(name: str, policy: Any, offload: Offload) -> None:
    """And when it is over, nobody takes any room."""
    plain = run(TRAININGS[name], None)
    remat = Remat(policy=policy, offload=offload, blocks="layers.*" if policy == "full" else None)
    got = run(TRAININGS[name], remat)
    assert len(got) == len(plain)
    assert all(same_bits(a, b) for a, b in zip(plain, got, strict=True))
    place = place_of(remat)
    assert remat.offloading is not None
    assert remat.offloading.mover is not None
    gc.collect()
    assert remat.offloading.mover.resident_bytes == 0
    # Room is given back once a transfer has ended, so what counts is that nobody has a content any more.
    assert not [o for o in gc.get_objects() if type(o) is DiskContent and o._place is place and not o._released]
    if policy != recompute_all:
        assert place.peak_bytes > 0
    remat.close()


# PyTorch keeps it for the whole process, and dispatch modes of two threads that end crosswise leave it set.
@pytest.mark.allow_leak("dispatch mode flags")
def test_two_engines_on_two_threads() -> None:
    got: dict[int, list[Tensor]] = {}
    barrier = threading.Barrier(2)

    def train(number: int, way: Training, net: Net, remat: Remat) -> None:
        barrier.wait()
        found = way(net, remat)
        left = [p.grad.clone() for p in net.parameters() if p.grad is not None]
        got[number] = [t.detach().clone() for t in [*found, *left, *net.buffers()]]

    engines = [Remat(policy="offload_only", offload=offload) for offload in (EVERYTHING, LOOSE)]
    threads = []
    for number, (way, remat) in enumerate(zip((interleaved(0, 1), later), engines, strict=True)):
        torch.manual_seed(0)
        net = Net().train()
        for layer in net.layers:
            layer[2].p = 0.0  # the random stream is the process's
        threads.append(threading.Thread(target=train, args=(number, way, net, remat)))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, way in enumerate((interleaved(0, 1), later)):
        torch.manual_seed(0)
        net = Net().train()
        for layer in net.layers:
            layer[2].p = 0.0
        found = way(net, None)
        left = [p.grad.clone() for p in net.parameters() if p.grad is not None]
        expected = [t.detach().clone() for t in [*found, *left, *net.buffers()]]
        assert all(same_bits(a, b) for a, b in zip(expected, got[number], strict=True))
    for remat in engines:
        remat.close()


def test_what_has_left_cannot_be_had_after_the_end() -> None:
    """It is said, and no gradient is made up: computed again where that can be done, or refused."""
    x = torch.linspace(0, 1, 6, requires_grad=True)
    (expected,) = torch.autograd.grad(((x * 2) * (x * 2).sin()).sum(), x)
    remat = engine("offload_only", EVERYTHING)
    with remat:
        y = x * 2
        loss = (y * y.sin()).sum()
    del y
    remat.close()
    with pytest.warns(UserWarning, match="computed again instead"):
        loss.backward()
    assert x.grad is not None
    assert same_bits(x.grad, expected)
    remat = engine("offload_only", EVERYTHING)
    with remat:
        y = (x * 2).add_(1)
        loss = (y * y.sin()).sum()
    del y
    remat.close()
    with pytest.raises(OffloadError, match="the place was closed"):
        loss.backward()
