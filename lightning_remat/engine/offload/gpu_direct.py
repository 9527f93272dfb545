"""GPUDirect Storage: between a CUDA device and a disk with no host memory in between, if ``kvikio`` is installed.

Not measured yet, and not run on a GPU yet: what is tested is that a stand-in for ``kvikio`` is called as its
documentation says (https://docs.rapids.ai/api/kvikio/stable/). Without ``kvikio`` nothing here has any effect.

Bytes that never pass through the host cannot be hashed there, so a place that checks what it reads does not use this:
it takes ``checksum=False`` as well.
"""

from __future__ import annotations

import importlib
import importlib.util
import threading
from errno import EIO
from typing import Any

from torch import Tensor


def wanted(tensor: Tensor, checksum: bool) -> bool:
    """Whether a tensor's bytes can go this way."""
    return not checksum and tensor.device.type == "cuda" and available()


def available() -> bool:
    """Whether ``kvikio`` is there."""
    try:
        return importlib.util.find_spec("kvikio") is not None
    except ValueError:  # in sys.modules, without a specification
        return True


class DirectFile:
    """A file that is open already, for transfers from and to device memory; from several threads at once.

    Args:
        fileno: its descriptor. The file has no name, so it is opened by that of the descriptor (Linux).
    """

    def __init__(self, fileno: int) -> None:
        self._fileno = fileno
        self._file: Any = None
        self._lock = threading.Lock()

    def write(self, offset: int, tensor: Tensor, ready: Any) -> None:
        """Write all bytes of a flat tensor, once the event ``ready`` has come.

        Raises:
            OSError: fewer were written.
        """
        ready.synchronize()  # what computes them may still be running
        self._check(self._opened().pwrite(tensor, tensor.nbytes, offset).get(), tensor.nbytes, "written")

    def read(self, offset: int, into: Tensor, ready: Any) -> None:
        """Fill all bytes of a flat tensor, once the event ``ready`` has come.

        Raises:
            OSError: fewer were read.
        """
        ready.synchronize()  # what had this memory before may still be running
        self._check(self._opened().pread(into, into.nbytes, offset).get(), into.nbytes, "read")

    def close(self) -> None:
        """Close it here; the descriptor is its owner's. Safe to repeat."""
        with self._lock:
            file, self._file = self._file, None
        if file is not None:
            file.close()

    def _opened(self) -> Any:
        with self._lock:
            if self._file is None:
                kvikio = importlib.import_module("kvikio")
                self._file = kvikio.CuFile(f"/proc/self/fd/{self._fileno}", "r+")
            return self._file

    @staticmethod
    def _check(moved: int, nbytes: int, done: str) -> None:
        if moved != nbytes:
            raise OSError(EIO, f"{moved} of {nbytes} bytes were {done}")
