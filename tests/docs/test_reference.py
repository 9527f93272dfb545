"""How Sphinx is taught to take pages of the repository, and what commands say of themselves."""

import pytest

from docs.api import conf
from docs.api.directives import help_of
from lightning_remat.cli import app


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("![gpt](img/peers_gpt.svg)", "![gpt](../../img/peers_gpt.svg)"),
        ("see [tuning.md](tuning.md#options)", "see [tuning.md](tuning.md#options)"),
        ("([examples/x.yaml](../examples/x.yaml))", "(`examples/x.yaml`)"),
        ("[the script](../examples/x.py)", "the script (`examples/x.py`)"),
        ("[`x.py`](../x.py)", "`x.py`"),
    ],
)
def test_pages_for_developers(text: str, expected: str) -> None:
    """Files of the repository have no address, so they are named; what the site has is linked."""
    assert conf.developer_page(text) == expected


def test_options_that_are_not_public_are_left_out() -> None:
    signature = "(base='auto', *, retries=3, _namespace='lightning.pytorch', **base_options)"
    expected = "(base='auto', *, retries=3, **base_options)"
    assert conf._without_private_options(None, "class", "x", None, None, signature, None) == (expected, None)
    assert conf._without_private_options(None, "class", "x", None, None, None, None) == (None, None)


@pytest.mark.parametrize("command", ["plan", "bench-io", "demo"])
def test_what_a_command_says_of_itself(command: str) -> None:
    text = help_of(app, [command])
    assert f"lightning-remat {command}" in text
    assert "\x1b" not in text
    assert max(map(len, text.splitlines())) <= 88
