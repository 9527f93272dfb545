"""An op of backward runs out of memory: room is made under a mode, where a mode changes no bit."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing._internal.opinfo.core import OpInfo
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_leaves, tree_map

from lightning_remat.engine.eviction import Eviction
from lightning_remat.engine.policies import KEEP_ALL
from lightning_remat.engine.rescue import SAFE, arm, is_safe, unsafe_nodes
from tests.engine import opdb
from tests.helpers.evicting import (
    NETS,
    Failing,
    Limited,
    evicting,
    forward,
    net,
    on,
    outcome,
    planned_tape,
    policy_tape,
    retryable,
)
from tests.helpers.exact import assert_same

ARMED: list[Callable[[], None]] = []


@pytest.fixture(autouse=True)
def _disarmed() -> Iterator[None]:
    yield
    while ARMED:
        ARMED.pop()()


def armed(eviction: Eviction) -> None:
    ARMED.append(arm(eviction))


# ---------------------------------------------------------------------- rescue


@pytest.mark.parametrize("drop", [lambda i: False, lambda i: i % 3 == 0], ids=["keeps all", "keeps some"])
@pytest.mark.parametrize("name", NETS)
def test_every_op_of_backward_fails_once(name: str, drop: Callable[[int], bool]) -> None:
    """Those of replays included. The first is autograd's ones_like, before backward proper."""
    model, x = net(name)
    plain = outcome(model, x, None)
    tape = planned_tape(model, x, drop)
    eviction = evicting(tape)
    armed(eviction)
    seen = Failing()
    marks: list[int] = []

    def backward(loss: Tensor) -> None:
        gradient = torch.ones_like(loss)
        marks.append(seen.calls)
        loss.backward(gradient)
        marks.append(seen.calls)

    assert_same(plain, outcome(model, x, tape, seen, backward=backward))
    failures = 0
    for n in range(marks[0], marks[1]):
        failing = Failing([n], may=retryable)
        assert_same(plain, outcome(model, x, tape, failing))
        failures += len(failing.failed)
    assert eviction.failures == failures > 5
    assert eviction.evictions > 5


@pytest.mark.parametrize(("name", "share"), [("gpt", 0.8), ("gpt", 0.5), ("cnn", 0.9), ("cnn", 0.7), ("lstm", 0.6)])
def test_a_step_that_does_not_fit_plainly(name: str, share: float) -> None:
    model, x = net(name)
    if name == "cnn":
        x = torch.linspace(-1, 1, 16 * 3 * 256).sin().reshape(16, 3, 16, 16)
    else:
        x = torch.arange(8 * 24).reshape(8, 24) * 3 % (11 if name == "gpt" else 7)
    plain = outcome(model, x, None)
    measured = Limited()
    outcome(model, x, None, measured)
    limit = int(share * measured.peak)
    with pytest.raises(torch.OutOfMemoryError):
        outcome(model, x, None, Limited(limit))
    tape = planned_tape(model, x, lambda i: False)
    eviction = evicting(tape)
    armed(eviction)
    limited = Limited(limit)
    assert_same(plain, outcome(model, x, tape, limited))
    assert limited.peak <= limit
    assert eviction.evictions > 0


def test_a_backward_inside_the_step_is_rescued_too() -> None:
    def inside(model: nn.Module, x: Tensor) -> Tensor:
        loss = forward(model, x)
        marks.append(seen.calls)
        loss.backward(retain_graph=True)
        return loss

    model, x = net("gpt")
    marks: list[int] = []
    seen = Failing()
    plain = outcome(model, x, None, seen, loss=inside)
    tape = policy_tape(KEEP_ALL)
    eviction = evicting(tape)
    armed(eviction)
    for n in range(marks[0] + 4, marks[0] + 60, 3):
        assert_same(plain, outcome(model, x, tape, Failing([n], may=retryable), loss=inside))
    assert eviction.evictions > 0


def test_an_op_that_goes_on_failing_raises_and_the_stack_is_put_back() -> None:
    model, x = net("gpt")
    tape = policy_tape(KEEP_ALL)
    eviction = evicting(tape)
    armed(eviction)
    with on(tape):
        loss = model(x)
    with Failing(range(20, 10_000), may=lambda func: not tape.paused and retryable(func)):
        stack = _get_current_dispatch_mode_stack()
        with pytest.raises(torch.OutOfMemoryError):
            loss.backward()
        assert _get_current_dispatch_mode_stack() == stack
    assert eviction.evictions > 5


def test_without_arming_the_error_goes_up() -> None:
    model, x = net("gpt")
    tape = policy_tape(KEEP_ALL)
    eviction = evicting(tape)
    original = torch.autograd._engine_run_backward
    disarm = arm(eviction)
    disarm()
    disarm()
    assert torch.autograd._engine_run_backward is original
    with on(tape):
        loss = model(x)
    with Failing([5]), pytest.raises(torch.OutOfMemoryError):
        loss.backward()


