"""Running a tutorial's script as its reader does."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import lightning_remat

ROOT = Path(lightning_remat.__file__).parent.parent
SECONDS = 240  # against a hang


def run_script(name: str, folder: Path, *arguments: str) -> tuple[dict[str, str], dict[str, Any]]:
    """Run ``examples/NAME.py`` in a process of its own, in an empty folder.

    Returns:
        What it printed, by section (a line "== Title" begins one), and its figures.
    """
    work = folder / "work"
    work.mkdir()
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / f"{name}.py"), *arguments, "--json", str(folder / "figures.json")],
        cwd=work,
        env={
            **os.environ,
            **threads,
            "COLUMNS": "100",
            "PYTHONPATH": str(ROOT),
            "XDG_CACHE_HOME": str(folder / "cache"),
            "CUDA_VISIBLE_DEVICES": "",
        },
        capture_output=True,
        encoding="utf-8",
        timeout=SECONDS,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    sections: dict[str, str] = {}
    for part in re.split("^== ", done.stdout, flags=re.MULTILINE)[1:]:
        title, _, text = part.partition("\n")
        sections[title.strip()] = text.strip()
    assert not list(work.iterdir()), "nothing is left behind"
    return sections, json.loads((folder / "figures.json").read_text(encoding="utf-8"))
