import random

import numpy as np
import torch

from tests.helpers import seed_everything


def _draw() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), torch.rand(()).item()


def test_the_same_seed_gives_the_same_draws() -> None:
    seed_everything(7)
    first = _draw()
    seed_everything(7)
    assert _draw() == first
    seed_everything(8)
    assert all(a != b for a, b in zip(_draw(), first, strict=True))


def test_a_test_starts_seeded() -> None:
    """The fixture in conftest.py has seeded with the default, whatever ran before."""
    drawn = _draw()
    seed_everything()
    assert _draw() == drawn
