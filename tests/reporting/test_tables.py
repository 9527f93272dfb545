"""What users are shown."""

import io
import re
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import nn

from lightning_remat import ConfigurationError, Offload, Remat, print_kept
from lightning_remat.engine.actions import ActionTable
from lightning_remat.engine.ledger import Ledger, ModuleStack
from lightning_remat.engine.moving import MovingLedgerTape
from lightning_remat.engine.offload.mover import Mover
from lightning_remat.engine.policies import KEEP_ALL, SELECTIVE
from lightning_remat.engine.replay import Clock
from lightning_remat.reporting.kept import kept_by
from lightning_remat.reporting.report import report_table, rows_of
from lightning_remat.runtime.memory import measure_peak
from tests.helpers.places import MemoryPlace

X = torch.ones(16, 8)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for b in self.blocks:
            x = x + b(x)
        return x


def text_of(table: object, width: int = 110) -> str:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(table)
    return console.file.getvalue()


def test_the_table_is_saved_as_text_and_nothing_else(tmp_path: Path) -> None:
    """Pages, plots and data are of a plan; the error says how to get one."""
    remat = Remat(policy="full")
    with remat:
        loss = Model()(X).sum()
    loss.backward()
    assert remat.report().save(tmp_path / "report.txt").read_text(encoding="utf-8") == str(remat.report())
    for name in ("report.html", "report.svg", "report.json", "report"):
        with pytest.raises(ConfigurationError, match=r"there is no plan.*Set budget="):
            remat.report().save(tmp_path / name)
        assert not (tmp_path / name).exists()


def test_the_report_adds_up() -> None:
    """Bytes by hand: three blocks, float32, 16 rows; border 8 wide, inside 32 wide, twice."""
    remat = Remat(policy="full")
    with remat:
        loss = Model()(X).sum()
    loss.backward()
    rows = rows_of(remat.blocks, remat.ledger)
    assert rows["blocks.*.1", "cheap"].dropped_bytes == 3 * 16 * 32 * 4
    assert rows["blocks.*.0", "expensive"].dropped_bytes == 3 * 16 * 32 * 4
    assert rows["blocks.*.1", "cheap"].replayed_ops == 3
    assert rows["blocks.*.0", "expensive"].replayed_ops == 3
    assert sum(row.replayed_ops for row in rows.values()) == remat.stats.replayed_ops
    text = text_of(remat.report())
    assert "policy full, 3 blocks: blocks.0" in text
    assert "6.0 KiB" in text


def test_the_report_before_the_first_step() -> None:
    """An empty table, not an error."""
    assert "policy selective" in text_of(Remat("selective").report())


def test_what_autograd_keeps() -> None:
    """Sizes, shapes, modules and ops, largest first, each storage once."""
    saved = kept_by(Model(), X)
    assert [s.nbytes for s in saved] == sorted((s.nbytes for s in saved), reverse=True)
    inner = [(s.module, s.op, s.shape) for s in saved if s.nbytes == 16 * 32 * 4]
    assert inner == [
        (f"blocks.{i}.{j}", op, (16, 32))
        for i in range(3)
        for j, op in ((0, "aten.addmm.default"), (1, "aten.gelu.default"))
    ]
    console = Console(file=io.StringIO(), width=100, color_system=None)
    print_kept(Model(), X, rows=2, console=console)
    text = console.file.getvalue()
    assert "smaller activations" in text
    assert "parameters, buffers and inputs" in text


def test_one_tensor_is_one() -> None:
    console = Console(file=io.StringIO(), width=100, color_system=None)
    print_kept(nn.Linear(8, 1, bias=False), X, console=console)
    assert "1 tensor " in console.file.getvalue()


