"""``print_kept``: what autograd keeps for a function, largest first, and where each tensor comes from."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from rich.console import Console
from rich.table import Table

from lightning_remat.engine.ledger import Ledger, LedgerTape, ModuleStack, Saved
from lightning_remat.engine.policies import KEEP_ALL
from lightning_remat.engine.replay import Clock
from lightning_remat.engine.tape import ActionTable
from lightning_remat.runtime.sizes import format_bytes


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
        stack.enter_context(tape)
        function(*args, **kwargs)
    ledger.close()
    return sorted(ledger.saved, key=lambda saved: -saved.nbytes)


def print_kept(
    function: Callable[..., Any], *args: Any, rows: int = 20, console: Console | None = None, **kwargs: Any
) -> None:
    """Print what autograd keeps for ``function(*args, **kwargs)``, largest first.

    Args:
        function: usually a module; called once, gradients enabled.
        *args, **kwargs: what it is called with.
        rows: how many tensors to show; the last line sums up the rest.
        console: where to print, a ``rich`` console; standard output by default.

    Example:
        >>> import torch
        >>> from rich.console import Console
        >>> block = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.GELU())
        >>> print_kept(block, torch.ones(8, 16), console=Console(width=90, color_system=None))
        ... # doctest: +NORMALIZE_WHITESPACE +ELLIPSIS
                      Kept for backward: ...
    """
    saved = kept_by(function, *args, **kwargs)
    total = sum(s.nbytes for s in saved)
    made = sum(s.nbytes for s in saved if s.op.startswith("aten") or "." in s.op)
    table = Table(title=f"Kept for backward: {format_bytes(total)} in {len(saved)} tensors, {format_bytes(made)} of it activations")
    table.add_column("bytes", justify="right")
    table.add_column("shape")
    table.add_column("dtype")
    table.add_column("module")
    table.add_column("made by")
    for s in saved[:rows]:
        dtype = str(s.dtype).removeprefix("torch.")
        table.add_row(format_bytes(s.nbytes), "×".join(map(str, s.shape)) or "scalar", dtype, s.module, s.op)
    rest = saved[rows:]
    if rest:
        table.add_row(format_bytes(sum(s.nbytes for s in rest)), f"{len(rest)} more", "", "", "")
    (console or Console()).print(table)
