"""Random programs of tensor ops, run plainly and under every policy: whatever is not equal bit for bit is a fault.

A program is a row of small instructions over a list of tensors: arithmetic, views, in-place ops on whatever is there,
random ops, reductions, ops with several outputs, custom functions, parts under ``no_grad``, gradients asked for on the
way. What an instruction does follows from its own seed and from the shapes it finds, so the same program does the same
under any policy, and instructions can be left out one by one to make a failing program short.

``python -m tests.engine.fuzz --programs 20000 --first 0`` looks further than the suite does.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from typing import Any

import torch
from torch import Tensor, nn

from lightning_remat import Remat
from lightning_remat.engine.verify import same_bits
from lightning_remat.errors import OffloadError

# Their order is that in which instructions are registered, on which the programs of all seeds depend.
from tests.engine.fuzzing import arithmetic, changes, corners  # noqa: F401 - imported for what they register
from tests.engine.fuzzing.machine import BLOCKS, LENGTH, BackwardError, Machine
from tests.engine.fuzzing.moving import Held, Scripted, Seen
from tests.helpers.evicting import Failing, on
from tests.helpers.exact import EVERYTHING, recompute_all


class Block(nn.Module):
    """A stretch of the program."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self.part = nn.Linear(2, 2, bias=False)

    def forward(self, tensors: list[Tensor], machine: Machine, positions: list[int]) -> list[Tensor]:
        machine.tensors = tensors
        for position in positions:
            machine.run(position)
        return machine.tensors


class Program(nn.Module):
    """A program as a model of several blocks."""

    def __init__(self, seed: int, positions: Sequence[int]) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.p = nn.Parameter(torch.randn(4, 6) * 0.5)
        self.q = nn.Parameter(torch.randn(6, 6) * 0.5)
        self.r = nn.Parameter(torch.randn(6) * 0.5)
        self.register_buffer("b", torch.randn(6))
        self.blocks = nn.ModuleList(Block(i) for i in range(BLOCKS))
        self.machine = Machine(seed, [self.p, self.q, self.r], [self.b])
        self.positions = list(positions)

    def forward(self) -> tuple[Tensor, list[Tensor]]:
        m = self.machine
        m.start()
        tensors = m.tensors
        for number, block in enumerate(self.blocks):
            mine = [i for i in self.positions if i % (BLOCKS + 1) == number]
            tensors = block(tensors, m, mine)
        m.tensors = tensors
        for i in self.positions:
            if i % (BLOCKS + 1) == BLOCKS:
                m.run(i)
        loss = torch.zeros((), dtype=torch.float64)
        for t in m.tensors:
            if t.requires_grad:
                try:
                    loss = loss + t.to(torch.float64).nan_to_num(0, 1, -1).clamp(-9, 9).sin().sum()
                except RuntimeError as error:  # a view of several whose base was changed
                    m.events.append(type(error).__name__)
        return loss + self.p.sum(), m.extra_losses


class Result:
    """Everything that can be seen from outside."""

    def __init__(self) -> None:
        self.events: list[Any] = []
        self.tensors: list[Tensor] = []
        self.raised_in_backward = False
        self.lost = False  # what had left could not be had back

    def add(self, tensor: Tensor | None) -> None:
        self.tensors.append(torch.tensor([]) if tensor is None else tensor.detach().clone().resolve_conj())


def run_program(seed: int, positions: Sequence[int], remat: Remat | Scripted | Held | None, steps: int = 2) -> Result:
    """Run a program for some steps."""
    program = Program(seed, positions)
    press = remat if isinstance(remat, Scripted) else None
    if press is not None:
        program.machine.run = press.press(program.machine.run)  # type: ignore[method-assign]  # of this one machine
    torch.manual_seed(seed)
    result = Result()
    for _ in range(steps):
        try:
            if remat is None:
                loss, extra = program()
            else:
                with remat:
                    loss, extra = program()
        except BackwardError as error:
            result.raised_in_backward = True
            result.lost = isinstance(error.__cause__, OffloadError)
            result.events += [list(program.machine.events), f"on the way: {error.__cause__!r}"]
            break
        result.events.append(list(program.machine.events))
        for t in program.machine.tensors:
            result.add(t)
        result.add(loss)
        if press is not None:
            press.make_room()
        try:
            if extra and extra[0].requires_grad:
                extra[0].sum().backward(retain_graph=True)
            loss.backward()
        except RuntimeError as error:
            result.raised_in_backward = True
            result.lost = isinstance(error, OffloadError)
            result.events.append(f"backward: {type(error).__name__}: {error}")
            break
        result.add(torch.get_rng_state())
        for p in program.parameters():
            result.add(p.grad)
        for t in program.machine.tensors:
            result.add(t.grad if t.retains_grad else None)
        result.add(program.b)
    return result


