"""What is out of memory, and what only sounds like it.

PyTorch has a class of exceptions for the allocators of accelerators and for nothing else: the CPU's allocator, and
every library that allocates for itself, raise a plain ``RuntimeError`` whose text has to be read. :data:`TABLE` holds
those texts. They are compared from the first character on, so that an error of the user's own that quotes one of them,
or that was raised ``from`` one, is what its author made of it.

Left out on purpose:

- ``CUDNN_STATUS_INTERNAL_ERROR``, ``CUDNN_STATUS_NOT_INITIALIZED`` and ``CUFFT_INTERNAL_ERROR`` have been seen for want
  of memory, but more often for versions that do not go together (pytorch/pytorch#81620, #119420, #89556).
- oneDNN's "could not execute a primitive" and "could not create a memory object": never seen for want of memory.
- ``UR_RESULT_ERROR_OUT_OF_RESOURCES``: after it an Intel GPU's context is broken, and no retry can help
  (intel/torch-xpu-ops#1324, pytorch/pytorch#177714).
- NCCL, whatever its reason: the communicator is broken, and one rank that repeats a step alone hangs the others.
- MPS's ``Invalid buffer size``, XLA's memory space ``vmem``: one tensor or kernel is too large, however much is free.
- What other processes ran out of (workers of a ``DataLoader``), and ``OSError``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch

from lightning_remat.errors import RematError


@dataclass(frozen=True)
class Row:
    """One way in which a want of memory is told.

    Attributes:
        source: who tells it, for messages.
        pattern: what the text begins with, as a regular expression; ``""`` if the type says it all.
        kind: type of the exception.
        host: it is the host's memory that has run out, not an accelerator's.
        otherwise: what else the same text can mean, for messages; ``""`` if nothing.
    """

    source: str
    pattern: str
    kind: type[BaseException] = RuntimeError
    host: bool = False
    otherwise: str = ""

    def fits(self, error: BaseException, text: str) -> bool:
        """Whether this is what ``error`` says; ``text`` is what to read of it."""
        return isinstance(error, self.kind) and re.match(self.pattern, text, re.DOTALL) is not None


_CUDNN_OTHERWISE = "a kind of number, a shape or a driver that cuDNN cannot work with"

TABLE = (
    # CUDA, HIP and XPU: "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of ...".
    Row("the accelerator's allocator", "", torch.OutOfMemoryError),
    # The same, from extensions that do not use that class.
    Row("the accelerator's allocator", r"(CUDA|HIP|XPU) out of memory\. Tried to allocate "),
    Row("MPS's allocator", r"MPS backend out of memory "),
    # c10/core/impl/alloc_cpu.cpp: "can't allocate" on Linux and macOS, "not enough" on Windows.
    Row(
        "the CPU's allocator",
        r"(\[enforce fail at [^\]]*\] [^.]{0,40}\. )?DefaultCPUAllocator: (can't allocate|not enough) memory: ",
        host=True,
    ),
    # Python's objects, and NumPy's arrays by a subclass.
    Row("Python", "", MemoryError, host=True),
    # C++'s containers inside a kernel (topk and svd were seen): this is the whole text.
    Row("C++", r"std::bad_alloc\s*(\n|$)", host=True),
    # oneDNN's status is dropped on the way. (With "descriptor for ..." behind it the text means an unsupported
    # combination.) pytorch/pytorch#143651 is the other reason. See engine/onednn.py for what it leaves behind.
    Row(
        "oneDNN",
        r"could not create a primitive\s*(\n|$)",
        host=True,
        otherwise="a process that may not make memory executable",
    ),
    Row("MKL", r"MKL FFT error: Intel oneMKL DFTI ERROR: Not enough memory", host=True),
    # cudaErrorMemoryAllocation, of whatever call; "driver": with expandable segments. torch.AcceleratorError is a
    # RuntimeError.
    Row("CUDA", r"(CUDA|HIP)( driver)? error: out of memory"),
    Row("Triton", r"Triton Error \[(CUDA|HIP)\]: out of memory"),
    Row("cuBLAS", r"CUDA error: (CU|HIP)BLAS_STATUS_ALLOC_FAILED when calling "),
    # There is no room for the workspace of a handle. Of other calls than this one, the status is a mistake.
    Row(
        "cuBLAS",
        r"CUDA error: (CU|HIP)BLAS_STATUS_NOT_INITIALIZED when calling `(cu|hip)blas(Lt)?Create\(",
        otherwise="an earlier failure on the device, such as an index out of range",
    ),
    Row("cuDNN", r"cuDNN error: CUDNN_STATUS_(ALLOC_FAILED|INTERNAL_ERROR_(DEVICE|HOST)_ALLOCATION_FAILED)"),
    # All algorithms were tried, and what each of them ran into was swallowed: often, that there was no room for its
    # workspace. The second text is that of cuDNN's newer interface, FIND with cudnn.benchmark.
    Row("cuDNN", r"Unable to find a valid cuDNN algorithm to run convolution", otherwise=_CUDNN_OTHERWISE),
    Row("cuDNN", r"(FIND|GET) was unable to find an engine to execute this", otherwise=_CUDNN_OTHERWISE),
    Row("cuSOLVER", r"cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling "),
    Row(
        "cuSOLVER",
        r"cusolver error: CUSOLVER_STATUS_(INTERNAL_ERROR|NOT_INITIALIZED), when calling `cusolverDnCreate\(",
        otherwise="an earlier failure on the device",
    ),
    Row("cuSPARSE", r"CUDA error: insufficient resources when calling `?cusparse"),
    Row("cuFFT", r"cuFFT error: CUFFT_ALLOC_FAILED"),
    Row("MIOpen", r"miopenStatusAllocFailed"),
    # SYCL's words before the code have changed over time. The driver says HOST also when the device is full.
    Row(
        "the XPU's driver",
        r"([^\n]{0,100}\n)?(\w+ backend failed|Native API failed)\b.{0,60}"
        r"\(UR_RESULT_ERROR_OUT_OF_(DEVICE|HOST)_MEMORY\)",
    ),
    Row(
        "XLA",
        r"(?i:(Bad StatusOr access: )?resource[_ ]exhausted: .*?"
        r"(out of memory (while trying to allocate|in memory space hbm)|attempting to (allocate|reserve) ))",
    ),
)
"""The first row that fits holds."""

_ELSEWHERE = re.compile(r"Caught \w+ in (DataLoader worker process|pin memory thread)")
_SCRIPTED = re.compile(r"The following operation failed in the TorchScript interpreter\..*\n\w*Error: ", re.DOTALL)

# "Tried to allocate" CUDA, HIP, XPU, MPS and the CPU; "Unable to allocate" NumPy; the others XLA.
_ASKED = re.compile(
    r"\b(?:tried|trying|unable|attempting) to (?:allocate|reserve) (\d[\d,]*\.?\d*) ?(?:([kmgtpe])(?:i?b)?|b|bytes?)\b",
    re.IGNORECASE,
)
_POWERS = {letter: 1024**power for power, letter in enumerate("kmgtpe", start=1)}
_OF_THE_HOST = ("cpu", "mps")


def row_of(error: BaseException) -> Row | None:
    """What an error says of memory; None: nothing, or nothing that can be helped here.

    An error of ours is never one: :class:`~lightning_remat.errors.NoMemoryLeft` says that all has been tried. Nor is
    one from another process, whose memory is not ours to free.
    """
    if isinstance(error, RematError) or not isinstance(error, (RuntimeError, MemoryError)):
        return None
    text = _text(error)
    if _ELSEWHERE.match(text) is not None:
        return None
    return next((row for row in TABLE if row.fits(error, text)), None)


def is_out_of_memory(error: BaseException, device: torch.device | None = None) -> bool:
    """Whether an exception says that memory could not be had, in a way that freeing some may help.

    Args:
        error: the exception itself; what it was raised from, or during, is not looked at.
        device: where training runs: an accelerator with memory of its own is not helped when it is the host's that has
            run out. None: any memory.
    """
    row = row_of(error)
    return row is not None and (not row.host or device is None or device.type in _OF_THE_HOST)


def bytes_asked(error: BaseException) -> int | None:
    """How many bytes could not be had, as far as the error says.

    Whoever writes MB or G in such a text divides by powers of 1024 all the same (MPS, XLA).
    """
    found = _ASKED.search(_text(error))
    if found is None:
        return None
    count = float(found[1].replace(",", ""))
    return int(count if found[2] is None else count * _POWERS[found[2].lower()])


def _text(error: BaseException) -> str:
    """What an error says; inside a TorchScript function, what was said there."""
    try:
        text = str(error)
    except Exception:  # a class of the user's own may fail at this, and its error must still get through
        return ""
    scripted = _SCRIPTED.match(text)
    return text if scripted is None else text[scripted.end() :]
