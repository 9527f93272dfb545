"""Everything that the pages show of runs: what scripts print, their figures, and the plots. Made by one command.

    python docs/results.py                  # all of it: run this on a quiet machine before a release
    python docs/results.py tutorial_kept    # some scripts, while you work on their pages
    python docs/results.py --plots          # no script, the plots only, from the figures that are there

It writes, in docs/results/: NAME.txt (what the script printed), NAME.json (flat: a name, and a number, a string, or a
list of numbers for a plot), figures/NAME.LANGUAGE.svg (plots.toml says what is drawn) and machine.json (what it was run
on; only when all scripts were run, so that it is true of all of them). Nothing is written unless everything succeeded.

Where a script prints a line "== What a block keeps", a section begins, which a page includes without that line, as
`--8<-- "docs/results/NAME.txt:what-a-block-keeps"`.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import math
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "docs" / "results"
SECONDS = 300  # for one script, against a hang

# A script of examples/ and its arguments. Each takes `--json FILE` as well, and runs in an empty folder.
SCRIPTS: dict[str, tuple[str, ...]] = {
    "start": (),
    "guide_facts": (),
    "how_tape": (),
    "how_planner": (),
    "how_tuner": (),
    "read_report": (),
    "tutorial_kept": (),
    "tutorial_policies": (),
    "byte_budget": (),
    "out_of_memory": (),
    "offload": (),
    "tutorial_devices": (),
    "plain_pytorch": (),
    "tutorial_huggingface": (),
    "lightning_selective": (),
}

THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


def run(name: str, into: Path) -> None:
    """Run a script as its reader does; its output and its figures come to lie in ``into``.

    Raises:
        SystemExit: it failed, or what it wrote is not what pages can take.
    """
    figures = into / f"{name}.json"
    command = [sys.executable, str(ROOT / "examples" / f"{name}.py"), *SCRIPTS[name], "--json", str(figures)]
    environment = {
        **os.environ,
        **dict.fromkeys(THREADS, "1"),
        "COLUMNS": "100",
        "PYTHONHASHSEED": "0",
        "PYTHONIOENCODING": "utf-8",
        "PYTHONPATH": str(ROOT),
    }
    with tempfile.TemporaryDirectory() as folder:
        try:
            done = subprocess.run(
                command, cwd=folder, env=environment, capture_output=True, encoding="utf-8", timeout=SECONDS, check=True
            )
        except subprocess.CalledProcessError as error:
            raise SystemExit(f"{name}: it ended with {error.returncode}.\n{error.stdout}{error.stderr}") from error
        except subprocess.TimeoutExpired as error:
            raise SystemExit(f"{name}: it ran for more than {SECONDS} seconds.") from error
        if folder in done.stdout:
            raise SystemExit(f"{name}: it prints the path of a folder of this machine.")
    (into / f"{name}.txt").write_text(with_sections(done.stdout), encoding="utf-8")
    if not figures.is_file():
        raise SystemExit(f"{name}: it wrote no figures; save what its page shows where `--json FILE` says.")
    try:
        found = json.loads(figures.read_text(encoding="utf-8"))
    except ValueError as error:
        raise SystemExit(f"{name}.json: it is no JSON: {error}") from error
    if complaint := complaint_about(found):
        raise SystemExit(f"{name}.json: {complaint}")
    figures.write_text(as_json(found), encoding="utf-8")


def with_sections(output: str) -> str:
    """What was printed, with marks around its sections, which pages name to show one of them."""
    heads, parts = [""], [[""]]
    for line in map(str.rstrip, output.splitlines()):
        if line.startswith("== "):
            heads.append(line)
            parts.append([])
        else:
            parts[-1].append(line)
    out = []
    for head, lines in zip(heads, parts, strict=True):
        text = "\n".join(lines).strip("\n")
        if head:
            name = re.sub(r"[^a-z0-9]+", "-", head.lower()).strip("-")
            text = f"{head}\n--8<-- [start:{name}]\n{text}\n--8<-- [end:{name}]"
        if text:
            out.append(text)
    return "\n\n".join(out) + "\n"


def complaint_about(figures: Any) -> str | None:
    """What keeps figures from being flat; None if nothing does."""
    if not isinstance(figures, dict):
        return "give one object, a value for each name"
    for name, value in figures.items():
        many = value if isinstance(value, list) else []
        if not (isinstance(value, str) or _is_number(value) or (many and all(map(_is_number, many)))):
            return f"{name!r} is {value!r}; give a number, a string, or a list of numbers"
    return None


def _is_number(value: Any) -> bool:
    """Not what JSON has no word for, nor what a page would show as no figure."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def as_json(figures: dict[str, Any]) -> str:
    """One line for each name, so that a difference between two runs can be read."""
    lines = [f"{json.dumps(name)}: {json.dumps(value, ensure_ascii=False)}" for name, value in figures.items()]
    return "{\n" + ",\n".join(f" {line}" for line in lines) + "\n}\n"


def machine() -> dict[str, Any]:
    """What pages say of where and when figures were made."""
    versions = {name: importlib.metadata.version(name).split("+")[0] for name in ("torch", "lightning", "matplotlib")}
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "threads": 1,
        "system": f"{platform.system()} on {platform.machine().replace('_', '-')}",
        "python": platform.python_version(),
        **versions,
    }


def _processor() -> str:
    """The processor's name as it gives it, or its architecture where it gives none."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1] for line in lines if line.startswith("model name")]
    return " ".join((names or [platform.machine()])[0].replace("(R)", "").replace("(TM)", "").split())


def main() -> None:
    """See the head of this file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(SCRIPTS)}; all of them by default")
    parser.add_argument("--plots", action="store_true", help="run nothing, and draw what is drawn from these scripts")
    options = parser.parse_args()
    if unknown := [name for name in options.names if name not in SCRIPTS]:
        parser.error(f"{', '.join(unknown)}: not in the table of scripts; there are {', '.join(SCRIPTS)}")
    names = options.names or list(SCRIPTS)

    if str(ROOT) not in sys.path:
        sys.path.insert(0, str(ROOT))
    from docs import plots

    with tempfile.TemporaryDirectory() as folder:
        new = Path(folder)
        (new / "figures").mkdir()
        for name in names:
            if options.plots:
                shutil.copy(RESULTS / f"{name}.json", new)
                continue
            print(f"{name} ...", flush=True)
            run(name, new)
        for name in names:
            plots.draw_all(name, json.loads((new / f"{name}.json").read_text(encoding="utf-8")), new / "figures")
        if not options.plots and set(names) == set(SCRIPTS):
            (new / "machine.json").write_text(as_json(machine()), encoding="utf-8")
        for path in sorted(new.rglob("*.*")):
            to = RESULTS / path.relative_to(new)
            to.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, to)
    print(f"written to {RESULTS.relative_to(ROOT)}: {', '.join(names)}")


if __name__ == "__main__":
    main()
