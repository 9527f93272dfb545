"""What the API reference shows: everything public is there, and its examples run as they stand, with their imports."""

import doctest
import re
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import lightning_remat
from lightning_remat import errors

API = Path(__file__).parents[2] / "docs/api"
TEXT = "\n".join(path.read_text(encoding="utf-8") for path in sorted(API.glob("*.rst")))
SHOWN = re.findall(r"^\.\. auto(?:class|exception|function):: ([\w.]+)$", TEXT, re.MULTILINE)
REMAT = re.findall(
    r"^   \.\. auto(?:method|property|attribute):: (\w+)$",
    (API / "remat.rst").read_text(encoding="utf-8"),
    re.MULTILINE,
)


def found(name: str) -> Any:
    module, _, attribute = name.rpartition(".")
    return getattr(import_module(module), attribute)


def test_everything_public_is_shown() -> None:
    assert {f"lightning_remat.{name}" for name in lightning_remat.__all__} <= set(SHOWN)
    ours = {name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, Exception)}
    assert ours == {name.rpartition(".")[2] for name in SHOWN if "Error" in name or "NoMemory" in name}


def test_what_remat_has_is_shown_unless_it_is_for_strategies() -> None:
    """A new public method or property goes into the reference, or into this list."""
    theirs = {"run", "retry", "fixed", "guarded", "offloading", "pilot", "binding", "policy_in_force"}
    theirs |= {"put_in_force", "press", "check_place", "look_at", "meet", "tighten_compiled"}
    public = {name for name in dir(lightning_remat.Remat) if not name.startswith("_")}
    assert public - theirs == set(REMAT) - {"__enter__", "__exit__"}


@pytest.mark.parametrize("name", [f"lightning_remat.{name}" for name in lightning_remat.__all__])
def test_everything_public_has_an_example(name: str) -> None:
    assert doctest.DocTestFinder(recurse=False).find(found(name))[0].examples


@pytest.mark.parametrize("name", SHOWN)
def test_examples_run_with_nothing_but_their_own_imports(name: str) -> None:
    """As somebody runs them who copies them from the page."""
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    runner = doctest.DocTestRunner(optionflags=flags, verbose=False)
    for test in doctest.DocTestFinder().find(found(name), name, globs={}):
        test.globs = {}
        runner.run(test)
    assert runner.failures == 0
