"""The idea of the tape in forty lines: a toy that drops what GELU and LayerNorm make, and runs them again for backward.

python examples/how_tape.py [--json FILE]

It is no tape to train with: no views, no in-place ops, no random ops, and what runs twice is not remembered.
"""

import argparse
import json
from pathlib import Path
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_remat.runtime.memory import measure_peak

aten = torch.ops.aten


# --8<-- [start:toy]
class Dropped:
    """A value that nobody holds: the op that makes it, and what that op reads."""

    def __init__(self, func: Any, args: list[Any], output: int | None) -> None:
        self.func, self.args, self.output = func, args, output

    def again(self) -> Tensor:
        """Run the op; what it reads may have to be made first."""
        out = self.func(*[a.again() if isinstance(a, Dropped) else a for a in self.args])
        return out if self.output is None else out[self.output]


class ToyTape(TorchDispatchMode):
    """Sees every op below autograd. What a recorded op makes is looked up by its storage, and not held."""

    recorded = (aten.gelu.default, aten.native_layer_norm.default)

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[int, tuple[Any, Dropped]] = {}

    def find(self, x: Any) -> Any:
        """What stands for a tensor in a record: how to make it, or the tensor itself."""
        if not isinstance(x, Tensor):
            return x
        storage = x.untyped_storage()
        alive, dropped = self.made.get(id(storage), (lambda: None, None))
        return dropped if alive() is storage else x

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in self.recorded and not kwargs:
            first = out if isinstance(out, Tensor) else out[0]
            number = None if isinstance(out, Tensor) else 0
            storage = first.untyped_storage()
            self.made[id(storage)] = (ref(storage), Dropped(func, [self.find(a) for a in args], number))
        return out

    def unpack(self, saved: Tensor | Dropped) -> Tensor:
        return saved.again() if isinstance(saved, Dropped) else saved


# --8<-- [end:toy]


# --8<-- [start:step]
def taped_forward(model: nn.Module, x: Tensor, tape: ToyTape) -> Tensor:
    with torch.autograd.graph.saved_tensors_hooks(tape.find, tape.unpack), tape:
        return model(x).square().mean()


# --8<-- [end:step]


def forward_and_backward(model: nn.Module, x: Tensor, tape: ToyTape | None) -> tuple[int, list[Tensor]]:
    """Bytes that forward leaves for backward, and the gradients."""
    losses: list[Tensor] = []

    def forward() -> None:
        losses.append(model(x).square().mean() if tape is None else taped_forward(model, x, tape))

    kept = measure_peak(forward).left_bytes
    model.zero_grad()
    losses[0].backward()
    return kept, [p.grad.clone() for p in model.parameters() if p.grad is not None]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(4)]
    model, x = nn.Sequential(*blocks), torch.randn(256, 64)

    plain, gradients = forward_and_backward(model, x, None)
    toy, same = forward_and_backward(model, x, ToyTape())
    equal = all(torch.equal(a, b) for a, b in zip(gradients, same, strict=True))
    print(f"kept for backward: {plain:,} bytes plainly, {toy:,} with the toy")
    print(f"gradients equal in every bit: {'yes' if equal else 'no'}")
    if options.json is not None:
        figures = {"plain_bytes": plain, "toy_bytes": toy, "share": toy / plain, "equal": "yes" if equal else "no"}
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
