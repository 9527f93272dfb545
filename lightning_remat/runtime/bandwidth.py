"""How fast a place takes contents and gives them back: measured once for each machine, and remembered.

What is known is in one small file in the user's cache directory (on Linux ``$XDG_CACHE_HOME`` or ``~/.cache``). That
file may be deleted at any time; one that is damaged, from another version or not to be written to is passed over.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import socket
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from statistics import median
from typing import Any

import platformdirs
import torch
from torch import Tensor

from lightning_remat.engine.offload.place import Place
from lightning_remat.errors import OffloadError

LASTS_SECONDS = 30 * 24 * 3600.0
"""After that a place is measured anew: disks fill up and age, machines are rebuilt under an old name."""

TOTAL_BYTES = 64 * 2**20
CONTENT_BYTES = 8 * 2**20
TINY_BYTES = 4096
ROUNDS = 3

_WARM = 5  # operations that are timed to know how many of them are as long as a transfer
_MOST_WORK = 5000
_DELAY_SECONDS = 0.2  # about as long transfers last beside which others work

_FORMAT = 2
_HOST = torch.device("cpu")

Clock = Callable[[], float]


@dataclass(frozen=True, kw_only=True)
class Bandwidth:
    """What moving contents to a place and back takes.

    Attributes:
        out_bytes_per_second: of contents that leave the device one after the other, until all have arrived.
        in_bytes_per_second: of contents that come back, until all are there.
        latency_seconds: what a tiny content takes in one direction; the mean of both.
        cpu_seconds_per_byte: processor time of this process for a byte in one direction, checksums included; the mean
            of both.
        delay_seconds_per_byte: by how much a byte on its way, in one direction, holds up operations that run meanwhile
            and are bound by memory, as those are that recomputation would have to run instead; the mean of both. On an
            accelerator 0: there the copies have engines of their own.
        measured_at: seconds since the epoch.
        place: ``"cpu"`` or ``"disk"``.
        where: the directory, or the name of the accelerator, for people to read.
    """

    out_bytes_per_second: float
    in_bytes_per_second: float
    latency_seconds: float
    cpu_seconds_per_byte: float
    delay_seconds_per_byte: float
    measured_at: float
    place: str
    where: str

    def hidden_bytes(self, seconds: float) -> int:
        """At most so many bytes can leave in the one part of a step of so many seconds and come back in the other."""
        out, back = self.out_bytes_per_second, self.in_bytes_per_second
        return int(seconds * out * back / (out + back))


def measure(
    place: Place,
    where: str,
    *,
    total_bytes: int = TOTAL_BYTES,
    content_bytes: int = CONTENT_BYTES,
    rounds: int = ROUNDS,
    device: torch.device = _HOST,
    clock: Clock = time.perf_counter,
    cpu_clock: Clock = time.process_time,
    now: Clock = time.time,
    work: Callable[[Tensor], object] = torch.neg,
) -> Bandwidth:
    """Move contents to a place and back, and see how long that takes; medians of a few rounds.

    To be called between steps. The random streams are left alone. On ``device`` it takes ``total_bytes`` and two
    contents for as long as it runs; what it moves counts in ``place.traffic``.

    Args:
        place: where to.
        where: what is written down as :attr:`Bandwidth.where`.
        total_bytes: moved in a round, in contents of ``content_bytes``; one content at least.
        content_bytes: size of one content.
        rounds: how often.
        device: where the contents are that leave.
        clock: seconds that pass.
        cpu_clock: processor seconds of this process.
        now: seconds since the epoch.
        work: an operation on a tensor of ``content_bytes``, bound by memory; how long it takes while contents are on
            their way says by how much they hold it up.

    Raises:
        OffloadError: the place is full or closed, cannot be written to or read from, or gives back something else.
    """
    rounds = max(1, rounds)
    tiny, back = _random(TINY_BYTES, device, 0), [_empty(TINY_BYTES, device)]
    trips = [_trip(place, [tiny], back, device, clock, cpu_clock) for _ in range(2 * rounds + 1)]
    latency = median((out + into) / 2 for out, into, _ in trips[1:])  # the first one makes what a place makes once
    count = max(1, total_bytes // content_bytes)
    two = [_random(content_bytes, device, seed) for seed in (1, 2)]
    sources = [two[i % 2] for i in range(count)]
    buffers = [_empty(content_bytes, device) for _ in range(count)]
    outs, ins, cpu = zip(
        *(_trip(place, sources, buffers, device, clock, cpu_clock) for _ in range(rounds)), strict=True
    )
    moved = count * content_bytes
    delay = 0.0
    if device.type == "cpu":
        alone = (median(outs) + median(ins)) / (2 * count)  # of one content
        some = max(1, min(count, int(_DELAY_SECONDS / max(alone, 1e-9))))
        delay = _delay(place, sources[:some], buffers[:some], alone, rounds, clock, work)
    return Bandwidth(
        out_bytes_per_second=moved / max(median(outs), 1e-9),
        in_bytes_per_second=moved / max(median(ins), 1e-9),
        latency_seconds=latency,
        cpu_seconds_per_byte=median(cpu) / (2 * moved),
        delay_seconds_per_byte=delay,
        measured_at=now(),
        place=place.name,
        where=where,
    )


def _trip(
    place: Place, sources: list[Tensor], buffers: list[Tensor], device: torch.device, clock: Clock, cpu_clock: Clock
) -> tuple[float, float, float]:
    """Seconds until all have arrived, until all are back, and of processors; they are compared outside of these."""
    contents = []
    try:
        _settle(device)
        start, cpu = clock(), cpu_clock()
        for source in sources:
            contents.append(place.take(source))
        for content in contents:
            content.finish_out()
        _settle(device)
        there = clock()
        pairs = list(zip(contents, buffers, strict=True))[::-1]  # backward asks for the last one first
        for content, buffer in pairs:
            content.begin_back(buffer)
        for content, _ in pairs:
            content.finish_back()
        _settle(device)
        end, cpu = clock(), cpu_clock() - cpu
    finally:
        for content in contents:
            content.release()
    for source, buffer in zip(sources, buffers, strict=True):
        if not torch.equal(source, buffer):
            raise OffloadError(f"what came back from {place.name!r} is not what was written: it cannot be used.")
        buffer.zero_()  # so that the next round does not find its bytes there
    return there - start, end - there, cpu


def _delay(
    place: Place,
    sources: list[Tensor],
    buffers: list[Tensor],
    seconds: float,
    rounds: int,
    clock: Clock,
    work: Callable[[Tensor], object],
) -> float:
    """By how much ``work`` takes longer for each byte on its way meanwhile; ``seconds``: of one content by itself."""
    operand = torch.ones(sources[0].nbytes // 4)

    def worked(times: int) -> float:
        start = clock()
        for _ in range(times):
            work(operand)
        return clock() - start

    worked(_WARM)
    # Half as long again as the transfers by themselves, which are slower now, so that most of them fall into it.
    times = max(1, min(_MOST_WORK, int(1.5 * seconds * len(sources) / max(worked(_WARM) / _WARM, 1e-9))))
    differences = []
    for _ in range(rounds):
        alone, contents = worked(times), []
        try:
            contents = [place.take(source) for source in sources]
            beside = worked(times)
            for content in contents:
                content.finish_out()
            for content, buffer in zip(contents, buffers, strict=True):
                content.begin_back(buffer)
            beside += worked(times)
            for content in contents:
                content.finish_back()
        finally:
            for content in contents:
                content.release()
        differences.append(beside - alone - worked(times))
    return max(0.0, median(differences)) / (2 * sum(source.nbytes for source in sources))


def _settle(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def _random(count: int, device: torch.device, seed: int) -> Tensor:
    """Bytes that no file system makes smaller."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(256, (count,), dtype=torch.uint8, generator=generator).to(device)


