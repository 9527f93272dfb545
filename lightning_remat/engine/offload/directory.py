"""The directory of a disk place: which one if none is named, and whether one can work, said before the first step."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterable
from pathlib import Path

import platformdirs

from lightning_remat.errors import ConfigurationError

_MEMORY = frozenset({"tmpfs", "ramfs", "devtmpfs", "hugetlbfs"})

_NETWORK = frozenset(
    (
        *("nfs", "nfs4", "cifs", "smb", "smb2", "smb3", "smbfs", "ncpfs", "afs", "coda", "ceph", "lustre", "gpfs"),
        *("beegfs", "orangefs", "pvfs2", "ocfs2", "gfs2", "glusterfs", "panfs", "wekafs", "juicefs"),
        *("9p", "virtiofs", "vboxsf", "prl_fs"),  # a virtual machine's way to its host
    )
)
"""File systems whose bytes travel; those of most that FUSE serves do, too (all but :data:`_LOCAL_FUSE`)."""

_LOCAL_FUSE = frozenset({"fuseblk", "fuse.ntfs-3g", "fuse.ext2", "fuse.fuse-overlayfs", "fuse.bindfs", "fuse.mergerfs"})

_MOUNTS = Path("/proc/self/mountinfo")


def default_directory() -> Path:
    """Where contents go if no directory is named: the platform's directory for temporary files, if it is on a disk.

    On many Linux systems that one is a ``tmpfs``, which is host memory (and swap): what leaves for "disk" would take
    the memory that it should free. Then it is the user's cache directory (on Linux ``$XDG_CACHE_HOME`` or
    ``~/.cache``, and ``lightning-remat`` therein), which is made if it is not there.
    """
    temporary = Path(tempfile.gettempdir())
    if file_system(temporary) not in _MEMORY:
        return temporary
    cache = platformdirs.user_cache_path("lightning-remat")
    try:
        cache.mkdir(parents=True, exist_ok=True)
    except OSError:
        return temporary  # check_directory says that it is memory
    return cache


def check_directory(path: str | os.PathLike[str]) -> str | None:
    """Whether contents can go to a directory.

    A file is really created and removed there: permission bits say nothing to root, and nothing of a read-only mount.

    Returns:
        A sentence to warn with, if it can be used and that may not be what was meant: it is host memory, or over a
        network. None: nothing to say.

    Raises:
        ConfigurationError: nothing can be written there; it says why, and the ways out.
    """
    path = Path(path)
    if not hasattr(os, "preadv"):
        raise ConfigurationError(
            f"offload={str(path)!r}: this platform lacks what offloading to a disk needs (os.preadv). "
            "Offload to host memory with offload='cpu', or run on Linux."
        )
    try:
        if not path.exists():
            raise _unusable(path, "there is no such directory", "create it")
        if not path.is_dir():
            raise _unusable(path, "that is a file and not a directory", "name the directory that it is in")
        with tempfile.TemporaryFile(dir=path, prefix="lightning-remat-", buffering=0):
            pass
        room = os.statvfs(path)
    except OSError as error:
        raise _unusable(
            path, f"nothing can be written there ({error.strerror or error})", "make it writable"
        ) from error
    if room.f_bavail == 0:
        raise _unusable(path, "its file system is full", "free some space")
    kind = file_system(path)
    if kind in _MEMORY:
        return (
            f"offload={str(path)!r} is on a {kind}, which is host memory and not a disk: what leaves the device takes "
            "as much of it. Name a directory on a disk; with an accelerator, offload='cpu' is faster, and counts "
            "what it takes."
        )
    if kind in _NETWORK or (kind is not None and kind.startswith("fuse") and kind not in _LOCAL_FUSE):
        return (
            f"offload={str(path)!r} is on a network file system ({kind}): every step moves its activations over the "
            "network, there and back. A directory on a local disk is usually much faster."
        )
    return None


def _unusable(path: Path, reason: str, way_out: str) -> ConfigurationError:
    return ConfigurationError(
        f"offload={str(path)!r}: {reason}. Either {way_out}, name another directory (offload='/some/directory'; "
        "offload='disk' takes the one for temporary files), or, with an accelerator, offload to host memory: "
        "offload='cpu'."
    )


def file_system(path: str | os.PathLike[str]) -> str | None:
    """Type of the file system that a path is on, such as ``"ext4"``; None: the platform does not say (not Linux)."""
    try:
        # Names of mount points are bytes, and need not be UTF-8.
        text = _MOUNTS.read_text(encoding="utf-8", errors="surrogateescape")
        return file_system_in(text.splitlines(), os.path.realpath(path))
    except OSError:
        return None


def file_system_in(lines: Iterable[str], path: str) -> str | None:
    """The same from the lines of a ``mountinfo`` (its format: ``man 5 proc_pid_mountinfo``).

    Args:
        lines: one mount each, in the order in which they were made.
        path: absolute, with no symbolic links in it.
    """
    best, kind = "", None
    for line in lines:
        mount, dash, rest = line.partition(" - ")
        fields, described = mount.split(" "), rest.split(" ")
        if not dash or len(fields) < 5:
            continue
        point = _unescaped(fields[4])
        inside = path == point or path.startswith(point.rstrip("/") + "/")
        # Of several mounts on one point, the last one is on top.
        if inside and len(point) >= len(best):
            best, kind = point, described[0]
    return kind


def _unescaped(text: str) -> str:
    """Blanks, tabs, newlines and backslashes stand there as three octal digits."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)
