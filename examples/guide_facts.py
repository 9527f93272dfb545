"""The figures beside the facts of the guide: bytes from allocation events, FLOPs by PyTorch's own counter.

python examples/guide_facts.py [--json FILE]

All figures are counts, and come out the same wherever the kernels are the same. One exception: which plan is made under
the budget (``planned_...``) depends on how long the ops took in the step that was traced.
"""

import argparse
import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
from byte_gpt import Block, ByteGPT
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop
from torch.utils.flop_counter import FlopCounterMode

from lightning_remat import Offload, Remat
from lightning_remat.runtime.memory import measure_peak

WIDTH, HEADS, BLOCKS, CONTEXT, BATCH = 128, 4, 8, 128, 4
Figures = dict[str, float]


def gpt(blocks: int = BLOCKS, context: int = CONTEXT) -> ByteGPT:
    """A small GPT with dropout."""
    torch.manual_seed(0)
    return ByteGPT(blocks=blocks, width=WIDTH, heads=HEADS, context=context)


def windows(batch: int = BATCH, context: int = CONTEXT) -> Tensor:
    """Made-up bytes: what is counted here does not depend on what they are."""
    return torch.randint(0, 256, (batch, context + 1), generator=torch.Generator().manual_seed(1))


def total(model: nn.Module, x: Tensor) -> Tensor:
    """The simplest loss."""
    return model(x).sum()


@contextmanager
def attention(kind: str) -> Iterator[None]:
    """``"fused"``: one kernel, as PyTorch chooses; ``"eager"``: scores, softmax and products as ops of their own."""
    with sdpa_kernel(SDPBackend.MATH) if kind == "eager" else torch.enable_grad():
        yield


def kept_after_forward(forward: Callable[[], Tensor]) -> int:
    """Bytes that forward leaves behind for backward."""
    losses = []
    return measure_peak(lambda: losses.append(forward())).left_bytes


def peak_of_step(forward: Callable[[], Tensor], remat: Remat | None = None, before: int = 1) -> int:
    """Peak of a whole step, forward and backward, above what was there before it, after ``before`` others."""

    def step() -> None:
        with remat if remat is not None else torch.enable_grad():
            loss = forward()
        loss.backward()

    for _ in range(before):  # gradients are there from now on, and under Remat names are noted in the first step only
        step()
    return measure_peak(step).peak_bytes


def flops_of_step(forward: Callable[[], Tensor], remat: Remat | None = None) -> int:
    """FLOPs of matrix products in forward and backward, recomputation included."""
    with FlopCounterMode(display=False) as counter:
        with remat if remat is not None else torch.enable_grad():
            loss = forward()
        loss.backward()
    return counter.get_total_flops()


# ---------------------------------------------------------------------- 1: what it is


def what_it_is() -> Figures:
    """One step, plain and with everything inside the blocks computed again."""
    forward = partial(gpt().loss, windows())
    plain, full = peak_of_step(forward), peak_of_step(forward, Remat(policy="full"))
    return {"plain_peak": plain, "full_peak": full, "full_share": full / plain}


# ---------------------------------------------------------------------- 2: why activations are stored


def why_stored() -> Figures:
    """What forward leaves behind, and how that grows."""

    def kept(batch: int = BATCH, context: int = CONTEXT, blocks: int = BLOCKS, kind: str = "fused") -> int:
        with attention(kind):
            return kept_after_forward(partial(gpt(blocks, context).loss, windows(batch, context)))

    base, eager = kept(), kept(kind="eager")
    with torch.no_grad():
        nothing = kept_after_forward(partial(gpt().loss, windows()))
    return {
        "kept": base,
        "kept_no_grad": nothing,
        "kept_parameters": sum(p.nbytes for p in gpt().parameters()),
        "kept_batch_2": kept(batch=2 * BATCH) / base,
        "kept_depth_2": kept(blocks=2 * BLOCKS) / base,
        "kept_sequence_2": kept(context=2 * CONTEXT) / base,
        "kept_sequence_4": kept(context=4 * CONTEXT) / base,
        "kept_sequence_2_eager": kept(context=2 * CONTEXT, kind="eager") / eager,
        "kept_sequence_4_eager": kept(context=4 * CONTEXT, kind="eager") / eager,
    }


