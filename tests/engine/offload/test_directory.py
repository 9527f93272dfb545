"""What is said about a directory before the first step."""

import errno
import os
import tempfile

import pytest

from lightning_remat.engine.offload import directory
from lightning_remat.engine.offload.directory import check_directory, default_directory, file_system, file_system_in
from lightning_remat.errors import ConfigurationError

MOUNTS = r"""22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw
23 22 0:21 / /proc rw,nosuid shared:2 - proc proc rw
30 22 0:30 / /data rw shared:3 master:1 - nfs4 server:/data rw,vers=4.2
31 30 0:31 / /data/fast rw - xfs /dev/nvme0n1 rw
32 22 0:32 / /mnt/a\040b rw - fuse.sshfs user@host:/ rw
33 22 0:33 / /mnt/back\134slash rw - cifs //host/share rw
34 22 0:34 / /twice rw - ext4 /dev/vdb rw
35 34 0:35 / /twice rw - tmpfs tmpfs rw
this line is none
""".splitlines()


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/", "ext4"),
        ("/home/user", "ext4"),
        ("/data", "nfs4"),
        ("/data/set", "nfs4"),
        ("/database", "ext4"),
        ("/data/fast", "xfs"),
        ("/data/fast/x", "xfs"),
        ("/data/faster", "nfs4"),
        ("/mnt/a b/c", "fuse.sshfs"),
        ("/mnt/back\\slash", "cifs"),
        ("/twice/x", "tmpfs"),
    ],
)
def test_the_longest_mount_point_counts(path, kind):
    assert file_system_in(MOUNTS, path) == kind


def test_without_mounts_nothing_is_known(monkeypatch, tmp_path):
    assert file_system_in([], "/x") is None
    monkeypatch.setattr(directory, "_MOUNTS", tmp_path / "not-there")
    assert file_system(tmp_path) is None
    assert check_directory(tmp_path) is None


def on(monkeypatch, kind):
    monkeypatch.setattr(directory, "file_system", lambda path: kind)


@pytest.mark.parametrize("kind", ["ext4", "xfs", "btrfs", "overlay", "fuseblk", None])
def test_a_local_disk_is_nothing_to_mention(monkeypatch, tmp_path, kind):
    on(monkeypatch, kind)
    assert check_directory(tmp_path) is None
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["nfs", "nfs4", "cifs", "smb3", "fuse.sshfs", "fuse.s3fs", "9p", "ceph", "lustre"])
def test_a_network_is_warned_of(monkeypatch, tmp_path, kind):
    on(monkeypatch, kind)
    assert f"network file system ({kind})" in check_directory(str(tmp_path))


@pytest.mark.parametrize("kind", ["tmpfs", "ramfs"])
def test_memory_is_warned_of(monkeypatch, tmp_path, kind):
    on(monkeypatch, kind)
    assert "host memory and not a disk" in check_directory(tmp_path)


def test_a_real_directory(tmp_path):
    check_directory(tmp_path)  # on whatever this machine has
    assert list(tmp_path.iterdir()) == []


def test_not_there(tmp_path):
    with pytest.raises(ConfigurationError, match=r"offload='.*no': there is no such directory.*create it.*'cpu'"):
        check_directory(tmp_path / "no")


def test_a_file(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigurationError, match="that is a file and not a directory"):
        check_directory(tmp_path / "file")
    with pytest.raises(ConfigurationError, match=r"there is no such directory|Not a directory"):
        check_directory(tmp_path / "file" / "in")


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS, errno.ENOSPC])
def test_not_writable(monkeypatch, tmp_path, number):
    # Permission bits would not stop root, who may be running this.
    def refused(*args, **kwargs):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(tempfile, "TemporaryFile", refused)
    with pytest.raises(ConfigurationError, match=f"nothing can be written there .{os.strerror(number)}") as caught:
        check_directory(tmp_path)
    assert isinstance(caught.value.__cause__, OSError)


def test_a_directory_of_the_kernel_takes_no_files():
    with pytest.raises(ConfigurationError, match="nothing can be written there"):
        check_directory("/proc/self")


def test_full(monkeypatch, tmp_path):
    room = os.statvfs(tmp_path)
    full = os.statvfs_result((*room[:4], 0, *room[5:]))
    monkeypatch.setattr(os, "statvfs", lambda path: full)
    with pytest.raises(ConfigurationError, match="its file system is full"):
        check_directory(tmp_path)


def test_without_what_it_takes(monkeypatch, tmp_path):
    monkeypatch.delattr(os, "preadv")
    with pytest.raises(ConfigurationError, match="this platform lacks"):
        check_directory(tmp_path)


def test_the_directory_for_temporary_files_if_it_is_on_a_disk(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    on(monkeypatch, "ext4")
    assert default_directory() == tmp_path


def test_the_cache_directory_if_temporary_files_are_in_memory(monkeypatch, tmp_path):
    temporary, cache = tmp_path / "tmp", tmp_path / "cache" / "deep"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    monkeypatch.setattr(directory.platformdirs, "user_cache_path", lambda name: cache / name)
    monkeypatch.setattr(directory, "file_system", lambda path: "tmpfs" if path == temporary else "ext4")
    assert default_directory() == cache / "lightning-remat"
    assert default_directory().is_dir()


def test_no_cache_directory_either(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(directory.platformdirs, "user_cache_path", lambda name: tmp_path / "file" / name)
    on(monkeypatch, "tmpfs")
    assert default_directory() == tmp_path
