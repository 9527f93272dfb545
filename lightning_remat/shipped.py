"""Folders of the repository that go along with the package."""

from __future__ import annotations

from pathlib import Path


def shipped_folder(name: str, holds: str) -> Path:
    """Where a folder is: inside the package in an installed wheel (``_name``), beside it in a checkout.

    Args:
        name: in the repository, ``"examples"`` or ``"quiz"``.
        holds: a file that is in it, by which it is known.

    Raises:
        FileNotFoundError: If it is in neither place, with both places named.
    """
    package = Path(__file__).parent
    places = [package / f"_{name}", package.parent / name]
    for place in places:
        if (place / holds).is_file():
            return place
    raise FileNotFoundError(
        f"{name} is neither in {places[0]} nor in {places[1]}: install lightning-remat again, or run it from a clone."
    )