# ---------------------------------------------------------------------- 3: checkpoints


def checkpoints() -> Figures:
    """What is there when backward begins: everything, or the block borders and what lies outside of blocks."""
    plainly = partial(gpt().loss, windows())
    remat = Remat(policy="full")

    def forward() -> Tensor:
        with remat:
            return plainly()

    forward().backward()
    plain, full = kept_after_forward(plainly), kept_after_forward(forward)
    border = BATCH * CONTEXT * WIDTH * 4
    return {
        "borders_kept": full,
        "borders_share": full / plain,
        "border": border,
        "borders": (BLOCKS + 1) * border,
        "blocks": BLOCKS,
    }


# ---------------------------------------------------------------------- 4: about a third, and the square root


class Layer(nn.Module):
    """Saves one tensor as large as its input: that of its linear map is what the layer before has saved."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).tanh()


def chain(layers: int) -> nn.Sequential:
    """``layers`` equal layers."""
    torch.manual_seed(0)
    return nn.Sequential(*[Layer() for _ in range(layers)])


def a_third() -> Figures:
    """FLOPs of the blocks alone, attention out of matrix products so that all of them are counted."""

    def counted(dropout: float, way: str, context: int = CONTEXT) -> int:
        torch.manual_seed(0)
        stack = nn.ModuleList(Block(WIDTH, HEADS, dropout) for _ in range(BLOCKS))
        x = torch.randn(BATCH, context, WIDTH, requires_grad=True)

        def forward() -> Tensor:
            h = x
            for block in stack:
                h = checkpoint(block, h, use_reentrant=False) if way.startswith("checkpoint") else block(h)
            return h.sum()

        remat = Remat(policy=way, blocks=Block) if way in ("full", "selective") else None
        with attention("eager"), set_checkpoint_early_stop(way != "checkpoint, to the end"):
            return flops_of_step(forward, remat)

    plain = counted(0.0, "plain")
    return {
        "flops_checkpoint_to_the_end": counted(0.0, "checkpoint, to the end") / plain,
        "flops_checkpoint": counted(0.0, "checkpoint") / plain,
        "flops_checkpoint_short": counted(0.0, "checkpoint", 4) / counted(0.0, "plain", 4),
        "flops_checkpoint_dropout": counted(0.1, "checkpoint") / plain,
        "flops_full": counted(0.0, "full") / plain,
        "flops_full_dropout": counted(0.1, "full") / plain,
        "flops_selective_dropout": counted(0.1, "selective") / plain,
    }


def square_root() -> Figures:
    """Chains of 16 and 64 equal layers, cut into segments of equal length."""
    x = torch.randn(1024, 64)
    unit = x.nbytes
    found: Figures = {"unit": unit}
    for layers in (16, 64):
        forward = partial(total, chain(layers), x)
        found[f"chain_{layers}_plain"] = peak_of_step(forward) / unit
        found[f"chain_{layers}_sqrt"] = peak_of_step(forward, Remat(policy="sqrt", blocks=Layer)) / unit
    for every in (2, 4, 8, 16, 32):
        remat = Remat(policy=f"every:{every}", blocks=Layer)
        found[f"chain_64_every_{every}"] = peak_of_step(forward, remat) / unit
    return found


# ---------------------------------------------------------------------- 5: selective


def selective() -> Figures:
    """Peak of a step and FLOPs under ``selective``, with attention fused and eager."""
    found: Figures = {}
    forward = partial(gpt().loss, windows())
    for kind in ("fused", "eager"):
        with attention(kind):
            plain = peak_of_step(forward)
            found[f"selective_plain_{kind}"] = plain
            for policy in ("selective", "full"):
                peak = peak_of_step(forward, Remat(policy=policy))
                found[f"{policy}_peak_{kind}"] = peak
                found[f"{policy}_saved_{kind}"] = 1 - peak / plain
    with attention("eager"):
        plain_flops = flops_of_step(forward)
        for policy in ("selective", "full"):
            found[f"{policy}_extra_flops"] = flops_of_step(forward, Remat(policy=policy)) / plain_flops - 1
    return found


# ---------------------------------------------------------------------- 6: where it is used


def where_used() -> Figures:
    """How large a batch, and how long a sequence, fits into the memory of a plain step."""
    context = CONTEXT // 2
    room = peak_of_step(partial(gpt(context=context).loss, windows(context=context)))

    def peak(policy: str, batch: int, context: int) -> int:
        return peak_of_step(partial(gpt(context=context).loss, windows(batch, context)), Remat(policy=policy))

    found: Figures = {"room": room, "room_batch": BATCH, "room_context": context}
    for policy in ("selective", "full"):
        batch = _largest(lambda n, p=policy: peak(p, n, context), room, BATCH)
        length = 8 * _largest(lambda n, p=policy: peak(p, BATCH, 8 * n), room, context // 8)
        found |= {f"largest_batch_{policy}": batch, f"longest_{policy}": length}
    return found


def _largest(peak: Callable[[int], int], room: int, known: int) -> int:
    """The largest whole number whose peak is within ``room``; peaks grow nearly as it does, and one is known."""
    n = known * room // peak(known)
    while peak(n) > room:
        n -= 1
    while peak(n + 1) <= room:
        n += 1
    return n


# ---------------------------------------------------------------------- 7: where it goes


def where_it_goes() -> Figures:
    """A plan op by op under half of the plain peak, and what leaves for a disk."""
    model = gpt()
    forward = partial(model.loss, windows())
    plain = peak_of_step(forward)
    static = sum(2 * p.nbytes for p in model.parameters())  # and their gradients, which are there since that step
    found: Figures = {"offload_plain": plain}

    remat = Remat(policy="auto", budget=static + plain // 2)
    peak = peak_of_step(forward, remat, before=5)
    assert remat.plan is not None
    found |= {
        "planned_budget": plain // 2,
        "planned_predicted": remat.plan.peak_bytes - remat.plan.static_bytes,
        "planned_peak": peak,
        "planned_again": remat.stats.replayed_ops,
        "planned_of": len(remat.plan.chosen.drop),
    }
    with tempfile.TemporaryDirectory() as folder:
        for policy in ("offload_only", "full"):
            remat = Remat(policy=policy, offload=Offload(folder, in_flight="1MiB"))
            found[f"offload_peak_{policy}"] = peak_of_step(forward, remat)
            if policy == "offload_only":
                found["offload_out"] = remat.counters.last_bytes_out
            remat.close()
    return found


# ---------------------------------------------------------------------- 8: risks


class Residual(nn.Module):
    """A block of a small network for images."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm_1 = nn.Conv2d(16, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)
        self.second, self.norm_2 = nn.Conv2d(16, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.norm_2(self.second(self.norm_1(self.first(x)).relu()))).relu()


