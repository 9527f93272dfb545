"""Steps that step optimizers themselves: what a failure after one takes back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lightning_remat.errors import RestoreError
from lightning_remat.runtime.recovery.snapshot import Snapshot
from tests.helpers.bits import difference_in_bits
from tests.helpers.seed import seed_everything
from tests.helpers.snapshots import Stack, Stop, X, look, no_hooks, run


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("fails", [["a"], ["b"], ["c"], ["d"], ["d", "b", "a", "c", "d"]])
def test_steps_of_optimizers_inside_the_step_are_undone(fails: list[str], scaled: bool) -> None:
    def train(fails: list[str] | None) -> Any:
        seed_everything()
        model = nn.ModuleList([Stack(), Stack()])
        first = torch.optim.AdamW(model[0].parameters(), lr=0.1, weight_decay=0.1)
        second = torch.optim.SGD(model[1].parameters(), lr=torch.tensor(0.1), momentum=0.9)
        plan = torch.optim.lr_scheduler.ExponentialLR(first, 0.5)
        scaler = torch.amp.GradScaler("cpu", enabled=scaled, growth_interval=2)
        snapshot = (
            Snapshot([model], [first, second], manual=True, scalers=[scaler], schedulers=[plan])
            if fails is not None
            else None
        )

        def step(fail: str | None) -> None:
            for i, optimizer in enumerate((first, second)):
                if scaled:  # accumulated gradients that were unscaled in place are refused
                    optimizer.zero_grad()
                scaler.scale(model[i](X)).backward()
                if fail == "ab"[i]:
                    raise Stop
                scaler.step(optimizer)
                plan.step()
                second.param_groups[0]["lr"].mul_(0.9)
                if fail == "c":
                    raise Stop
                if i == 0:
                    optimizer.zero_grad()
            scaler.update()
            if fail == "d" and snapshot is not None and not snapshot._stepping._usual:
                raise Stop

        for round in range(3):
            if snapshot is None:
                step(None)
                continue
            snapshot.take()
            for fail in fails or []:
                if fail == "d" and round:
                    continue
                with pytest.raises(Stop):
                    step(fail)
                snapshot.restore()
            step(None)
            snapshot.release()
        return [look(model, [first, second]), scaler.state_dict(), plan.state_dict()]

    assert difference_in_bits(train(None), train(fails)) == []


def test_no_copy_before_the_last_step_of_a_batch_and_a_refusal_after_it() -> None:
    model = Stack()
    first, second = (torch.optim.SGD(model.layers[i].parameters(), lr=0.1) for i in (0, 1))
    snapshot = Snapshot([model], [first, second], manual=True)
    copied = []
    for _ in range(2):
        snapshot.take()
        model(X).backward()
        first.step()
        second.step()
        copied.append(len(snapshot._stepping._saved))
        if len(copied) == 1:
            snapshot.release()
    assert copied == [2, 1]
    with pytest.raises(RestoreError, match="last optimizer step"):
        snapshot.restore()
    snapshot.release()


def test_a_snapshot_that_is_dropped_leaves_no_hook() -> None:
    from torch.optim import optimizer as torch_optimizer

    model = Stack()
    model(X).backward()
    before = len(torch_optimizer._global_optimizer_pre_hooks)
    backward = torch.autograd._engine_run_backward
    snapshot = Snapshot([model], [torch.optim.SGD(model.parameters(), lr=0.1)], manual=True)
    snapshot.take()
    assert torch.autograd._engine_run_backward is not backward, "it wants to know of every backward"
    model(X).backward()
    assert not no_hooks(model)
    del snapshot
    assert no_hooks(model)
    assert torch.autograd._engine_run_backward is backward
    assert len(torch_optimizer._global_optimizer_pre_hooks) == before


@pytest.mark.parametrize("adds", [False, True])
def test_an_earlier_gradient_that_an_optimizer_used_and_let_go_of_is_there_again(adds: bool) -> None:
    def train(tries: int) -> Any:
        seed_everything()
        model = Stack()
        model(X).backward()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        snapshot = Snapshot([model], [optimizer], manual=True)

        def step(fail: Any) -> None:
            if adds:
                model(X).backward()
            optimizer.step()
            optimizer.zero_grad()
            model(X).backward()
            if fail:
                raise Stop

        run(step, [True] * tries, snapshot)
        return look(model)

    assert difference_in_bits(train(0), train(2)) == []
