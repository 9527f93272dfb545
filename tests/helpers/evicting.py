"""Steps on a tape under an eviction, and allocations that fail on demand."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_remat.engine.actions import COUNT, ActionTable, counted
from lightning_remat.engine.eviction import Eviction
from lightning_remat.engine.plain import backward_outside
from lightning_remat.engine.planned import PlannedTape, first_tensor, script_for
from lightning_remat.engine.policies import Policy
from lightning_remat.engine.replay import Clock
from lightning_remat.engine.rules import rule_for
from lightning_remat.engine.sources import NEVER, Sources
from lightning_remat.engine.tape import Tape
from tests.helpers.exact import Outcome


class Attention(nn.Module):
    """A small GPT block, with dropout wherever GPT-2 has it."""

    def __init__(self, width: int, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        q, k, v = (
            t.view(rows, length, self.heads, -1).transpose(1, 2) for t in self.qkv(self.ln1(x)).split(width, dim=2)
        )
        scores = (q @ k.transpose(-2, -1)) * (1.0 / k.shape[-1] ** 0.5)
        scores = scores.masked_fill(torch.ones(length, length).tril() == 0, float("-inf"))
        y = self.drop(scores.softmax(-1)) @ v
        x = x + self.drop(self.out(y.transpose(1, 2).reshape(rows, length, width)))
        return x + self.drop(self.down(F.gelu(self.up(self.ln2(x)))))


class Gpt(nn.Module):
    def __init__(self, width: int = 8, layers: int = 2, words: int = 11) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.blocks = nn.ModuleList([Attention(width) for _ in range(layers)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, words, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), ids.flatten())


class Cnn(nn.Module):
    """BatchNorm and in-place ReLU, with a residual."""

    def __init__(self, width: int = 4, layers: int = 2) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.convs = nn.ModuleList([nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(layers)])
        self.norms = nn.ModuleList([nn.BatchNorm2d(width) for _ in range(layers)])
        self.head = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for conv, norm in zip(self.convs, self.norms, strict=True):
            y = F.relu(norm(conv(x)), inplace=True)
            x = F.silu(x + y)
        return F.mse_loss(self.head(F.avg_pool2d(x, 4).mean((2, 3))), torch.ones(len(x), 3))


class Lstm(nn.Module):
    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, width)
        self.rnn = nn.LSTM(width, width, num_layers=2, dropout=0.2, batch_first=True)
        self.head = nn.Linear(width, 7)

    def forward(self, ids: Tensor) -> Tensor:
        x, _ = self.rnn(self.embed(ids))
        return F.cross_entropy(F.log_softmax(self.head(torch.tanh(x)), -1).flatten(0, 1), ids.flatten())


def _ids(words: int) -> Tensor:
    return torch.arange(10).reshape(2, 5) * 3 % words


NETS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "gpt": (Gpt, lambda: _ids(11)),
    "cnn": (Cnn, lambda: torch.linspace(-1, 1, 2 * 3 * 64).sin().reshape(2, 3, 8, 8)),
    "lstm": (Lstm, lambda: _ids(7)),
}


def net(name: str) -> tuple[nn.Module, Tensor]:
    """A network and its batch, the same ones each time."""
    torch.manual_seed(0)
    make, batch = NETS[name]
    return make().train(), batch()


# ---------------------------------------------------------------------- steps


class _Counter(TorchDispatchMode):
    """Notes the ops that a plan would count."""

    def __init__(self) -> None:
        super().__init__()
        self.functions: list[Any] = []
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if counted(rule_for(func)) == COUNT and torch.is_grad_enabled():
            self.functions.append(func)
            first = first_tensor(out)
            self.sizes.append(-1 if first is None else first.numel())
        return out


Loss = Callable[[nn.Module, Tensor], Tensor]


def forward(model: nn.Module, x: Tensor) -> Tensor:
    """The usual loss."""
    loss: Tensor = model(x)
    return loss


def planned_tape(model: nn.Module, x: Tensor, drop: Callable[[int], bool], loss: Loss = forward) -> PlannedTape:
    """A tape with a plan for the step, that drops what ``drop`` says by position; started."""
    model = copy.deepcopy(model)
    state = torch.get_rng_state()
    with _Counter() as seen:
        loss(model, x)
    torch.set_rng_state(state)
    tape = PlannedTape(Clock())
    tape.start(script_for(seen.functions, seen.sizes, [drop(i) for i in range(len(seen.functions))]))
    return tape


def policy_tape(policy: Policy) -> Tape:
    """A tape under a policy that holds everywhere."""
    tape = Tape(Clock())
    tape.actions = ActionTable(policy.action)
    return tape


@contextmanager
def on(tape: Tape | None) -> Iterator[None]:
    """A step on a tape; on None, a plain one."""
    if tape is None:
        yield
        return
    if isinstance(tape, PlannedTape):
        tape.start(tape.script)
    with ExitStack() as stack:
        stack.callback(tape.clear)
        stack.enter_context(backward_outside(tape))
        stack.enter_context(tape.hooks)
        stack.enter_context(tape)
        yield


class Failing(TorchDispatchMode):
    """Has the allocations of chosen ops fail, by their number; to be entered outside of the tape.

    Args:
        at: numbers of ops, counted over all calls, repeated ones included.
        times: for how many calls in a row each fails.
        may: which ops may fail at all.

    Attributes:
        calls: ops seen so far.
        failed: names of those that failed.
    """

    def __init__(self, at: Collection[int] = (), may: Callable[[Any], bool] = lambda func: True) -> None:
        super().__init__()
        self.at = set(at)
        self.may = may
        self.calls = 0
        self.names: list[str] = []
        self.failed: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        number = self.calls
        self.calls += 1
        self.names.append(str(func))
        if number in self.at and self.may(func):
            self.failed.append(str(func))
            raise torch.OutOfMemoryError("CUDA out of memory (made up). Tried to allocate 64 bytes.")
        return func(*args, **(kwargs or {}))


class Limited(TorchDispatchMode):
    """A device of a given size: an op whose result does not fit beside what is alive fails, and has changed nothing.

    Attributes:
        peak: most bytes that were alive at once.
        failures: ops that failed.
    """

    def __init__(self, limit: int | None = None) -> None:
        super().__init__()
        self.limit = limit
        self.peak = 0
        self.failures = 0
        self._known: dict[StorageWeakRef, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        writes = rule_for(func).form == "write"
        out = func(*args, **(kwargs or {}))
        new = {}
        for one in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(one, Tensor):
                reference = StorageWeakRef(one.untyped_storage())
                if reference not in self._known:
                    new[reference] = one.untyped_storage().nbytes()
        if new:
            self._known = {r: n for r, n in self._known.items() if not r.expired()}
            alive, asked = sum(self._known.values()), sum(new.values())
            if not writes and self.limit is not None and alive + asked > self.limit:
                self.failures += 1
                del out, one
                missing = alive + asked - self.limit
                raise torch.OutOfMemoryError(f"CUDA out of memory (made up). Tried to allocate {missing} bytes.")
            self._known |= new
            self.peak = max(self.peak, alive + asked)
        return out


def retryable(func: Any) -> bool:
    """Whether a tape calls an op again that has failed, drop it or keep it."""
    return rule_for(func).form != "view" and Sources().verdict(func) != NEVER


def outcome(
    model: nn.Module,
    x: Tensor,
    tape: Tape | None,
    mode: TorchDispatchMode | None = None,
    *,
    loss: Loss = forward,
    backward: Callable[[Tensor], Any] | None = None,
    before_backward: Callable[[], Any] = lambda: None,
    steps: int = 1,
) -> Outcome:
    """Run steps of a copy of ``model`` and give all that they leave behind; ``mode`` is active all the time."""
    model = copy.deepcopy(model)
    torch.manual_seed(5)
    losses = []
    with ExitStack() as stack:
        if mode is not None:
            stack.enter_context(mode)
        for _ in range(steps):
            with on(tape):
                value = loss(model, x)
            before_backward()
            (backward or Tensor.backward)(value)
            losses.append(value.detach().clone())
            del value
    return Outcome(
        losses,
        {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()},
        {n: b.clone() for n, b in model.named_buffers()},
        (torch.get_rng_state(), None, b""),
    )


def evicting(tape: Tape, **options: Any) -> Eviction:
    """An eviction that looks after a tape."""
    eviction = Eviction(**options)
    eviction.attach(tape)
    return eviction


def every(count: int, step: int = 1) -> Sequence[int]:
    """Numbers of the ops to fail, one after the other."""
    return range(0, count, step)
