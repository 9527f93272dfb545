"""The simulator against measured peaks, and results against the plain step's: models of six kinds, any plan."""

from __future__ import annotations

import pytest

from tests.helpers.plans import Traced, check_all
from tests.helpers.zoo import CASES


@pytest.mark.parametrize("name", CASES)
def test_any_plan_of_a_model_is_exact_and_foreseen(name: str) -> None:
    """The peak of the traced step to the byte, that of any other plan within 0.2 %, and every result bit for bit."""
    check_all(Traced(*CASES[name].make(tiny=True)), 5)
