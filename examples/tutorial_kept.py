"""What autograd keeps for backward: by hand, by print_kept, and by the allocator, for a small model and for a GPT.

python examples/tutorial_kept.py
"""

import copy

import torch
from byte_gpt import Block, ByteGPT
from figures import save_figures
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from lightning_remat import print_kept
from lightning_remat.engine.ledger import OUTSIDE
from lightning_remat.reporting.kept import kept_by
from lightning_remat.runtime.memory import measure_peak

ROWS, WIDTH, HIDDEN = 32, 256, 1024
BATCH, LENGTH, CHANNELS, HEADS = 4, 128, 128, 4
FLOAT = 4  # bytes


# --8<-- [start:hooks]
def saved_by(function, *args) -> list[Tensor]:
    """Every tensor that autograd saves while `function` runs, in order."""
    saved = []

    def pack(tensor):
        saved.append(tensor.detach())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        function(*args)
    return saved


# --8<-- [end:hooks]


def kept_bytes(function, *args) -> int:
    """What print_kept prints as its sum of activations."""
    return sum(one.nbytes for one in kept_by(function, *args) if one.op != OUTSIDE)


def see_what_is_saved(model: nn.Module, x: Tensor) -> dict[str, int]:
    print("\n== Saved tensors")
    # --8<-- [start:saved]
    for tensor in saved_by(model, x):
        print(f"{tensor.nbytes:>8} bytes  {tuple(tensor.shape)}")
    # --8<-- [end:saved]
    return {"small_saved_tensors": len(saved_by(model, x))}


def count_by_hand(model: nn.Module, x: Tensor) -> dict[str, int]:
    print("\n== print_kept")
    # --8<-- [start:small]
    print_kept(model, x)
    by_hand = 2 * ROWS * HIDDEN * FLOAT
    print(f"by hand: {by_hand} bytes; by print_kept: {kept_bytes(model, x)} bytes")
    # --8<-- [end:small]
    return {"small_by_hand_bytes": by_hand, "small_bytes": kept_bytes(model, x)}


def look_into_a_block() -> dict[str, int]:
    print("\n== A block")
    # --8<-- [start:block]
    block = Block(CHANNELS, HEADS, dropout=0.1)
    x = torch.randn(BATCH, LENGTH, CHANNELS)
    print_kept(block, x)

    unit = BATCH * LENGTH * CHANNELS * FLOAT  # the size of x
    rows = BATCH * LENGTH * FLOAT  # one number for each position
    by_hand = 17 * unit + HEADS * rows + 4 * rows
    print(f"by hand: {by_hand} bytes; by print_kept: {kept_bytes(block, x)} bytes")
    # --8<-- [end:block]
    return {"unit_bytes": unit, "block_by_hand_bytes": by_hand, "block_bytes": kept_bytes(block, x)}


def gpt(blocks: int = 4, length: int = LENGTH) -> ByteGPT:
    return ByteGPT(blocks=blocks, width=CHANNELS, heads=HEADS, context=length, dropout=0.1)


def windows(batch: int = BATCH, length: int = LENGTH) -> Tensor:
    return torch.randint(0, 256, (batch, length + 1))


def ask_the_allocator() -> dict[str, int]:
    print("\n== A whole forward pass")
    # --8<-- [start:allocator]
    model, batch = gpt(), windows()
    print_kept(model.loss, batch, rows=5)

    results = []
    counted = measure_peak(lambda: results.append(model.loss(batch)))
    print(f"by print_kept: {kept_bytes(model.loss, batch)} bytes of activations")
    print(f"by the allocator: {counted.left_bytes} bytes are left, {results[0].nbytes} of them the loss itself")
    # --8<-- [end:allocator]
    return {
        "gpt_bytes": kept_bytes(model.loss, batch),
        "gpt_allocated_bytes": counted.left_bytes,
        "loss_bytes": results[0].nbytes,
        "gpt_parameter_bytes": sum(p.nbytes for p in model.parameters()),
    }


def see_what_grows() -> dict[str, object]:
    print("\n== What grows")
    # --8<-- [start:grows]
    batches, lengths, depths = [2, 4, 8, 16], [64, 128, 256, 512], [1, 2, 4, 8]
    by_batch = [kept_bytes(gpt().loss, windows(batch=n)) for n in batches]
    by_length = [kept_bytes(gpt(length=n).loss, windows(length=n)) for n in lengths]
    by_depth = [kept_bytes(gpt(blocks=n).loss, windows()) for n in depths]
    with sdpa_kernel(SDPBackend.MATH):  # attention as separate operations, not as one
        written_out = [kept_bytes(gpt(length=n).loss, windows(length=n)) for n in lengths]
    # --8<-- [end:grows]
    for name, at, found in (
        ("batch", batches, by_batch),
        ("length", lengths, by_length),
        ("length, attention written out", lengths, written_out),
        ("blocks", depths, by_depth),
    ):
        cells = "  ".join(f"{n:>3}: {size / 2**20:6.2f} MiB" for n, size in zip(at, found, strict=True))
        print(f"{name:30} {cells}")
    return {
        "batches": batches,
        "batch_bytes": by_batch,
        "lengths": lengths,
        "length_bytes": by_length,
        "written_out_bytes": written_out,
        "depths": depths,
        "depth_bytes": by_depth,
        "longest_bytes": by_length[-1],
        "longest_written_out_bytes": written_out[-1],
        "bytes_per_block": (by_depth[-1] - by_depth[0]) // (depths[-1] - depths[0]),
    }


def look_at_storages(model: nn.Module, x: Tensor) -> dict[str, int]:
    print("\n== Shared storages")
    # --8<-- [start:shared]
    relu = nn.Sequential(model[0], nn.ReLU(), model[2])
    print_kept(relu, x)
    # --8<-- [end:shared]
    print("\n== Views")
    # --8<-- [start:views]
    first = model[0]  # its result has HIDDEN columns; only four of them are squared

    def squares_of_a_view(x):
        return first(x)[:, :4].square()

    def squares_of_a_copy(x):
        return first(x)[:, :4].clone().square()

    print_kept(squares_of_a_view, x)
    print_kept(squares_of_a_copy, x)
    # --8<-- [end:views]
    return {
        "relu_bytes": kept_bytes(relu, x),
        "view_bytes": kept_bytes(squares_of_a_view, x),
        "copy_bytes": kept_bytes(squares_of_a_copy, x),
    }


def do_the_exercises(model: nn.Module, x: Tensor) -> dict[str, int]:
    """The answers to the exercises on the tutorial's page."""
    h = torch.randn(BATCH, LENGTH, CHANNELS)
    with torch.no_grad():
        model_without = len(saved_by(model, x))
    frozen = copy.deepcopy(model)
    frozen[2].requires_grad_(False)
    return {
        "no_dropout_bytes": kept_bytes(Block(CHANNELS, HEADS, dropout=0.0), h),
        "bfloat16_bytes": kept_bytes(Block(CHANNELS, HEADS, dropout=0.1).bfloat16(), h.bfloat16()),
        "frozen_bytes": kept_bytes(frozen, x),
        "no_grad_tensors": model_without,
    }


def main() -> None:
    torch.manual_seed(0)
    # --8<-- [start:model]
    model = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, WIDTH))
    x = torch.randn(ROWS, WIDTH)
    # --8<-- [end:model]
    save_figures(
        **see_what_is_saved(model, x),
        **count_by_hand(model, x),
        **look_into_a_block(),
        **ask_the_allocator(),
        **see_what_grows(),
        **look_at_storages(model, x),
        **do_the_exercises(model, x),
    )


if __name__ == "__main__":
    main()
