"""Verification: compute values again while the true ones are still there, and compare every bit.

Two checks. An op is run twice on the same inputs as soon as it has run: a kernel that differs from run to run shows
itself there. And a value that autograd saves is computed from what the tape has kept, exactly as backward would. What
differs is kept from then on.

Both need memory that training does not. Where there is too little, the rest of the step goes unverified.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_remat.engine.generators import call_rewound
from lightning_remat.engine.offload.moved import Moved, moved_of
from lightning_remat.engine.out_of_memory import is_out_of_memory
from lightning_remat.engine.plain import call_as_plain
from lightning_remat.engine.replay import Clock, missing_ops, restore
from lightning_remat.engine.rules import Rule, rule_for
from lightning_remat.engine.tape import Tape
from lightning_remat.engine.values import OWNED, Op, Value, view_of

BYTES_PER_STEP = 64 * 1024**2
"""How much is compared in one step."""

# Outputs (by position) whose bits mean nothing: oneDNN's workspace for backward has gaps that it never writes.
_SCRATCH = {"aten.mkldnn_rnn_layer.default": 3}


class Verifier:
    """What has been checked, and what differed.

    Attributes:
        checked: names of ops whose results were computed again and had the same bits.
        different: names of ops that gave other bits; kept from then on.
        values: number of saved values that were computed again from the tape and found equal.
        compared: number of comparisons: those of saved values, and one for each op that was run twice.
        differed: how many of these found a difference.

    Example:
        >>> import torch
        >>> from lightning_remat import Remat
        >>> remat = Remat(policy="selective", verify=True)
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.Linear(8, 1))
        >>> with remat:
        ...     loss = model(torch.ones(2, 4)).sum()
        >>> loss.backward()
        >>> sorted(remat.verifier.checked), remat.verifier.different
        (['aten.gelu.default'], set())
    """

    def __init__(self, keep_from_now_on: Callable[[str], None]) -> None:
        self.checked: set[str] = set()
        self.different: set[str] = set()
        self.values = 0
        self.compared = 0
        self.differed = 0
        self._left = 0
        self._stopped = False  # memory was lacking
        self._keep = keep_from_now_on
        self._tape: Tape | None = None
        self._twice: set[str] = set()

    def attach(self, tape: Tape) -> None:
        """Look over a tape's shoulder for the coming step."""
        self._left = BYTES_PER_STEP
        self._stopped = False
        self._tape = tape
        if self not in tape.observers:
            tape.observers.append(self)

    def detach(self) -> None:
        """Look away: steps cost nothing until the next :meth:`attach`."""
        if self._tape is not None and self in self._tape.observers:
            self._tape.observers.remove(self)
        self._tape = None

    def begin_anew(self) -> None:
        """Check every kind of op again, as a kernel may have begun to differ. What differed already stays kept."""
        self.checked.clear()
        self._twice.clear()

    def recorded(self, op: Op, args: Any, kwargs: Any, out: Any) -> None:
        """Run a newly met op a second time on the same arguments."""
        rule = rule_for(op.func)
        if args is None or rule.name in self._twice or rule.hidden or self._stopped:
            return
        self._twice.add(rule.name)
        try:
            same = _same_when_run_twice(op, rule, args, kwargs, out)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            self._stopped = True
            return
        self.compared += 1
        if not same:
            self._differs([rule], out)

    def packed(self, tensor: Tensor, packed: Any) -> None:
        """Compute a dropped value that autograd saves, if its ops have not all been checked."""
        if packed[0].__class__ is not Value or packed[0].tensor is not None:
            return
        value: Value = packed[0]
        if moved_of(value) is not None:
            return  # nothing is computed
        if value.op is not None and _is_scratch(value, value.op):
            return
        ops = missing_ops(value)
        rules = [rule_for(op.func) for op in ops if op.func.__class__ is not Moved]
        if self._left <= 0 or self._stopped or all(rule.name in self.checked for rule in rules):
            return
        self._left -= len(ops) * tensor.numel() * tensor.element_size()
        try:
            same = same_bits(tensor, _computed_again(value, ops, packed[1], self._tape))
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            self._stopped = True
            return
        self.compared += 1
        if same:
            self.values += 1
            self.checked.update(rule.name for rule in rules)
        else:
            self._differs(rules, tensor)

    def kept(self, tensor: Tensor, value: Value) -> None:
        """Nothing to check: it stays."""

    def left(self, tensor: Tensor, value: Value) -> None:
        """Nothing to check: it is not computed again."""

    def _differs(self, rules: list[Rule], out: Any) -> None:
        self.differed += 1
        names = sorted({rule.name for rule in rules})
        self.different.update(names)
        for name in names:
            self._keep(name)
        if self._tape is not None:
            for tensor in _tensors(out):
                self._tape.keep(tensor)
        warnings.warn(
            f"verify: {', '.join(names)} gave other bits when run again; the results are kept from now on.",
            stacklevel=2,
        )


def _same_when_run_twice(op: Op, rule: Rule, args: Any, kwargs: Any, out: Any) -> bool:
    """Whether an op that has just run gives the same bits from the same arguments."""
    # We are below autograd here, so grad mode can stay as it is; some kernels give less without it.
    if op.extra is not None and op.extra[2] is not None:
        again = call_rewound(op.extra[2], op.func, args, kwargs or {})
    elif rule.inner:
        again, _ = call_as_plain(op.func, args, kwargs or {})
    else:
        again = op.func(*args, **(kwargs or {}))
    scratch = _SCRATCH.get(rule.name)
    pairs = enumerate(zip(_tensors(out), _tensors(again), strict=True))
    return all(position == scratch or same_bits(a, b) for position, (a, b) in pairs)


def _computed_again(value: Value, ops: list[Op], geometry: Any, tape: Tape | None) -> Tensor:
    """What backward would get for ``value``; the tape is left as it was."""
    touched = [(v, op) for op in ops for v in _values(op)]
    paused = tape is not None and tape.paused
    if tape is not None:
        tape.paused = True
    try:
        restore(value, Clock())
        return view_of(value, geometry).clone()
    finally:
        for v, op in touched:
            v.tensor, v.op, v.version = None, op, None
            v.flags &= ~OWNED
        if tape is not None:
            tape.paused = paused


def _values(op: Op) -> list[Value]:
    return [v for _, reference in op.outs if (v := reference()) is not None]


def _is_scratch(value: Value, op: Op) -> bool:
    scratch = _SCRATCH.get(rule_for(op.func).name)
    return scratch is not None and any(p == scratch and reference() is value for p, reference in op.outs)


def _tensors(out: Any) -> list[Tensor]:
    return [o for o in (out if isinstance(out, (tuple, list)) else (out,)) if isinstance(o, Tensor)]


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors of one shape and dtype are equal in every bit; NaN equals NaN of the same bits."""
    if a.shape != b.shape or a.dtype is not b.dtype:
        return False
    if a.is_meta or b.is_meta:  # no bits
        return a.is_meta and b.is_meta
    with torch.no_grad():
        left, right = (t.detach().resolve_conj().resolve_neg().contiguous() for t in (a, b))
        # Not reshape: one element is contiguous whatever its stride, and keeps it.
        left, right = (t.as_strided((t.numel(),), (1,)) for t in (left, right))
        return bool(torch.equal(left.view(torch.uint8), right.view(torch.uint8)))