class Recurrent(nn.Module):
    """A block around a recurrent layer, whose kernel keeps much for itself."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.lstm = nn.LayerNorm(WIDTH), nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.lstm(self.norm(x))[0]


def risks() -> Figures:
    """One policy on three models: what it saves on one says little about another."""
    torch.manual_seed(0)
    images, cnn = torch.randn(8, 16, 32, 32), nn.Sequential(*[Residual() for _ in range(8)])
    sequence, lstm = torch.randn(BATCH, CONTEXT, WIDTH), nn.Sequential(*[Recurrent() for _ in range(8)])
    models: dict[str, Callable[[], Tensor]] = {
        "gpt": partial(gpt().loss, windows()),
        "cnn": partial(total, cnn, images),
        "lstm": partial(total, lstm, sequence),
    }
    found: Figures = {}
    for name, forward in models.items():
        plain = peak_of_step(forward)
        for policy in ("selective", "full"):
            found[f"{policy}_of_plain_{name}"] = peak_of_step(forward, Remat(policy=policy)) / plain
    return found


FACTS = (what_it_is, why_stored, checkpoints, a_third, square_root, selective, where_used, where_it_goes, risks)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    figures: Figures = {}
    for fact in FACTS:
        print(fact.__name__.replace("_", " "), flush=True)
        found = fact()
        for name, value in found.items():
            print(f"  {name:32} {value:14,.3f}" if isinstance(value, float) else f"  {name:32} {value:14,}")
        figures |= found
    if options.json is not None:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
