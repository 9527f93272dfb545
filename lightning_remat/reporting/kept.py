"""``print_kept``: what autograd keeps for a function, largest first, and where each tensor comes from."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from lightning_remat.engine.actions import ActionTable
from lightning_remat.engine.ledger import OUTSIDE, Ledger, LedgerTape, ModuleStack, Saved
from lightning_remat.engine.policies import KEEP_ALL
from lightning_remat.engine.replay import Clock
from lightning_remat.sizes import format_bytes


def kept_by(function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Saved]:
    """Every storage that autograd saves while ``function(*args, **kwargs)`` runs, largest first.

    What the function returned is dropped. Its side effects are not undone: a module's running statistics and the
    random stream move on as in any forward pass.
    """
    ledger = Ledger(ModuleStack())
    tape = LedgerTape(Clock(), ledger)
    tape.actions = ActionTable(KEEP_ALL.action)
    with ExitStack() as stack:
        stack.callback(tape.clear)
        stack.enter_context(ledger.modules.watching())
        stack.enter_context(tape.hooks)
        stack.enter_context(torch.enable_grad())
        stack.enter_context(tape)
        function(*args, **kwargs)
    ledger.close()
    return sorted(ledger.saved, key=lambda saved: -saved.nbytes)


def print_kept(
    function: Callable[..., Any], *args: Any, rows: int = 20, console: Console | None = None, **kwargs: Any
) -> None:
    """Print what autograd keeps for ``function(*args, **kwargs)``, largest first.

    Activations, which are what recomputation can save, come one by one; parameters, buffers and inputs, which are there
    anyway, in one line.

    Args:
        function: usually a module; called once, gradients enabled.
        *args: what it is called with.
        rows: how many activations to show; one more line sums up the rest.
        console: where to print, a ``rich`` console; standard output by default.
        **kwargs: what it is called with.

    Raises:
        Exception: whatever ``function`` raises, passed on.

    Example:
        >>> import torch
        >>> from rich.console import Console
        >>> from lightning_remat import print_kept
        >>> block = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.Linear(64, 16))
        >>> console = Console(width=80, color_system=None)
        >>> print_kept(block, torch.ones(8, 16), console=console)  # doctest: +NORMALIZE_WHITESPACE
          Kept for backward: 4.0 KiB of activations, 4.5 KiB of other tensors
        ┏━━━━━━━━━┳━━━━━━━━━━━┳━━━━━━━━━┳━━━━━━━━┳━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━┓
        ┃   bytes ┃ shape     ┃ dtype   ┃ module ┃ made by                        ┃
        ┡━━━━━━━━━╇━━━━━━━━━━━╇━━━━━━━━━╇━━━━━━━━╇━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━┩
        │ 2.0 KiB │ 8x64      │ float32 │ 0      │ aten.addmm.default             │
        │ 2.0 KiB │ 8x64      │ float32 │ 1      │ aten.gelu.default              │
        │ 4.5 KiB │ 2 tensors │         │        │ parameters, buffers and inputs │
        └─────────┴───────────┴─────────┴────────┴────────────────────────────────┘
    """
    saved = kept_by(function, *args, **kwargs)
    activations = [s for s in saved if s.op != OUTSIDE]
    others = [s for s in saved if s.op == OUTSIDE]
    table = Table(title=f"Kept for backward: {_total(activations)} of activations, {_total(others)} of other tensors")
    table.add_column("bytes", justify="right")
    for name in ("shape", "dtype", "module", "made by"):
        table.add_column(name)
    for s in activations[:rows]:
        shape = "x".join(map(str, s.shape)) or "scalar"
        table.add_row(format_bytes(s.nbytes), shape, str(s.dtype).removeprefix("torch."), s.module, s.op)
    for label, rest in (("smaller activations", activations[rows:]), ("parameters, buffers and inputs", others)):
        if rest:
            table.add_row(_total(rest), "1 tensor" if len(rest) == 1 else f"{len(rest)} tensors", "", "", label)
    (console or Console()).print(table)


def _total(saved: list[Saved]) -> str:
    return format_bytes(sum(s.nbytes for s in saved))
