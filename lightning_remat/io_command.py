"""``lightning-remat bench-io``: how fast a disk, or host memory, takes what leaves the device, and gives it back."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from lightning_remat.engine.offload.directory import check_directory, default_directory, file_system
from lightning_remat.engine.offload.disk import DiskPlace
from lightning_remat.engine.offload.file import ScratchFile
from lightning_remat.engine.offload.host import HostPlace
from lightning_remat.errors import ConfigurationError, OffloadError
from lightning_remat.reporting.text import format_seconds, three_digits
from lightning_remat.runtime.bandwidth import (
    CONTENT_BYTES,
    Bandwidth,
    bandwidth_of,
    device_name,
    key_of_disk,
    key_of_host,
)
from lightning_remat.sizes import parse_amount

EPILOG = "Example: lightning-remat bench-io /scratch. Then: Remat(offload='/scratch'), or Offload('/scratch', ...)."
GB = 1e9


class To(str, Enum):
    """What ``offload=`` calls the two places."""

    disk = "disk"
    cpu = "cpu"


@dataclass(frozen=True)
class Measured:
    """One line of the table.

    Attributes:
        name: what is special about it.
        checksum: whether what came back was compared with what had gone out; None: not on a disk.
        bandwidth: what was measured.
        known: it was not measured now.
    """

    name: str
    checksum: bool | None
    bandwidth: Bandwidth
    known: bool


def bench_io(
    directory: Annotated[
        Path | None,
        typer.Argument(help="A directory on the disk to measure; else the one that offload='disk' takes."),
    ] = None,
    to: Annotated[To, typer.Option(help="disk, or cpu: between the accelerator and host memory.")] = To.disk,
    size: Annotated[
        str, typer.Option(help="How much to move there and back, three times: bytes, or a size; 8MiB at least.")
    ] = "256MiB",
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON: bytes, seconds.")] = False,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Measure anew; else what was measured here within 30 days is printed.")
    ] = False,
) -> None:
    """Print what moving activations there and back takes."""
    try:
        total = int(parse_amount("--size", size, least=CONTENT_BYTES))
        if to is To.cpu:
            facts, found = _host(directory, total, fresh)
        else:
            facts, found = _disk(directory, total, fresh)
    except ConfigurationError as error:
        typer.echo(f"lightning-remat bench-io: {error}", err=True)
        raise typer.Exit(2) from error
    except OffloadError as error:
        typer.echo(f"lightning-remat bench-io: {error}", err=True)
        raise typer.Exit(1) from error
    if as_json:
        typer.echo(json.dumps(facts | {"measured": [_as_data(one) for one in found]}, indent=1))
    else:
        _print(Console(), facts, found)


def _disk(directory: Path | None, total: int, fresh: bool) -> tuple[dict[str, Any], list[Measured]]:
    where = (default_directory() if directory is None else directory.expanduser()).absolute()
    warning = check_directory(where)
    if warning is not None:
        typer.echo(f"Note: {warning}", err=True)
    try:
        file = ScratchFile(where)
        try:
            direct = file.direct
        finally:
            file.close()
    except OSError as error:
        raise OffloadError(f"no file can be made in {str(where)!r}: {error.strerror or error}.") from error
    found = []
    for checksum in (True, False):
        place = DiskPlace(where, checksum=checksum)
        name = "with checksums" if checksum else "without"
        try:
            found.append(_measured(name, checksum, place, key_of_disk(where, checksum), str(where), total, fresh))
        finally:
            place.close()
    return {"directory": str(where), "file_system": file_system(where), "direct_io": direct}, found


def _host(directory: Path | None, total: int, fresh: bool) -> tuple[dict[str, Any], list[Measured]]:
    if directory is not None:
        raise ConfigurationError(
            f"DIRECTORY={str(directory)!r} and --to cpu contradict each other: host memory has no directory. Leave one "
            "of them out."
        )
    if not torch.accelerator.is_available():
        raise ConfigurationError(
            "--to cpu measures the way between an accelerator and host memory, and no accelerator is available here. "
            "Measure a disk with --to disk."
        )
    kind = torch.accelerator.current_accelerator()
    assert kind is not None  # one is available
    device = torch.device(kind.type, torch.accelerator.current_device_index())
    place = HostPlace(device)
    name = device_name(device)
    try:
        found = _measured(name, None, place, key_of_host(device), name, total, fresh, device=device)
    finally:
        place.close()
    return {"accelerator": name}, [found]


def _measured(
    name: str, checksum: bool | None, place: Any, key: str, where: str, total: int, fresh: bool, **options: Any
) -> Measured:
    start = time.time()
    options |= {"total_bytes": total, "content_bytes": CONTENT_BYTES}
    bandwidth = bandwidth_of(place, key, where, fresh=fresh, **options)
    return Measured(name, checksum, bandwidth, bandwidth.measured_at < start)


def _as_data(measured: Measured) -> dict[str, Any]:
    data: dict[str, Any] = asdict(measured.bandwidth) | {"known": measured.known}
    if measured.checksum is not None:
        data["checksum"] = measured.checksum
    return data


def _print(console: Console, facts: dict[str, Any], found: list[Measured]) -> None:
    console.print(_table(facts, found))
    for sentence in _sentences(found):
        console.print(sentence, soft_wrap=True, markup=False, highlight=False)


def _table(facts: dict[str, Any], found: list[Measured]) -> Table:
    if "directory" in facts:
        direct = "past the page cache (direct I/O)" if facts["direct_io"] else "through the page cache (no direct I/O)"
        title = f"{facts['directory']}: {facts['file_system'] or 'unknown file system'}, {direct}"
    else:
        title = f"Host memory, from {facts['accelerator']} and back"
    table = Table(title=title, title_justify="left")
    table.add_column("")
    for name in ("write", "read", "latency", "CPU s per GB", "delay s per GB"):
        table.add_column(name, justify="right", no_wrap=True)
    for one in found:
        b = one.bandwidth
        table.add_row(
            one.name,
            _rate(b.out_bytes_per_second),
            _rate(b.in_bytes_per_second),
            format_seconds(b.latency_seconds),
            three_digits(b.cpu_seconds_per_byte * GB),
            three_digits(b.delay_seconds_per_byte * GB),
        )
    return table


def _sentences(found: list[Measured]) -> list[str]:
    first = found[0].bandwidth
    hidden = first.hidden_bytes(1.0)
    sentences = [
        f"A step of 1 s hides about {three_digits(hidden / GB)} GB, written in one part of it and read in the other; "
        "for what is moved beyond that, it waits."
    ]
    if len(found) > 1:
        more = (first.cpu_seconds_per_byte - found[1].bandwidth.cpu_seconds_per_byte) * GB
        sentences.append(
            f"Checksums take {three_digits(max(0.0, more))} s of processor time for each GB in each direction, on "
            "threads beside the step's."
        )
    if any(one.known for one in found):
        day = time.strftime("%Y-%m-%d", time.localtime(min(one.bandwidth.measured_at for one in found)))
        sentences.append(f"Measured here before ({day}); --fresh measures again.")
    return sentences


def _rate(bytes_per_second: float) -> str:
    if bytes_per_second >= GB:
        return f"{three_digits(bytes_per_second / GB)} GB/s"
    return f"{three_digits(bytes_per_second / 1e6)} MB/s"
