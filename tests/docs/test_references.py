"""Links by name into what Sphinx has built, here a small imitation of it."""

import zlib
from pathlib import Path

import pytest

from docs.references import References, UnknownReference

HEAD = b"# Sphinx inventory version 2\n# Project: p\n# Version: 1\n# What follows is compressed using zlib.\n"
NAMES = """\
lightning_remat.Remat py:class 1 remat.html#$ -
lightning_remat.Remat.report py:method 1 remat.html#$ -
lightning_remat.engine.Deep py:class 1 remat.html#lightning_remat.Shallow -
remat std:doc -1 remat.html Remat
"""


@pytest.fixture
def references(tmp_path: Path) -> References:
    (tmp_path / "objects.inv").write_bytes(HEAD + zlib.compress(NAMES.encode()))
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/planning.html").write_text('<section id="budgets-are-kept">', encoding="utf-8")
    (tmp_path / "dev/index.html").write_text("", encoding="utf-8")
    return References(tmp_path)


def test_public_names(references: References) -> None:
    assert references.api("lightning_remat.Remat.report") == "remat.html#lightning_remat.Remat.report"
    assert references.api("lightning_remat.engine.Deep") == "remat.html#lightning_remat.Shallow"
    assert references.api("") == "index.html"


@pytest.mark.parametrize("name", ["lightning_remat.Remat.reports", "remat"])  # a page is no name
def test_an_unknown_name(references: References, name: str) -> None:
    with pytest.raises(UnknownReference, match=f"the API reference has no '{name}'"):
        references.api(name)


def test_the_nearest_names_are_said(references: References) -> None:
    with pytest.raises(UnknownReference, match=r"did you mean lightning_remat\.Remat\.report or"):
        references.api("lightning_remat.Remat.reports")


def test_pages_for_developers(references: References) -> None:
    assert references.developers("planning") == "dev/planning.html"
    assert references.developers("planning#budgets-are-kept") == "dev/planning.html#budgets-are-kept"
    assert references.developers("") == "dev/index.html"


def test_an_unknown_page_or_anchor(references: References) -> None:
    with pytest.raises(UnknownReference, match="no page 'plans' for developers; there are index, planning"):
        references.developers("plans")
    with pytest.raises(UnknownReference, match=r"no #budgets-are-keept; did you mean budgets-are-kept\?"):
        references.developers("planning#budgets-are-keept")
