"""Every example runs as a script does, and the demo shows what it says it shows."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest
from PIL import Image

import lightning_remat

EXAMPLES = Path(lightning_remat.__file__).parent.parent / "examples"
DEMO = ["--size", "tiny", "--steps", "3", "--device", "cpu"]


@pytest.fixture(autouse=True)
def _as_scripts_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Examples import their neighbours, and write into the current folder."""
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")


def run(monkeypatch: pytest.MonkeyPatch, name: str, *args: str) -> int:
    """Run an example as ``python NAME ARGS``; returns the exit status."""
    monkeypatch.setattr(sys, "argv", [name, *args])
    try:
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    except SystemExit as leaving:
        return int(leaving.code or 0)
    return 0


def rows(output: str, *policies: str) -> dict[str, str]:
    """The table's rows by policy."""
    cells = [line.strip("│ ").split("│") for line in output.splitlines() if line.startswith("│")]
    return {row[0].strip(): row[-1].strip() for row in cells if row[0].strip() in policies}


def test_every_script_is_tested() -> None:
    """A script is run by name in some test of this folder; files that are no scripts are what the scripts import."""
    scripts = {path.name for path in EXAMPLES.glob("*.py") if "__main__" in path.read_text(encoding="utf-8")}
    assert len(scripts) > 10
    tests = "".join(path.read_text(encoding="utf-8") for path in Path(__file__).parent.glob("test_*.py"))
    assert {name for name in scripts if f'"{name}"' not in tests and f'"{Path(name).stem}"' not in tests} == set()


def test_demo_compares_policies_and_finds_no_difference(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All four policies end in the same bits as plain Lightning, and the plot is a picture."""
    assert run(monkeypatch, "demo_gpt.py", *DEMO, "--output", "plot.png") == 0

    identical = rows(capsys.readouterr().out, "none", "full", "sqrt", "selective")
    assert identical == dict.fromkeys(("none", "full", "sqrt", "selective"), "yes")
    with Image.open("plot.png") as picture:
        picture.load()
        assert picture.format == "PNG"
        assert picture.width > 1000
        colours = picture.convert("RGB").getcolors(maxcolors=1 << 24)
    assert len(colours) > 50  # curves, fills and letters, not an empty canvas


def test_demo_compares_with_none_even_where_it_is_not_asked_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Any policy by name, once each, with its own batch size and seed."""
    chosen = ["--policy", "every:2", "--policy", "every:2", "--batch", "1", "--seed", "7"]
    assert run(monkeypatch, "demo_gpt.py", *DEMO, *chosen) == 0

    output = capsys.readouterr().out
    assert rows(output, "none", "every:2") == {"none": "yes", "every:2": "yes"}
    assert output.count("│ every:2") == 1
    assert Path("remat-demo.png").is_file()


def test_demo_names_what_differs_and_fails(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """One changed weight is a "no" in the table and a failed command."""
    import demo_gpt

    true_fingerprint = demo_gpt.fingerprint
    calls: list[int] = []

    def second_one_differs(model: object, *rest: object) -> dict[str, str]:
        calls.append(1)
        if len(calls) == 2:
            next(model.parameters()).data.view(-1)[0] += 1e-6
        return true_fingerprint(model, *rest)

    monkeypatch.setattr(demo_gpt, "fingerprint", second_one_differs)
    with pytest.raises(SystemExit) as leaving:
        demo_gpt.app(args=[*DEMO, "--policy", "full"])

    assert leaving.value.code == 1
    assert rows(capsys.readouterr().out, "none", "full") == {"none": "yes", "full": "no: weights"}


def test_demo_goes_on_without_matplotlib(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The table is what matters; the plot says which extra it needs."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert run(monkeypatch, "demo_gpt.py", *DEMO, "--policy", "full") == 0

    output = capsys.readouterr().out
    assert "pip install 'lightning-remat[plot]'" in output
    assert rows(output, "full") == {"full": "yes"}
    assert not list(Path().iterdir())


@pytest.mark.parametrize(
    ("args", "complaint"),
    [
        (["--policy", "selectiv"], "selective"),
        (["--policy", "every:0"], "every:0"),
        (["--steps", "0"], "--steps"),
        (["--batch", "0"], "--batch"),
        (["--threads", "0"], "--threads"),
        (["--batch", "99999999"], "--batch"),
        (["--size", "huge"], "small"),
        (["--device", "abacus"], "auto, cpu, cuda, cuda:N"),
        (["--device", "cuda:77"], "CUDA devices"),
        (["--output", "plot.pdf"], ".png"),
        (["--output", "nowhere/plot.png"], "does not exist"),
        (["--seed", "-1"], "--seed"),
    ],
)
def test_demo_refuses_bad_values_before_it_trains(
    args: list[str], complaint: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The message names the option and what would do; nothing is written."""
    import demo_gpt

    monkeypatch.setattr(demo_gpt, "train", lambda *_, **__: pytest.fail("training began"))
    with pytest.raises(SystemExit) as leaving:
        demo_gpt.app(args=args)

    assert leaving.value.code == 2
    assert complaint in capsys.readouterr().err
    assert not list(Path().iterdir())