# ---------------------------------------------------------------------- where a mode would change bits


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        STACKS.append(len(_get_current_dispatch_mode_stack()))
        return 2 * gradient


STACKS: list[int] = []


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (lambda x: x.prod(), "ProdBackward0"),
        (lambda x: Doubled.apply(x).sum(), "DoubledBackward"),
        (lambda x: x.masked_fill(x > 0, x.sum()).sum(), "MaskedFillBackward1"),
    ],
)
def test_a_graph_with_another_node_is_left_alone(function: Callable[[Tensor], Tensor], name: str) -> None:
    armed(Eviction())
    x = torch.ones(3, requires_grad=True)
    loss = function(x * 2)
    assert unsafe_nodes([loss]) == {name}
    STACKS.clear()
    loss.backward()
    assert not any(STACKS)


def test_hooks_of_leaves_are_user_code() -> None:
    x, y = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
    loss = (x * y).sum()
    assert is_safe([loss])
    handle = x.register_hook(lambda g: g)
    assert not is_safe([loss])
    handle.remove()
    assert is_safe([loss])
    y.register_post_accumulate_grad_hook(lambda p: None)
    assert not is_safe([loss])


def test_a_function_of_the_users_with_the_name_of_a_node_is_not_taken_for_it() -> None:
    node = type("AddmmBackward0", (), {})
    users = type("Addmm", (torch.autograd.Function,), {"forward": Doubled.forward, "backward": Doubled.backward})
    assert node.__name__ in SAFE
    loss = users.apply(torch.ones(3, requires_grad=True)).sum()
    assert unsafe_nodes([loss])


def test_a_graph_is_made_without_the_mode() -> None:
    """Nodes of second order are another list."""
    entered: list[int] = []

    class Noted(torch.autograd.graph.saved_tensors_hooks):
        def __init__(self) -> None:
            super().__init__(lambda t: t, self.look)

        def look(self, t: Tensor) -> Tensor:
            entered.append(len(_get_current_dispatch_mode_stack()))
            return t

    armed(Eviction())
    x = torch.ones(3, requires_grad=True)
    with Noted():
        y = (x.exp() * x).sum()
    torch.autograd.grad(y, x, create_graph=True)
    assert entered
    assert not any(entered)
    torch.autograd.grad(y, x)
    assert entered[-1] == 1


# ---------------------------------------------------------------------- the list


class Through(TorchDispatchMode):
    """A mode like Rescue's, for comparison: only calls."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def names_behind(root: Tensor) -> set[str]:
    seen = {root.grad_fn}
    todo = [root.grad_fn]
    while todo:
        node = todo.pop()
        for following, _ in node.next_functions if node is not None else ():
            if following not in seen:
                seen.add(following)
                todo.append(following)
    return {node.name() for node in seen if node is not None}


def gradients(case: opdb.Case, mode: TorchDispatchMode | None) -> tuple[set[str], list[Any]] | None:
    """Names of the graph's nodes, and every gradient's bits; None where plain PyTorch has none, or raises."""
    leaves = tree_map(opdb._leaf, (case.sample.input, case.sample.args, case.sample.kwargs))
    torch.manual_seed(1)
    try:
        _, loss = opdb._forward(case, leaves)
        if loss is None or loss.grad_fn is None:
            return None
        names = names_behind(loss)
        if not names <= SAFE:
            return names, []
        if mode is None:
            loss.backward()
        else:
            with mode:
                loss.backward()
    except (RuntimeError, ValueError, NotImplementedError):
        return None
    tensors = [leaf.tensor for leaf in tree_leaves(leaves) if isinstance(leaf, opdb.Leaf)]
    return names, [opdb.bits(t.grad) for t in tensors if t.grad is not None]


def check(op: OpInfo, limit: int | None) -> set[str]:
    """Hold an op's samples against themselves under a mode; gives the nodes that were met."""
    met: set[str] = set()
    for case in opdb.cases(op, torch.float32, limit, opdb.VARIANTS[: 3 if limit is None else 1]):
        plain = gradients(case, None)
        if plain is None or not plain[0] <= SAFE:
            continue
        under = gradients(case, Through())
        assert plain == under or plain != gradients(case, None), str(case)
        met |= plain[0]
    return met


NOT_IN_THE_DATABASE = {
    "MkldnnRnnLayerBackward0",  # the LSTM above has it
    "NativeDropoutBackward0",  # what dropout is on CUDA; below
}

OPS = opdb.differentiable(torch.float32)


