"""Engines that are closed when a test ends."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from lightning_remat import Remat


@pytest.fixture
def engines() -> Iterator[Callable[..., Remat]]:
    made: list[Remat] = []

    def make(*args: Any, **options: Any) -> Remat:
        made.append(Remat(*args, **options))
        return made[-1]

    yield make
    for remat in made:
        remat.close()
