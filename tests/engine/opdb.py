"""PyTorch's own operator database against the tape: every differentiable op, bit for bit.

Each op is put into a small chain in which everything that can be dropped is dropped:

    leaves -> negate twice -> the op -> y * sin(y) of every output -> sum -> backward

The chain runs plainly, twice, since what does not repeat itself cannot be compared, and under the tape; outputs,
what the inputs hold afterwards, gradients and the random stream have to agree in every bit. In-place variants write
into a dropped tensor, and into a view of a dropped tensor whose base lives on. Where contents move, the op's arguments
leave for a disk, and either so does all that autograd saves, or the op is computed again from what comes back.

`python -m tests.engine.opdb --help` runs all of it and prints what it found.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import OpInfo, SampleInput
from torch.utils._pytree import tree_leaves, tree_map

from lightning_remat import Remat
from lightning_remat.engine.policies import Policy
from lightning_remat.engine.replay import Clock
from lightning_remat.engine.rules import rule_for
from lightning_remat.engine.tape import Tape
from tests.helpers.exact import EVERYTHING as ALL_LEAVES

# Importing PyTorch's test utilities forbids the process to set backend flags any more; other tests do.
torch.backends.flags_frozen.__globals__["__allow_nonbracketed_mutation_flag"] = True

DTYPES = (torch.float32, torch.complex64)
# What may be done with a sample: the op, its in-place variant, the op under autocast, and a gradient of a gradient.
VARIANTS = ("function", "in place", "in place on a view", "autocast", "twice")

_PINV = "cannot be told from torch.pinverse, which autocast on the CPU leaves in float32; both are computed so"
EXCEPTIONS: dict[str, str] = {"linalg.pinv autocast": _PINV, "linalg.pinv.hermitian autocast": _PINV}
"""What is not held to equality: op and variant, with the reason. Tested: one that agrees after all fails."""

READS_UNINITIALISED = {
    # LAPACK's gelsy takes a pivot array that PyTorch does not fill; its last bits come and go with what was there.
    "linalg.lstsq",
    "linalg.lstsq.grad_oriented",
}
"""Ops that repeat themselves only while PyTorch fills memory before it is used, and so are run that way."""


@dataclass(frozen=True)
class Case:
    """One sample of one op in one variant."""

    op: OpInfo
    dtype: torch.dtype
    index: int
    sample: SampleInput
    variant: str

    def __str__(self) -> str:
        return f"{name_of(self.op)} {str(self.dtype).removeprefix('torch.')} sample {self.index} {self.variant}"


@dataclass
class Outcome:
    """What a run of a case left behind: bits by name, or the class of the error that it raised."""

    bits: dict[str, Any] = field(default_factory=dict)
    error: str | None = None
    recorded: int = 0
    replayed: int = 0
    moved: int = 0

    def differences(self, other: Outcome) -> list[str]:
        """Names of what is not the same in ``other``."""
        if self.error != other.error:
            return [f"error: {self.error} against {other.error}"]
        return [name for name in {**self.bits, **other.bits} if self.bits.get(name) != other.bits.get(name)]


def name_of(op: OpInfo) -> str:
    """The op's name with its variant, such as ``nn.functional.pad.reflect``."""
    return f"{op.name}.{op.variant_test_name}" if op.variant_test_name else str(op.name)


def differentiable(dtype: torch.dtype) -> list[OpInfo]:
    """The ops of the database with a gradient on the CPU in ``dtype``."""
    return [op for op in op_db if op.supports_autograd and dtype in op.supported_backward_dtypes("cpu")]


def cases(
    op: OpInfo, dtype: torch.dtype, limit: int | None = None, variants: Sequence[str] = VARIANTS[:3]
) -> Iterator[Case]:
    """The op's samples, or ``limit`` of them spread over the list, in those of ``variants`` that it has."""
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what the database's samples warn of is not the subject
        samples = list(op.sample_inputs("cpu", dtype, requires_grad=True))
    chosen = set(range(len(samples)))
    if limit is not None and len(samples) > limit:
        # Databases put the plain sample first and the unusual ones last.
        chosen = {round(i * (len(samples) - 1) / max(1, limit - 1)) for i in range(limit)}
    for index in sorted(chosen):
        sample = samples[index]
        has_inplace = op.get_inplace() is not None and not sample.broadcasts_input and isinstance(sample.input, Tensor)
        for variant in variants:
            if variant.startswith("in place") and not has_inplace:
                continue
            if (variant == "autocast" and dtype.is_complex) or (variant == "twice" and not op.supports_gradgrad):
                continue
            yield Case(op, dtype, index, sample, variant)


