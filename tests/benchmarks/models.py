"""The yardsticks of the benchmarks: one GPT in several sizes, and the ways to run it that are compared.

The model is kept apart from the examples on purpose: figures stay comparable when an example changes. All variants run
one and the same model object; what differs is how a block is called and what the forward pass is wrapped in.
"""

from __future__ import annotations

import functools
import platform
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from lightning_remat import Remat

aten = torch.ops.aten
EXPENSIVE = [
    aten.mm.default,
    aten.addmm.default,
    aten.bmm.default,
    aten.convolution.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
]
"""The ops whose results the peer's selective checkpointing keeps, and ours where it is given a list."""
EXPENSIVE_NAMES = frozenset(str(op) for op in EXPENSIVE)

VOCABULARY = 256
RunBlock = Callable[[nn.Module, Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of the model and of its batch."""

    blocks: int
    width: int
    context: int
    batch: int
    heads: int = 8
    dropout: float = 0.1
    attention: str = "fused"
    """``fused``: `scaled_dot_product_attention` without dropout inside, which has a kernel of its own on every device.
    ``eager``: two matrix products with softmax and dropout between them, every intermediate visible."""


class Block(nn.Module):
    """Pre-norm transformer block: ``(B, T, width)`` to ``(B, T, width)``."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width = shape.width
        self.shape = shape
        self.norm_1 = nn.LayerNorm(width)
        self.norm_2 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.drop = nn.Dropout(shape.dropout)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm_1(x)).unflatten(-1, (3, self.shape.heads, -1)).transpose(1, 3).unbind(2)
        mixed = self.eager(q, k, v) if self.shape.attention == "eager" else self.fused(q, k, v)
        x = x + self.drop(self.out(mixed.transpose(1, 2).flatten(2)))
        return x + self.drop(self.down(F.gelu(self.up(self.norm_2(x)))))

    def fused(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def eager(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.mT * q.shape[-1] ** -0.5
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        return self.drop(scores.masked_fill(future, -torch.inf).softmax(-1)) @ v


def call(block: nn.Module, x: Tensor) -> Tensor:
    """The plain way to run a block."""
    return block(x)


class Stack(nn.Module):
    """Blocks and nothing else, so that a time per block is one."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.blocks))

    def forward(self, x: Tensor, run_block: RunBlock = call) -> Tensor:
        """The loss of a batch ``(B, T, width)``: the mean square of the last block's output."""
        for block in self.blocks:
            x = run_block(block, x)
        return x.square().mean()


class GPT(nn.Module):
    """Embedding, blocks, norm, head and loss."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, shape.width)
        self.position = nn.Embedding(shape.context, shape.width)
        self.drop = nn.Dropout(shape.dropout)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.blocks))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor, run_block: RunBlock = call) -> Tensor:
        """The next-token loss of a batch ``(B, T + 1)``."""
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        x = self.drop(self.embed(inputs) + self.position.weight[: inputs.shape[1]])
        for block in self.blocks:
            x = run_block(block, x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def tokens_for(shape: Shape) -> Tensor:
    """A batch for `GPT`."""
    return torch.randint(VOCABULARY, (shape.batch, shape.context + 1))


def states_for(shape: Shape) -> Tensor:
    """A batch for `Stack`."""
    return torch.randn(shape.batch, shape.context, shape.width)


class PassThrough(TorchDispatchMode):
    """The least that any dispatch mode costs: every op is called from Python, and nothing else happens."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@contextmanager
def pass_through() -> Iterator[None]:
    """`PassThrough` with saved-tensor hooks that return what they are given."""
    with saved_tensors_hooks(lambda t: t, lambda t: t), PassThrough():
        yield


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One way to run a step: ``with around(): loss = model(batch, run_block)``, then ``loss.backward()``."""

    name: str
    run_block: RunBlock = call
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    installed: Callable[[], AbstractContextManager[Any]] = nullcontext
    """What is set up before, and undone after, a row of steps; it is not part of their time."""
    peer: str | None = None
    """For ours: the variant it is to be compared with."""

    def forward(self, model: nn.Module, batch: Any) -> Tensor:
        with self.around():
            return model(batch) if self.run_block is call else model(batch, self.run_block)

    def step(self, model: nn.Module, batch: Any) -> None:
        self.forward(model, batch).backward()


PLAIN = Variant(name="plain")
CHECKPOINT = Variant(name="torch checkpoint", run_block=functools.partial(checkpoint, use_reentrant=False))
SELECTIVE = Variant(
    name="torch selective",
    run_block=functools.partial(
        checkpoint, use_reentrant=False, context_fn=functools.partial(create_selective_checkpoint_contexts, EXPENSIVE)
    ),
)
PASS_THROUGH = Variant(name="pass-through mode", around=pass_through)


def ours(policy: str, peer: Variant) -> Variant:
    """A variant under `Remat` with a named policy."""
    engine = Remat(policy=policy)
    return Variant(name=f"remat {policy}", around=lambda: engine, peer=peer.name)


def ours_with_list(peer: Variant, *, borders: bool = True) -> Variant:
    """`Remat` under a function that keeps exactly what the peer's list keeps.

    The peer also keeps what enters each block, since it is called per block. ``borders`` names the blocks, which makes
    `Remat` do the same; without them nothing but the list is kept, and replay starts at the bottom of the model.
    """
    engine = Remat(
        policy=lambda op: "keep" if op.name in EXPENSIVE_NAMES else "recompute", blocks=Block if borders else None
    )
    name = "remat, same list" if borders else "remat, list alone"
    return Variant(name=name, around=lambda: engine, peer=peer.name)


@contextmanager
def buffers_restored(model: nn.Module) -> Iterator[None]:
    """Leave a model's buffers as they were, running statistics above all, so that the next one starts from the same."""
    before = [b.clone() for b in model.buffers()]
    yield
    with torch.no_grad():
        for buffer, value in zip(model.buffers(), before, strict=True):
            buffer.copy_(value)


def outcome(variant: Variant, model: nn.Module, batch: Any) -> dict[str, list[Tensor]]:
    """What a step from a fixed seed leaves behind, by kind. The model ends without gradients, its buffers as before."""
    torch.manual_seed(1)
    with buffers_restored(model), variant.installed():
        loss = variant.forward(model, batch)
        loss.backward()
        found = {
            "loss": [loss.detach()],
            "gradients": [p.grad for p in model.parameters() if p.grad is not None],
            "buffers": [b.clone() for b in model.buffers()],
            "random state": [torch.get_rng_state()],
        }
    model.zero_grad()
    return found


def differences(expected: dict[str, list[Tensor]], found: dict[str, list[Tensor]]) -> list[str]:
    """Kinds in which two outcomes are not equal in every bit."""
    return [
        kind
        for kind, tensors in expected.items()
        if len(tensors) != len(found[kind]) or not all(map(torch.equal, tensors, found[kind]))
    ]


def check_equal(variants: list[Variant], model: nn.Module, batch: Any) -> None:
    """Raise unless every variant gives the loss and the gradients of the first one, bit for bit.

    Leaves the model without gradients.
    """
    expected = outcome(variants[0], model, batch)
    for variant in variants[1:]:
        if different := differences(expected, outcome(variant, model, batch)):
            raise SystemExit(f"{variant.name}: {', '.join(different)} differ from those of {variants[0].name}")


def environment() -> dict[str, Any]:
    """What a reader must know to compare figures."""
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "threads": torch.get_num_threads(),
    }