def _empty(count: int, device: torch.device) -> Tensor:
    return torch.zeros(count, dtype=torch.uint8, device=device)  # written to, so that its pages are there


# ---------------------------------------------------------------------- what is known


def key_of_disk(directory: str | os.PathLike[str], checksum: bool) -> str:
    """What a directory's file system is known under on this machine."""
    device = os.stat(directory).st_dev
    return "|".join((socket.gethostname(), "disk", str(device), _source_of(device), "sum" if checksum else "no sum"))


def key_of_host(device: torch.device) -> str:
    """What the way between an accelerator and host memory is known under on this machine."""
    return "|".join((socket.gethostname(), "cpu", device_name(device)))


def device_name(device: torch.device) -> str:
    """Its model, as far as PyTorch tells."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def known(key: str, now: Clock = time.time) -> Bandwidth | None:
    """What was measured, unless that was too long ago; None: nothing."""
    found = _read().get(key)
    return found if found is not None and _is_fresh(found, now()) else None


def remember(key: str, bandwidth: Bandwidth, now: Clock = time.time) -> None:
    """Write it down for the next time, where that can be; what is too old goes."""
    at = now()
    entries = {k: b for k, b in _read().items() if _is_fresh(b, at)} | {key: bandwidth}
    text = json.dumps({"format": _FORMAT, "places": {k: asdict(b) for k, b in entries.items()}}, indent=1)
    path = _file()
    with contextlib.suppress(OSError):  # it is measured again next time
        path.parent.mkdir(parents=True, exist_ok=True)
        # Another process may read it at any time, or write it: each sees a whole file.
        descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=path.name)
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as out:
                out.write(text)
            os.replace(name, path)
        except BaseException:
            os.unlink(name)
            raise


def bandwidth_of(place: Place, key: str, where: str, *, fresh: bool = False, **options: Any) -> Bandwidth:
    """What is known of a place, or else what is measured now and known from then on.

    Args:
        place: where to.
        key: from :func:`key_of_disk` or :func:`key_of_host`.
        where: see :func:`measure`.
        fresh: measure in any case.
        **options: those of :func:`measure`.

    Raises:
        OffloadError: as :func:`measure` does.
    """
    now: Clock = options.get("now", time.time)
    found = None if fresh else known(key, now)
    if found is None:
        found = measure(place, where, **options)
        remember(key, found, now)
    return found


def _file() -> Path:
    return Path(platformdirs.user_cache_dir("lightning-remat")) / "bandwidth.json"


def _read() -> dict[str, Bandwidth]:
    """What can be understood of the file."""
    try:
        content = json.loads(_file().read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(content, dict) or content.get("format") != _FORMAT or not isinstance(content.get("places"), dict):
        return {}
    found = {key: _entry(entry) for key, entry in content["places"].items()}
    return {key: entry for key, entry in found.items() if entry is not None}


def _entry(content: Any) -> Bandwidth | None:
    if not isinstance(content, dict) or content.keys() != {field.name for field in fields(Bandwidth)}:
        return None
    words = [content.pop(name) for name in ("place", "where")]
    if not all(isinstance(word, str) for word in words):
        return None
    for value in content.values():
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value < 0:
            return None
    if not (content["out_bytes_per_second"] and content["in_bytes_per_second"]):
        return None
    return Bandwidth(**content, place=words[0], where=words[1])


def _is_fresh(bandwidth: Bandwidth, now: float) -> bool:
    """A figure from the future is none: a clock was set back."""
    return 0 <= now - bandwidth.measured_at <= LASTS_SECONDS


def _source_of(device: int) -> str:
    """What is mounted: a partition, a share on another machine. ``""`` where that is not known (not Linux)."""
    number = f"{os.major(device)}:{os.minor(device)}"
    try:
        lines = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    for line in lines:
        mount, _, described = line.partition(" - ")
        if mount.split(" ")[2:3] == [number] and len(words := described.split(" ")) > 1:
            return words[1]
    return ""