# ---------------------------------------------------------------------- the chain


def run(case: Case, remat: Remat | None, *, inside: bool = False) -> Outcome:
    """Run a case's chain forward and backward from a fixed seed; ``inside``: backward before the step ends."""
    leaves = tree_map(_leaf, (case.sample.input, case.sample.args, case.sample.kwargs))
    outcome = Outcome()
    torch.manual_seed(1)
    with warnings.catch_warnings(), _memory(filled=name_of(case.op) in READS_UNINITIALISED):
        warnings.simplefilter("ignore")  # what the database's samples warn of is not the subject
        try:
            with remat if remat is not None else nullcontext():
                outs, loss = _forward(case, leaves)
                if inside or case.variant == "twice":
                    outs += _backward(case, leaves, loss)
            if not (inside or case.variant == "twice"):
                outs += _backward(case, leaves, loss)
        except Exception as error:
            outcome.error = type(error).__name__
            return outcome
    outcome.bits["random stream"] = bits(torch.get_rng_state())
    for position, out in enumerate(outs):
        outcome.bits[f"output {position}"] = bits(out)
    for position, leaf in enumerate(tree_leaves(leaves)):
        tensor = leaf.tensor if isinstance(leaf, Leaf) else leaf
        if isinstance(tensor, Tensor):
            outcome.bits[f"input {position} afterwards"] = bits(tensor)
            if tensor.grad is not None:
                outcome.bits[f"gradient {position}"] = bits(tensor.grad)
    if remat is not None:
        outcome.recorded, outcome.replayed = remat.stats.recorded_ops, remat.stats.replayed_ops
        if remat.offloading is not None and remat.offloading.mover is not None:
            outcome.moved = remat.offloading.mover.moved
    return outcome


@contextmanager
def _memory(filled: bool) -> Iterator[None]:
    if not filled:
        yield
        return
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)  # fills, unless torch.utils.deterministic says otherwise
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


@dataclass
class Leaf:
    """A differentiable input: a leaf of the graph, and the geometry under which the op sees what comes of it."""

    tensor: Tensor
    geometry: tuple[Any, Any, int] | None = None

    def dropped(self) -> Tensor:
        """The content, computed, so that the tape drops it; twice, so that it has an input that is dropped as well."""
        computed = self.tensor.neg().neg()
        return computed if self.geometry is None else computed.as_strided(*self.geometry)


def _leaf(value: Any) -> Any:
    """The same with memory of its own, and a :class:`Leaf` for a tensor that is differentiated."""
    if not isinstance(value, Tensor):
        return value
    plain = value.detach()
    if plain.layout is not torch.strided or plain.is_conj() or plain.is_neg():
        copy = plain.clone()
        return Leaf(copy.requires_grad_()) if value.requires_grad else copy
    flat = torch.empty(0, dtype=plain.dtype).set_(plain.untyped_storage().clone())
    geometry = (plain.size(), plain.stride(), plain.storage_offset())
    if not value.requires_grad:
        return flat.as_strided(*geometry)
    if plain.is_contiguous() and flat.numel() == plain.numel():
        return Leaf(flat.view(plain.size()).requires_grad_())
    return Leaf(flat.requires_grad_(), geometry)


def _forward(case: Case, leaves: Any) -> tuple[list[Tensor], Tensor | None]:
    first, args, kwargs = tree_map(lambda v: v.dropped() if isinstance(v, Leaf) else v, leaves)
    if case.variant.startswith("in place"):
        inplace = case.op.get_inplace()
        assert inplace is not None
        if case.variant == "in place":
            out = inplace(first, *args, **kwargs)
        else:
            base = torch.stack([first, first.neg()])
            out = (inplace(base[0], *args, **kwargs), base)
    else:
        with torch.autocast("cpu", torch.bfloat16, enabled=case.variant == "autocast"):
            out = case.op(first, *args, **kwargs)
        if case.sample.output_process_fn_grad is not None:
            out = case.sample.output_process_fn_grad(out)
    outs = [o for o in tree_leaves(out) if isinstance(o, Tensor)]
    return outs, _loss(outs)


