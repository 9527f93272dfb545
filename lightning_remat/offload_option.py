"""``offload=``: where activations wait that leave the device, and within which limits."""

from __future__ import annotations

import os
import warnings
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from lightning_remat.engine.offload import directory as directories
from lightning_remat.errors import ConfigurationError
from lightning_remat.sizes import parse_amount


@dataclass(frozen=True)
class Offload:
    """Where activations that are kept for backward wait until they are asked for, and within which limits.

    ``offload="disk"`` is short for ``offload=Offload("disk")``.

    Args:
        to: ``"cpu"`` (host memory; it takes an accelerator to move them from), ``"disk"`` (the directory for temporary
            files, which ``TMPDIR`` names; the user's cache directory where that one is host memory), or a directory
            that is there. ``"./cpu"`` is a directory.
        host_budget: the most host memory that they may take, with ``to="cpu"``: bytes, ``"20GiB"``, or a share of what
            is free, ``"50%"``. None: half of it.
        disk_budget: the most that they may take on disk, for the other two: the same, a share being one of what is
            free there. None: all of that but a little.
        min_bytes: contents below this stay on the device: a transfer takes some time whatever its size.
        in_flight: the most bytes that wait on the device to leave it and, separately, that are back before they are
            asked for. More hides more of the transfers, and takes more of the device. None: it is chosen from the
            largest contents.
        checksum: compare what comes back from a disk with what went out. It costs processor time for every byte, in
            both directions; ``lightning-remat bench-io`` says how much. Without it, what the disk alters is altered in
            the gradients.

    Raises:
        ConfigurationError: a value that cannot work, or two that contradict each other. What depends on the machine
            (the directory, the accelerator) is looked at where the option is used.

    Example:
        >>> from lightning_remat import Offload
        >>> Offload("disk", disk_budget="200GiB")
        Offload(to='disk', host_budget=None, disk_budget='200GiB', min_bytes='64KiB', in_flight=None, checksum=True)
        >>> Offload("cpu", disk_budget="200GiB")
        Traceback (most recent call last):
        ...
        lightning_remat.errors.ConfigurationError: Offload: disk_budget='200GiB' and to='cpu' contradict each other: ...
    """

    to: str | Path
    _: KW_ONLY
    host_budget: int | str | None = None
    disk_budget: int | str | None = None
    min_bytes: int | str = "64KiB"
    in_flight: int | str | None = None
    checksum: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "to", _destination(self.to))
        other = "disk_budget" if self.place == "cpu" else "host_budget"
        if (value := getattr(self, other)) is not None:
            right = "host_budget" if self.place == "cpu" else "disk_budget"
            raise ConfigurationError(
                f"Offload: {other}={value!r} and to={self.to!r} contradict each other: nothing would ever be there. "
                f"Give {right}= instead, or another to=."
            )
        for name in ("host_budget", "disk_budget"):
            if (value := getattr(self, name)) is not None:
                _amount(name, value, least=1, share=True)
        _amount("min_bytes", self.min_bytes, least=0)
        if self.in_flight is not None:
            _amount("in_flight", self.in_flight, least=1)
        if not isinstance(self.checksum, bool):
            raise ConfigurationError(f"Offload: checksum={self.checksum!r} is not a switch; give True or False.")

    @property
    def place(self) -> Literal["cpu", "disk"]:
        """Which kind of place it is."""
        return "cpu" if self.to == "cpu" else "disk"

    @property
    def directory(self) -> Path | None:
        """The directory, absolute; None for host memory."""
        if self.place == "cpu":
            return None
        to: str | Path = directories.default_directory() if self.to == "disk" else self.to
        return Path(to).expanduser().absolute()

    @property
    def least_bytes(self) -> int:
        """``min_bytes`` in bytes."""
        return int(_amount("min_bytes", self.min_bytes, least=0))

    @property
    def in_flight_bytes(self) -> int | None:
        """``in_flight`` in bytes; None: it is to be chosen."""
        return None if self.in_flight is None else int(_amount("in_flight", self.in_flight, least=1))

    def budget_bytes(self, whole: int) -> int | None:
        """What the place may take; None: it is not said.

        Args:
            whole: bytes that a share is one of: what is free of the host's memory, or on the disk.
        """
        name = "host_budget" if self.place == "cpu" else "disk_budget"
        value = getattr(self, name)
        if value is None:
            return None
        size = _amount(name, value, least=1, share=True)
        return size if isinstance(size, int) else int(size * whole)

    def check_machine(self) -> None:
        """See whether it can work here.

        Raises:
            ConfigurationError: there is no accelerator that anything could leave for host memory, or the directory is
                not there, is none, or cannot be written to.
        """
        if self.place == "cpu":
            if not torch.accelerator.is_available():
                raise ConfigurationError(
                    "offload: to='cpu' means host memory, and no accelerator is available here: activations are in "
                    "host memory already, so that moving them there would free nothing. Use to='disk' (or a "
                    "directory), or leave offload= out."
                )
            return
        directory = self.directory
        assert directory is not None  # of every disk
        if isinstance(self.to, str) and os.sep not in self.to and self.to != "disk" and not directory.exists():
            raise ConfigurationError(
                f"offload: to={self.to!r} is neither 'cpu' nor 'disk', and there is no directory of that name in "
                f"{str(directory.parent)!r}. Give one of the two, or a directory that is there."
            )
        warning = directories.check_directory(directory)
        if warning is not None:
            warnings.warn(warning, stacklevel=2)


def offload_from(option: object) -> Offload | None:
    """What users give as ``offload=``, parsed; its directory, if it names one, made absolute. None stays None.

    Raises:
        ConfigurationError: it is nothing that can be offloaded to, or cannot work on this machine.
    """
    if option is None:
        return None
    if not isinstance(option, Offload):
        if isinstance(option, bool) or not isinstance(option, (str, os.PathLike)):
            raise ConfigurationError(
                f"offload={option!r} is no place: give 'cpu' (host memory), 'disk' (a directory for temporary files), "
                "a directory, or Offload(...) with one of these; leave it out to move nothing."
            )
        option = Offload(option)  # type: ignore[arg-type]  # any PathLike becomes a string there
    option.check_machine()
    if option.to not in ("cpu", "disk"):
        option = replace(option, to=str(option.directory))
    return option


def _destination(to: Any) -> str:
    """``to`` as a string.

    Raises:
        ConfigurationError: it names nothing.
    """
    named = os.fspath(to) if isinstance(to, (str, os.PathLike)) else None
    if not isinstance(named, str) or not named.strip() or "\0" in named:
        raise ConfigurationError(
            f"Offload: to={to!r} names no place; give 'cpu' (host memory), 'disk' (a directory for temporary files) "
            "or a directory."
        )
    return named


def _amount(name: str, given: Any, *, least: int, share: bool = False) -> int | float:
    """Bytes (int), or a share (float in (0, 1])."""
    try:
        return parse_amount(name, given, least=least, share=share)
    except ConfigurationError as error:
        raise ConfigurationError(f"Offload: {error}") from error
