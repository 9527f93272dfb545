from types import SimpleNamespace

import pytest
import torch

from tests.helpers.runif import RunIf, missing_hardware


def _pretend(monkeypatch: pytest.MonkeyPatch, *, devices: int, gib: float = 0.0, bf16: bool = False) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: devices > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda index: SimpleNamespace(total_memory=int(gib * 2**30))
    )
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: bf16)


def test_a_test_that_asks_for_nothing_runs_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    _pretend(monkeypatch, devices=0)
    assert missing_hardware() == []


@pytest.mark.parametrize("needs", [{"cuda": True}, {"gib": 1}, {"bf16": True}])
def test_each_need_implies_a_device(monkeypatch: pytest.MonkeyPatch, needs: dict[str, float]) -> None:
    _pretend(monkeypatch, devices=0)
    assert missing_hardware(**needs) == ["a CUDA device"]


def test_all_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    _pretend(monkeypatch, devices=1, gib=8)
    assert missing_hardware(devices=2, gib=16, bf16=True) == [
        "2 CUDA devices (found 1)",
        "16 GiB of device memory (found 8.0)",
        "bfloat16 on the device",
    ]


def test_nothing_is_missing_where_all_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    _pretend(monkeypatch, devices=2, gib=80, bf16=True)
    assert missing_hardware(cuda=True, devices=2, gib=16, bf16=True) == []


def test_the_marker_skips_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    _pretend(monkeypatch, devices=0)
    mark = RunIf(devices=4).mark
    assert mark.name == "skipif"
    assert mark.args == (True,)
    assert mark.kwargs == {"reason": "needs 4 CUDA devices"}
    assert RunIf().mark.args == (False,)


def test_a_need_that_means_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="devices=0"):
        RunIf(devices=0)


@RunIf(cuda=True)
def test_the_device_computes() -> None:
    assert torch.ones(2, device="cuda").sum().item() == 2