def test_print_kept_leaves_no_gradient_and_no_hook() -> None:
    model = Model()
    print_kept(model, X, console=Console(file=io.StringIO()))
    assert all(p.grad is None for p in model.parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


class Residual(nn.Module):
    """A block whose parts outlive it in different ways under each policy."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.a, self.b = nn.LayerNorm(64), nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.a(self.norm(x)).sin().cos()
        return x + torch.dropout(self.b(x).sin(), 0.5, True)


@pytest.mark.parametrize("policy", ["full", "every:2", "selective"])
def test_kept_bytes_are_those_that_are_alive(policy: str) -> None:
    """After forward, what the report calls kept is what is allocated, but for generator states and the loss."""
    model, x = nn.Sequential(*[Residual() for _ in range(4)]), torch.randn(256, 64)
    remat = Remat(policy=policy)
    kept: list[torch.Tensor] = []

    def step() -> None:
        with remat:
            kept.append(model(x).sum())

    alive = measure_peak(step).left_bytes
    reported = sum(row.kept_bytes for row in rows_of(remat.blocks, remat.ledger).values())
    assert 0 <= alive - reported <= 8 * 5056 + 64


def test_what_leaves_has_a_column_of_its_own() -> None:
    """Bytes by hand, under a tape whose contents leave for a place in memory: none is kept, each counts once."""
    model, place = Model(), MemoryPlace()
    ledger = Ledger(ModuleStack())
    tape = MovingLedgerTape(Clock(), ledger, Mover(place, min_bytes=16 * 32 * 4, in_flight=1))
    tape.actions = ActionTable(KEEP_ALL.action)
    with ledger.modules.watching(), tape.hooks, tape:
        loss = model(X).sum()
    tape.clear()
    ledger.close()
    loss.backward()
    assert place.taken == 6
    rows = rows_of([f"blocks.{i}" for i in range(3)], ledger)
    inside = rows["blocks.*.0", "expensive"], rows["blocks.*.1", "cheap"]
    assert [(row.offloaded_bytes, row.kept_bytes, row.dropped_bytes) for row in inside] == [(3 * 16 * 32 * 4, 0, 0)] * 2
    assert [s.offloaded for s in ledger.saved if s.nbytes == 16 * 32 * 4] == [True] * 6
    assert not any(s.dropped for s in ledger.saved)
    moved = text_of(report_table("title", [], ledger))
    assert re.search(r"kept.*offloaded.*dropped.*replayed ops", moved)
    assert "12.0 KiB" in moved


def test_without_offload_there_is_no_such_column() -> None:
    remat = Remat(policy="full")
    with remat:
        Model()(X).sum().backward()
    assert "offloaded" not in text_of(remat.report())


def test_a_border_that_leaves_is_not_dropped_any_more() -> None:
    """It was booked as dropped when its op ran, and leaves when the block is over: once, and it is not kept besides."""
    ledger = Ledger(ModuleStack())
    place = MemoryPlace()
    tape = MovingLedgerTape(Clock(), ledger, Mover(place, min_bytes=1, in_flight=1))
    tape.actions = ActionTable(SELECTIVE.action)
    x = torch.ones(16, 8, requires_grad=True)
    with tape.hooks, tape:
        y = x.sin()
        line = ledger.lines["", "aten.sin.default"]
        assert (line.dropped_bytes, line.offloaded_bytes) == (512, 0)
        tape.keep_border(y)  # where a block ends
        tape.keep_border(y)  # and where the next one begins
        assert (line.kept_bytes, line.dropped_bytes, line.offloaded_bytes) == (0, 0, 512)
        loss = y.exp().sum()
    tape.clear()
    loss.backward()
    assert place.taken == 1
    assert torch.equal(x.grad, (torch.ones(16, 8).sin().exp() * torch.ones(16, 8).cos()))


def test_borders_of_blocks_leave() -> None:
    """Under `full` nothing of a block is left on the device: its border has gone, what is inside is computed again."""
    remat = Remat(policy="full", offload=Offload("disk", min_bytes=16))
    model = Model()
    with remat:
        loss = model(X).sum()
    loss.backward()
    rows = rows_of(remat.blocks, remat.ledger)
    assert sum(row.kept_bytes for row in rows.values()) == 0
    assert all(row.dropped_bytes >= 0 for row in rows.values())
    assert "offloaded" in text_of(remat.report())
    remat.close()