def _loss(outs: Sequence[Tensor]) -> Tensor | None:
    terms = []
    for o in outs:
        if o.requires_grad:
            y = o if o.layout is torch.strided else o.to_dense()
            if y.dtype is torch.complex32:  # no sine on the CPU
                y = y.to(torch.complex64)
            y = y * y.sin()
            terms.append((y.real + y.imag).sum() if y.is_complex() else y.sum())
    return sum(terms[1:], terms[0]) if terms else None


def _backward(case: Case, leaves: Any, loss: Tensor | None) -> list[Tensor]:
    """Run backward; returns first gradients where there are second ones."""
    if loss is None:
        return []
    if case.variant != "twice":
        loss.backward()
        return []
    wrt = [leaf.tensor for leaf in tree_leaves(leaves) if isinstance(leaf, Leaf)]
    gradients = [g for g in torch.autograd.grad(loss, wrt, create_graph=True, allow_unused=True) if g is not None]
    second = _loss(gradients)
    if second is not None:
        second.backward()
    return gradients


def bits(tensor: Tensor) -> tuple[Any, ...]:
    """A tensor as something comparable: geometry, and every byte, so that equal NaNs are equal."""
    tensor = tensor.detach()
    head = (tuple(tensor.shape), tensor.dtype, tensor.layout)
    if tensor.is_nested:
        return (head[1:], *(bits(t) for t in tensor.unbind()))
    if tensor.layout is not torch.strided:
        return (*head, bits(tensor.to_dense()))
    flat = tensor.resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format).reshape(-1)
    return (*head, tensor.stride(), flat.view(torch.uint8).numpy().tobytes())


# ---------------------------------------------------------------------- verdicts

EVERYTHING = Policy("everything", segment=None)
"""Drops what can be dropped without asking, which takes the tape's short paths; a callable takes the others."""


@dataclass
class Finding:
    """What an op's cases came to."""

    name: str
    dtype: torch.dtype
    passed: int = 0
    raising: int = 0  # plain PyTorch refuses them, and so does the tape
    recorded: int = 0
    replayed: int = 0
    moved: int = 0
    excepted: Counter[str] = field(default_factory=Counter)  # key in EXCEPTIONS -> cases that differ
    failures: list[str] = field(default_factory=list)
    unrepeatable: list[str] = field(default_factory=list)
    idle: list[str] = field(default_factory=list)  # the tape had nothing to replay
    kept: Counter[str] = field(default_factory=Counter)  # ATen ops whose results were kept -> calls

    @property
    def problems(self) -> list[str]:
        """What is wrong, one line for each; empty if nothing is."""
        useless = [f"{key} is excepted, and agrees: take it off the list" for key, n in self.excepted.items() if not n]
        return [*self.failures, *(f"not repeatable in plain PyTorch: {case}" for case in self.unrepeatable), *useless]