POLICIES: dict[str, Any] = {
    "all": recompute_all,
    "full": "full",
    "every:2": "every:2",
    "sqrt": "sqrt",
    "selective": "selective",
    "map": {"blocks.1": recompute_all, "blocks.*": "selective"},
    "half": lambda op: "keep" if hash((op.name, op.bytes)) % 2 and len(op.name) % 2 else "recompute",
    "moved": "offload_only",
    "moved full": "full",
    "moved selective": "selective",
    "moved all": recompute_all,
    "planned": None,  # plans of all sorts: see fuzzing/moving.py
}


def difference(plain: Result, other: Result) -> str | None:
    """What is wrong with ``other``, or None."""
    if plain.raised_in_backward:
        if other.raised_in_backward:
            return None
        # It may give a value instead; up to there everything has to agree.
    elif other.raised_in_backward:
        return f"raised: {other.events[-1]}"
    for i, (a, b) in enumerate(zip(plain.events, other.events, strict=False)):
        for x, y in zip(a, b, strict=False) if isinstance(a, list) and isinstance(b, list) else ():
            if x != y:
                return f"events of step {i}: {x} | {y}"
    for i, (a, b) in enumerate(zip(plain.tensors, other.tensors, strict=False)):
        if not same_bits(a, b):
            return f"tensor {i}: {a} and {b}"
    return None


def check(seed: int, positions: Sequence[int], policies: Sequence[str]) -> str | None:
    """Run one program under the policies; the first fault found, or None."""
    plain = run_program(seed, positions, None)
    if difference(plain, run_program(seed, positions, None)) is not None:
        return None  # not repeatable: nothing can be said
    for name in policies:
        if name == "planned":
            wrong = _check_planned(seed, positions, plain)
            if wrong is not None:
                return f"{name}: {wrong}"
            continue
        blocks = "blocks.*" if name.endswith(("full", "every:2", "sqrt")) else None
        remat = Remat(policy=POLICIES[name], blocks=blocks, offload=EVERYTHING if name.startswith("moved") else None)
        try:
            other = run_program(seed, positions, remat)
        except Exception as error:  # nothing but what plain PyTorch raises may come out
            return f"{name}: {type(error).__name__}: {error}"
        finally:
            remat.close()
        wrong = difference(plain, other)
        if wrong is not None:
            return f"{name}: {wrong}"
    return None


def _check_planned(seed: int, positions: Sequence[int], plain: Result) -> str | None:
    """Run one program under a random plan with moves; what is wrong, or None."""
    seen = Seen()
    torch.manual_seed(seed)
    with on(seen), suppress(BackwardError):
        Program(seed, positions)()
    scripted = Scripted(seed, seen.functions)
    try:
        with scripted.mode or nullcontext():
            other = run_program(seed, positions, scripted)
    except Exception as error:  # nothing but what plain PyTorch raises may come out
        return f"{scripted.way}: {type(error).__name__}: {error}"
    finally:
        scripted.close()
    if scripted.mode is not None:  # under any mode autograd may choose other formulas, and counts fewer changes
        if plain.raised_in_backward and other.raised_in_backward:
            return None
        with Failing():
            plain = run_program(seed, positions, None)
    if other.lost:
        if not scripted.may_lose:
            return f"{scripted.way}: lost: {other.events[-1]}"
        # It is run again then; up to there everything has to agree.
        other.raised_in_backward = plain.raised_in_backward
        other.events.pop()
    wrong = difference(plain, other)
    if wrong is None and scripted.leaks():
        held = Held()
        run_program(seed, positions, held)
        if not held.leaks() and scripted.leaks():
            wrong = f"{scripted.place.used_bytes} bytes are never given back"
    return None if wrong is None else f"{scripted.way}: {wrong}"


def shortened(seed: int, policy: str) -> list[int]:
    """The instructions that it takes."""
    positions = list(range(LENGTH))
    step = 8
    while step:
        i = 0
        while i < len(positions):
            fewer = positions[:i] + positions[i + step :]
            if check(seed, fewer, [policy]) is not None:
                positions = fewer
            else:
                i += step
        step //= 2
    return positions


def main() -> int:
    """Look for programs that fail, and print them shortened."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--programs", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=1e9)
    parser.add_argument("--policies", nargs="*", default=list(POLICIES))
    options = parser.parse_args()
    torch.set_num_threads(1)
    start, failures, done = time.perf_counter(), 0, 0
    for seed in range(options.first, options.first + options.programs):
        if time.perf_counter() - start > options.seconds or failures >= 8:
            break
        done += 1
        fault = check(seed, range(LENGTH), options.policies)
        if fault is None:
            continue
        failures += 1
        policy = next(p for p in POLICIES if fault.startswith(f"{p}: "))
        positions = shortened(seed, policy)
        print(f"--- seed {seed}, positions {positions}\n{check(seed, positions, [policy])}")
        for line in run_program(seed, positions, None, steps=1).events[0]:
            print("   ", line)
        sys.stdout.flush()
    print(f"{done} programs, {failures} failed, {time.perf_counter() - start:.0f} s")
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
