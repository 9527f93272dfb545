"""Plan files: written and read again, followed in another process, and refused where they cannot be."""

import copy
import json
import os
import pickle
import subprocess
import sys
import textwrap
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_remat import ConfigurationError, Remat
from lightning_remat.errors import PlanFileError
from lightning_remat.planning.planfile import VERSION, PlanFile
from lightning_remat.runtime.memory import measure_peak
from tests.helpers.loops import Loop, assert_same_training, run
from tests.helpers.training import Net

ROOT = Path(__file__).parent.parent.parent
BUDGET = 150_000
OF_MOVES = ("move", "lean_move", "window_bytes", "ahead_bytes", "min_bytes")
"""What only files of version 2 have."""


def net() -> nn.Module:
    return Net(width=16, depth=3)


def batch(rows: int = 64) -> Tensor:
    return torch.linspace(-1, 1, rows * 8).sin().reshape(rows, 8)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plan file, as a training under a budget writes it."""
    path = tmp_path_factory.mktemp("plans") / "plan.json"
    remat = Remat(budget=BUDGET)
    run(net, [batch()] * 3, remat=remat)
    assert remat.plan is not None
    assert any(remat.plan.chosen.drop)
    remat.save_plan(path)
    return path


def peak_of(remat: Remat | None, x: Tensor) -> int:
    """Above what is there between steps, when the optimizer has its state."""
    loop = run(net, [x] * 3, remat=remat)

    def step() -> None:
        loop.backward(loop.loss(x))
        loop.update()

    return measure_peak(step).peak_bytes


def test_what_is_written_is_what_is_read(written: Path, tmp_path: Path) -> None:
    plan = PlanFile.load(written)
    plan.save(tmp_path / "again.json")
    assert PlanFile.load(tmp_path / "again.json") == plan
    assert (tmp_path / "again.json").read_text() == written.read_text()
    assert os.listdir(tmp_path) == ["again.json"]
    assert len(plan.names) == len(plan.drop) == len(plan.lean)


def test_a_plan_is_followed_from_the_first_step(written: Path) -> None:
    """With every bit, and the peak that it had where it was made."""
    remat = Remat(policy=str(written))
    assert "ops run again" in remat.summary
    model, x = net(), batch()
    with remat:
        loss = model(x).square().mean()
    assert 0 < remat.stats.recorded_ops <= sum(PlanFile.load(written).drop)
    loss.backward()
    assert "nothing is listed under a plan file" in str(remat.report())
    assert_same_training(net, [batch()] * 4, remat=remat)
    made, followed, plain = (peak_of(r, batch()) for r in (Remat(budget=BUDGET), Remat(policy=Path(written)), None))
    assert abs(followed - made) <= 0.05 * made
    assert followed < 0.85 * plain


def test_in_another_process(written: Path) -> None:
    """The same peak and the same bits."""
    program = textwrap.dedent(
        f"""
        import torch
        torch.set_num_threads(1)
        from lightning_remat import Remat
        from tests.planning.test_planfile import batch, net, peak_of, run
        loop = run(net, [batch()] * 3, remat=Remat(policy={str(written)!r}))
        print(sum(p.double().sum() for p in loop.model.parameters()).item().hex())
        print(peak_of(Remat(policy={str(written)!r}), batch()))
        """
    )
    output = subprocess.run(
        [sys.executable, "-W", "error::UserWarning", "-c", program], cwd=ROOT, env={**os.environ, "PYTHONPATH": "."},
        capture_output=True, text=True, check=True,
    ).stdout.split()  # fmt: skip
    plain = run(net, [batch()] * 3)
    assert output[0] == sum(p.double().sum() for p in plain.model.parameters()).item().hex()
    assert int(output[1]) == peak_of(Remat(policy=str(written)), batch())


# ---------------------------------------------------------------------- other steps than the one it was made from


class Deeper(Net):
    def __init__(self) -> None:
        super().__init__(width=16, depth=4)


class Another(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


@pytest.mark.parametrize(
    ("make", "difference"),
    [(Deeper, r"op \d+ is aten.add_.Tensor, and in the plan aten"), (Another, "op 1 is aten.tanh.default, and in")],
    ids=["deeper", "another"],
)
def test_another_model(make: Any, difference: str, written: Path) -> None:
    """The first difference is named, once, and training goes on under a fixed policy."""
    remat = Remat(policy=str(written))
    with pytest.warns(UserWarning, match=f"another model.*{difference}.*fixed policy") as caught:
        assert_same_training(make, [batch()] * 4, remat=remat)
    assert len(caught) == 1
    assert "lightning_remat" not in caught[0].filename
    assert remat.stats.recorded_ops > 0


def test_a_step_that_ends_early(written: Path) -> None:
    """Does no harm; if none was complete before, it is said."""
    remat = Remat(policy=str(written))
    stem, x = nn.Linear(8, 16), batch()
    with pytest.warns(UserWarning, match=r"ended after \d+ ops, and the plan has"), remat:
        stem(x)
    assert_same_training(net, [batch()] * 3, remat=remat)
    with remat:
        pass
    with remat:
        stem(x)
    assert_same_training(net, [batch()] * 3, remat=remat)
    assert remat.stats.recorded_ops > 0


def test_now_and_then_another_step(written: Path) -> None:
    """The plan is followed again afterwards."""
    remat = Remat(policy=str(written))
    loop = Loop(net(), remat)
    loop.backward(loop.loss(batch()))
    other, x = Another(), batch()
    with pytest.warns(UserWarning, match="not every step is as planned"), remat:
        loss = other(x).sum()
    loss.backward()
    assert_same_training(net, [batch()] * 3, remat=remat)
    assert 0 < remat.stats.recorded_ops <= sum(PlanFile.load(written).drop)


@pytest.mark.parametrize(("rows", "larger"), [(20, False), (64, False), (96, True)])
def test_other_sizes(rows: int, larger: bool, written: Path) -> None:
    """Smaller batches follow the same plan; larger ones the smallest that was found."""
    plan = PlanFile.load(written)
    remat = Remat(policy=str(written))
    assert_same_training(net, [batch(rows)] * 3, remat=remat)
    assert peak_of(remat, batch(rows)) < 0.9 * peak_of(None, batch(rows))
    # What runs before the first op tells that the batch is larger is no different under a lean plan.
    assert abs(remat.stats.recorded_ops - sum(plan.lean if larger else plan.drop)) <= 4


@pytest.mark.parametrize("rows", [[64, 20, 64, 96, 20, 96, 64], [96, 64], [20, 96, 64]], ids=str)
def test_sizes_in_turn(rows: list[int], written: Path) -> None:
    remat = Remat(policy=str(written))
    assert_same_training(net, [batch(n) for n in rows], remat=remat)
    assert not remat._pilot.given_up


def test_a_copy_finds_the_file_from_another_folder(written: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(written.parent)
    remat = Remat(policy="plan.json")
    monkeypatch.chdir("/")
    for made in (copy.deepcopy(remat), pickle.loads(pickle.dumps(remat))):
        made.bind(net())
        assert_same_training(net, [batch()] * 2, remat=made)
        assert made.stats.recorded_ops > 0


def test_the_plan_for_the_largest_step_is_saved(tmp_path: Path) -> None:
    """The last batch of an epoch is often a smaller one."""
    remat = Remat(budget=BUDGET)
    run(net, [batch(n) for n in (20, 20, 64, 64, 20, 20)], remat=remat)
    remat.save_plan(tmp_path / "plan.json")
    plan = PlanFile.load(tmp_path / "plan.json")
    assert max(plan.elements) == 64 * 32


def test_verify_and_a_plan_file(written: Path) -> None:
    remat = Remat(policy=str(written), verify=True)
    assert_same_training(net, [batch()] * 3, remat=remat)
    assert remat.verifier is not None
    assert remat.verifier.checked


# ---------------------------------------------------------------------- files that are no plans

DAMAGED: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "damaged or cut short"),
    "binary": (bytes(range(256)), "not text"),
    "no JSON": (b"policy: full", "damaged or cut short"),
    "a list": (b"[1, 2]", "not a plan"),
    "a number": (b"5", "not a plan"),
    "null": (b"null", "not a plan"),
    "other JSON": (b'{"name": "package"}', "not a plan"),
    "deep": (b"[" * 100_000, "damaged or cut short"),
}


@pytest.mark.parametrize(("content", "words"), DAMAGED.values(), ids=DAMAGED)
def test_a_file_that_is_no_plan(content: bytes, words: str, tmp_path: Path) -> None:
    """Before the first step, with the path and the way out."""
    path = tmp_path / "some.json"
    path.write_bytes(content)
    with pytest.raises(PlanFileError, match=rf"policy='.*some\.json'.*{words}.*save_plan"):
        Remat(policy=str(path))


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.9, 0.999])
def test_a_file_that_is_cut_short(share: float, written: Path, tmp_path: Path) -> None:
    path = tmp_path / "some.json"
    whole = written.read_text()
    path.write_text(whole[: int(share * len(whole))])
    with pytest.raises(PlanFileError, match=r"some\.json.*cut short"):
        Remat(policy=str(path))


CHANGES: dict[str, tuple[dict[str, Any], str]] = {
    "a later version": ({"version": VERSION + 1}, f"version {VERSION + 1}, and this release reads 1 to {VERSION}"),
    "no version": ({"version": None}, "version None"),
    "a version of another type": ({"version": "1"}, "version '1'"),
    "a version that is a switch": ({"version": True}, "version True"),
    "another format": ({"format": "lightning-remat report"}, "not a plan"),
    "fewer ops": ({"names": ["aten.add.Tensor"]}, "entries for 1 ops"),
    "names that are a text": ({"names": "aten"}, "names must be a list"),
    "names that are a number": ({"names": 5}, "names must be a list"),
    "numbers for names": ({"modules": [3]}, "strings"),
    "sizes that mean something else": ({"elements": [-7]}, "-1 or more"),
    "sizes with fractions": ({"elements": [1.5]}, "whole numbers"),
    "sizes that are switches": ({"elements": [True]}, "whole numbers"),
    "other marks": ({"drop": "01x"}, "0 and 1"),
    "marks of another type": ({"lean": {"1": 0}}, "0 and 1"),
    "a budget in words": ({"budget_bytes": "1GiB"}, "whole numbers"),
    "a device that is a number": ({"device": 0}, "strings"),
    "time in words": ({"extra_seconds": "soon"}, "a number"),
    "something more": ({"surprise": 1}, "surprise"),
}


@pytest.mark.parametrize(("change", "words"), CHANGES.values(), ids=CHANGES)
def test_a_file_with_other_content(change: dict[str, Any], words: str, written: Path, tmp_path: Path) -> None:
    content = json.loads(written.read_text())
    for name, value in change.items():
        repeated = isinstance(value, list) and name != "names"
        content[name] = value * len(content[name]) if repeated else value
    path = tmp_path / "some.json"
    path.write_text(json.dumps(content))
    with pytest.raises(PlanFileError, match=rf"some\.json.*{words}"):
        Remat(policy=str(path))


@pytest.mark.parametrize("name", [*sorted(set(PlanFile.__dataclass_fields__) - set(OF_MOVES)), "format", "version"])
def test_a_file_in_which_something_is_missing(name: str, written: Path, tmp_path: Path) -> None:
    content = json.loads(written.read_text())
    del content[name]
    path = tmp_path / "some.json"
    path.write_text(json.dumps(content))
    with pytest.raises(PlanFileError, match=r"some\.json"):
        Remat(policy=str(path))


def test_a_plan_for_everything_changes_no_bit(written: Path, tmp_path: Path) -> None:
    """Whatever a file says may be dropped: what cannot be is kept."""
    content = json.loads(written.read_text())
    content["drop"] = content["lean"] = "1" * len(content["names"])
    path = tmp_path / "all.json"
    path.write_text(json.dumps(content))
    assert_same_training(net, [batch(), batch(20), batch(96)], remat=Remat(policy=str(path)))


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(PlanFileError, match=r"nowhere/plan\.json'.*No such file.*save_plan"):
        Remat(policy=str(tmp_path / "nowhere" / "plan.json"))
    (tmp_path / "folder.json").mkdir()
    with pytest.raises(PlanFileError, match=r"folder\.json'.*cannot be read"):
        Remat(policy=str(tmp_path / "folder.json"))
    with pytest.raises(PlanFileError, match=r"no path"):
        Remat(policy="a\0.json")


def test_a_budget_and_a_plan_file_contradict_each_other(written: Path) -> None:
    with pytest.raises(ConfigurationError, match="contradict"):
        Remat(policy=str(written), budget="1GiB")


# ---------------------------------------------------------------------- saving


def test_without_a_plan_nothing_is_saved(tmp_path: Path) -> None:
    for remat in (Remat("full"), Remat(budget="1GiB")):
        with pytest.raises(ConfigurationError, match="there is no plan"):
            remat.save_plan(tmp_path / "plan.json")
    assert os.listdir(tmp_path) == []


def test_a_name_that_would_not_be_found_again(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"\.json"):
        Remat(budget="1GiB").save_plan(tmp_path / "plan.txt")


def test_a_file_that_cannot_be_written(written: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is there stays, and nothing half-written lies about."""
    plan = PlanFile.load(written)
    plan.save(tmp_path / "plan.json")
    before = (tmp_path / "plan.json").read_text()
    with pytest.raises(PlanFileError, match=r"nowhere/plan\.json.*No such file"):
        plan.save(tmp_path / "nowhere" / "plan.json")
    (tmp_path / "folder.json").mkdir()
    with pytest.raises(PlanFileError, match=r"folder\.json"):
        plan.save(tmp_path / "folder.json")

    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(PlanFileError, match="No space left"):
        plan.save(tmp_path / "plan.json")
    assert sorted(os.listdir(tmp_path)) == ["folder.json", "plan.json"]
    assert (tmp_path / "plan.json").read_text() == before


def test_others_may_read_what_is_saved(written: Path, tmp_path: Path) -> None:
    """As far as the user's mask lets them."""
    ordinary = tmp_path / "ordinary"
    ordinary.write_text("")
    assert written.stat().st_mode == ordinary.stat().st_mode


def test_who_makes_warnings_errors_loses_nothing(written: Path) -> None:
    """The error comes out of the step, and all is unwound."""
    remat = Remat(policy=str(written))
    other, x = Another(), batch()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="another model"), remat:
            other(x)
    assert_same_training(Another, [batch()] * 3, remat=remat)