class KeptCounter(Tape):
    """A tape that counts the calls of ops, views apart, whose results it does not drop."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock)
        self.kept: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = self.recorded
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if self.recorded == before and not self.paused and torch.is_grad_enabled():
            rule = rule_for(func)
            if rule.form not in ("view", "blank") and not rule.moves:
                self.kept[f"{rule.name} ({rule.kind})"] += 1
        return out


def _all_but_neg(op: Any) -> str:
    """Keeps what goes into the op, so that it leaves, and has the op computed again from what comes back."""
    return "keep" if op.name == "aten.neg.default" else "recompute"


class Runner:
    """Checks ops; the contexts live on from op to op, as in a training loop."""

    def __init__(self, both: bool = True, moving: bool = False) -> None:
        self.both = both
        self.moving = moving
        self.remats = (
            [Remat(policy="offload_only", offload=ALL_LEAVES), Remat(policy=_all_but_neg, offload=ALL_LEAVES)]
            if moving
            else [Remat(policy=EVERYTHING), Remat(policy=lambda op: "recompute")]
        )
        for remat in self.remats:
            with remat:  # the first step keeps books, which is another tape
                pass
        self.counter = self.remats[1]._tape = KeptCounter(self.remats[1]._clock)

    def close(self) -> None:
        """End what the contexts have begun."""
        for remat in self.remats:
            remat.close()

    def check(
        self, op: OpInfo, dtype: torch.dtype, limit: int | None = None, variants: Sequence[str] = VARIANTS[:3]
    ) -> Finding:
        """Hold an op's cases against plain PyTorch."""
        finding = Finding(name_of(op), dtype)
        self.counter.kept.clear()
        for number, case in enumerate(cases(op, dtype, limit, variants)):
            plain = run(case, None)
            if different := plain.differences(run(case, None)):
                finding.unrepeatable.append(f"{case}: {', '.join(different)}")
                continue
            key = f"{finding.name} {case.variant}"
            finding.excepted.update({key: 0} if key in EXCEPTIONS else {})
            problems: dict[str, None] = {}
            for which, remat in enumerate(self.remats):
                if self.both or which == number % 2:
                    # Backward inside the step and after it take turns.
                    outcome = run(case, remat, inside=(number + which) % 3 == 0)
                    finding.recorded += outcome.recorded
                    finding.replayed += outcome.replayed
                    finding.moved += outcome.moved
                    problems.update(dict.fromkeys(plain.differences(outcome)))
                    idle = not outcome.moved if self.moving else not outcome.replayed
                    if idle and any(name.startswith("gradient") for name in plain.bits):
                        finding.idle.append(str(case))
            if problems and key in EXCEPTIONS:
                finding.excepted[key] += 1
            elif problems:
                finding.failures.append(f"{case}: {', '.join(problems)}")
            elif plain.error is not None:
                finding.raising += 1
            else:
                finding.passed += 1
        finding.kept.update(self.counter.kept)
        return finding


# ---------------------------------------------------------------------- the command


def main(argv: Sequence[str] | None = None) -> int:
    """Check every op; the exit status is 1 where something differs that is not excepted, or an exception agrees."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ops", nargs="*", help="names, or beginnings of names; all ops if none is given")
    parser.add_argument("--limit", type=int, help="samples per op (all)")
    parser.add_argument("--dtype", choices=["float32", "complex64"], help="only this one (both)")
    parser.add_argument("--variant", choices=VARIANTS, action="append", help="only these (all)")
    parser.add_argument("--moving", action="store_true", help="have contents leave for a disk")
    parser.add_argument("--kept", action="store_true", help="list the ops of which something was kept")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    console = Console(width=160, highlight=False)
    runner = Runner(moving=options.moving)
    start = time.perf_counter()
    table = Table(
        "dtype", "ops", "cases equal", "refused alike", "ops recorded", "replayed", "moved", "differing", "excepted"
    )
    failed = False
    for dtype in [getattr(torch, options.dtype)] if options.dtype else DTYPES:
        wanted = [op for op in differentiable(dtype) if not options.ops or name_of(op).startswith(tuple(options.ops))]
        findings = []
        for op in wanted:
            finding = runner.check(op, dtype, options.limit, options.variant or VARIANTS)
            findings.append(finding)
            if finding.problems:
                failed = True
                console.print("\n  ".join([f"[red]{finding.name}[/red]", *finding.problems[:5]]), soft_wrap=True)
            if options.kept and finding.kept:
                console.print(f"{finding.name}: kept {dict(finding.kept)}", soft_wrap=True)
        counts = (
            len(findings),
            sum(f.passed for f in findings),
            sum(f.raising for f in findings),
            sum(f.recorded for f in findings),
            sum(f.replayed for f in findings),
            sum(f.moved for f in findings),
            sum(len(f.failures) + len(f.unrepeatable) for f in findings),
            sum(f.excepted.total() for f in findings),
        )
        table.add_row(str(dtype), *map(str, counts))
        idle = [case for f in findings for case in f.idle]
        if idle:
            console.print(
                f"nothing to {'move' if options.moving else 'replay'} in {len(idle)} cases, such as {idle[:5]}",
                soft_wrap=True,
            )
    console.print(table)
    for name, reason in EXCEPTIONS.items():
        console.print(f"excepted: {name}: {reason}")
    console.print(f"{time.perf_counter() - start:.0f} s")
    runner.close()
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