COVER = (
    "nn.functional.multi_head_attention_forward nn.functional.cosine_embedding_loss __rmatmul__ cartesian_prod "
    "nn.functional.poisson_nll_loss nn.functional.smooth_l1_loss nn.functional.local_response_norm tensordot "
    "log_softmax.with_dtype cumulative_trapezoid nn.functional.nll_loss tanh log1p fliplr var.unbiased erf cos "
    "var_mean.unbiased as_strided.partial_views nn.functional.logsigmoid rsqrt index_select split.list_args "
    "reciprocal nn.functional.leaky_relu nn.functional.relu6 select nn.functional.softplus nn.functional.layer_norm "
    "nn.functional.upsample_bilinear nn.functional.adaptive_avg_pool2d fft.fftshift nn.functional.hardswish unbind "
    "nn.functional.relu nn.functional.selu nn.functional.interpolate.nearest __rsub__ squeeze.multiple lerp clamp "
    "take_along_dim nn.functional.embedding nn.functional.mish nn.functional.huber_loss native_batch_norm addcdiv "
    "__getitem__ nn.functional.conv_transpose2d nn.functional.threshold nn.functional.group_norm tril triu addmv "
    "nn.functional.silu nn.functional.binary_cross_entropy_with_logits sigmoid nn.functional.hardsigmoid addcmul "
    "nn.functional.mse_loss nn.functional.gelu addbmm nn.functional.binary_cross_entropy nn.functional.glu "
    "nn.functional.scaled_dot_product_attention nn.functional.max_pool1d"
)
"""Ops whose samples have every node of the list in their graphs."""


@pytest.mark.filterwarnings("ignore")  # what the database's samples warn of is not the subject
def test_every_node_of_the_list_computes_the_same_under_a_mode() -> None:
    met: set[str] = set()
    for op in OPS:
        if opdb.name_of(op) in COVER.split():
            met |= check(op, limit=4)
    assert SAFE - met == NOT_IN_THE_DATABASE


def test_fused_dropout_computes_the_same_under_a_mode() -> None:
    x = torch.linspace(-1, 1, 64).requires_grad_()

    def gradient(mode: AbstractContextManager[Any]) -> Tensor:
        torch.manual_seed(3)
        x.grad = None
        loss = torch.native_dropout(x * 2, 0.3, True)[0].exp().sum()
        names = names_behind(loss)
        assert "NativeDropoutBackward0" in names
        assert names <= SAFE
        with mode:
            loss.backward()
        assert x.grad is not None
        return x.grad

    assert torch.equal(gradient(nullcontext()), gradient(Through()))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # the same
@pytest.mark.parametrize("op", [pytest.param(op, id=opdb.name_of(op)) for op in OPS])
def test_safe_nodes_compute_the_same_under_a_mode_on_all_samples(op: OpInfo) -> None:
    check(op, limit=None)


# ---------------------------------------------------------------------- a real limit

_SCRIPT = """
import resource, sys
import torch
from torch import nn

from lightning_remat.engine.policies import KEEP_ALL
from lightning_remat.engine.rescue import arm
from tests.helpers.evicting import Gpt, evicting, on, policy_tape

torch.set_num_threads(1)
torch.manual_seed(0)
model = Gpt(width=128, layers=6, words=64)
x = torch.arange(8 * 128).reshape(8, 128) * 7 % 64


def step(tape):
    torch.manual_seed(1)
    model.zero_grad()
    with on(tape):
        loss = model(x)
    loss.backward()
    return [loss.detach()] + [p.grad.clone() for p in model.parameters()]


def address_space():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


for _ in range(2):
    true = step(None)  # at full size, so that libraries have their workspaces
tape = policy_tape(KEEP_ALL)
eviction = evicting(tape)
arm(eviction)
step(tape)
limit = address_space() + int(sys.argv[1]) * 2**20
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
try:
    step(None)
    print("plain fits")
except RuntimeError as error:
    print("plain fails:", "allocate memory" in str(error))
got = step(tape)
print("equal:", all(torch.equal(a, b) for a, b in zip(true, got)), "evicted:", eviction.evictions > 0)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_AS and /proc are Linux's")
def test_under_a_real_limit_of_the_address_space() -> None:
    """The allocator of the CPU fails by itself, in its own words."""
    environment = {
        **os.environ,
        "MALLOC_ARENA_MAX": "1",
        "MALLOC_MMAP_THRESHOLD_": "65536",
        "MALLOC_TRIM_THRESHOLD_": "65536",
        "MALLOC_TOP_PAD_": "0",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([os.getcwd(), *filter(None, [os.environ.get("PYTHONPATH")])]),
    }
    found = subprocess.run(
        [sys.executable, "-c", _SCRIPT, "60"], env=environment, capture_output=True, text=True, timeout=240
    )
    assert found.returncode == 0, found.stderr[-3000:]
    assert found.stdout.splitlines() == ["plain fails: True", "equal: True evicted: True"], found.stdout
