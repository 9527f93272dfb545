"""Which errors mean that memory has run out, one test per row of the table, and which only sound like it."""

import errno
import pickle
import re
import subprocess
import sys
import textwrap

import numpy as np
import pytest
import torch

from lightning_remat.engine.out_of_memory import TABLE, bytes_asked, is_out_of_memory, row_of
from lightning_remat.errors import ReplayError

MIB = 1024**2
GIB = 1024**3
GPU = torch.device("cuda", 0)
CPU = torch.device("cpu")
ENFORCE = "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: "

# The texts as they came: from the installed PyTorch where a CPU is enough, else from users' reports or its source.
REAL = [
    (
        torch.OutOfMemoryError(
            "CUDA out of memory. Tried to allocate 238.17 GiB. GPU 0 has a total capacity of 79.11 GiB of which 66.51 "
            "GiB is free. Including non-PyTorch memory, this process has 0 bytes memory in use."
        ),
        "the accelerator's allocator",
        int(238.17 * GIB),
    ),
    (
        torch.OutOfMemoryError(  # pytorch/pytorch#175431
            "HIP out of memory. Tried to allocate 2.00 MiB. GPU 7 has a total capacity of 287.98 GiB of which 203.49 "
            "GiB is free."
        ),
        "the accelerator's allocator",
        2 * MIB,
    ),
    (
        torch.OutOfMemoryError(  # intel/torch-xpu-ops#3011
            "XPU out of memory. Tried to allocate 4.66 GiB. GPU 0 has a total capacity of 5.65 GiB"
        ),
        "the accelerator's allocator",
        int(4.66 * GIB),
    ),
    (
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate more than 1EB memory."),
        "the accelerator's allocator",
        None,
    ),
    (torch.OutOfMemoryError("Not enough memory for workspace!"), "the accelerator's allocator", None),
    (
        RuntimeError("CUDA out of memory. Tried to allocate 2.26 GiB (GPU 0; 6.00 GiB total capacity)"),
        "the accelerator's allocator",
        int(2.26 * GIB),
    ),
    (
        RuntimeError(  # pytorch/pytorch#152351
            "MPS backend out of memory (MPS allocated: 11.14 GB, other allocations: 6.65 GB, max allowed: 18.13 GB). "
            "Tried to allocate 375.40 MB on private pool. Use PYTORCH_MPS_HIGH_WATERMARK_RATIO=0.0 to disable it"
        ),
        "MPS's allocator",
        int(375.40 * MIB),
    ),
    (
        RuntimeError(ENFORCE + "you tried to allocate 4294967296 bytes. Error code 12 (Cannot allocate memory)"),
        "the CPU's allocator",
        4294967296,
    ),
    (
        RuntimeError(  # Windows: lllyasviel/Fooocus#237, Comfy-Org/Nvidia_RTX_Nodes_ComfyUI#13
            r"[enforce fail at ..\c10\core\impl\alloc_cpu.cpp:72] data. DefaultCPUAllocator: not enough memory: "
            "you tried to allocate 26214400 bytes."
        ),
        "the CPU's allocator",
        26214400,
    ),
    (MemoryError(), "Python", None),
    (MemoryError("std::bad_alloc"), "Python", None),  # as pybind11 translates it
    (RuntimeError("std::bad_alloc"), "C++", None),  # as PyTorch does
    (RuntimeError("could not create a primitive"), "oneDNN", None),
    (RuntimeError("MKL FFT error: Intel oneMKL DFTI ERROR: Not enough memory to allocate"), "MKL", None),
    (
        torch.AcceleratorError(
            "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported at some other API call, so "
            "the stacktrace below might be incorrect."
        ),
        "CUDA",
        None,
    ),
    (RuntimeError("HIP error: out of memory"), "CUDA", None),
    (RuntimeError("CUDA driver error: out of memory"), "CUDA", None),  # unslothai/unsloth#2401
    (RuntimeError("Triton Error [CUDA]: out of memory"), "Triton", None),
    (
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        "cuBLAS",
        None,
    ),
    (
        RuntimeError("CUDA error: HIPBLAS_STATUS_ALLOC_FAILED when calling `hipblasCreate(handle)`"),
        "cuBLAS",
        None,
    ),
    (
        RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"),
        "cuBLAS",
        None,
    ),
    (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), "cuDNN", None),
    (RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"), "cuDNN", None),
    (RuntimeError("Unable to find a valid cuDNN algorithm to run convolution"), "cuDNN", None),
    (RuntimeError("GET was unable to find an engine to execute this computation"), "cuDNN", None),
    (RuntimeError("FIND was unable to find an engine to execute this computation"), "cuDNN", None),
    (
        RuntimeError("cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDnCreate(handle)`"),
        "cuSOLVER",
        None,
    ),
    (
        RuntimeError("cusolver error: CUSOLVER_STATUS_INTERNAL_ERROR, when calling `cusolverDnCreate(handle)`"),
        "cuSOLVER",
        None,
    ),
    (
        RuntimeError(  # rusty1s/pytorch_sparse#314
            "CUDA error: insufficient resources when calling `cusparseSpGEMM_workEstimation( handle, opA, opB, &alpha, "
            "matA, matB, &beta, matC, computeType, CUSPARSE_SPGEMM_DEFAULT, spgemmDesc, &bufferSize1, dBuffer1)`"
        ),
        "cuSPARSE",
        None,
    ),
    (RuntimeError("cuFFT error: CUFFT_ALLOC_FAILED"), "cuFFT", None),  # pytorch/pytorch#6511
    (RuntimeError("miopenStatusAllocFailed"), "MIOpen", None),
    (
        RuntimeError("level_zero backend failed with error: 39 (UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY)"),
        "the XPU's driver",
        None,
    ),
    (
        RuntimeError(  # open-edge-platform/physical-ai-studio#440
            "Enqueue process failed.\nlevel_zero backend failed with error: 39 (UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY)"
        ),
        "the XPU's driver",
        None,
    ),
    (
        RuntimeError("level_zero backend failed with error: 38 (UR_RESULT_ERROR_OUT_OF_HOST_MEMORY)"),
        "the XPU's driver",
        None,
    ),
    (
        RuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 14285187448 bytes."),
        "XLA",
        14285187448,
    ),
    (
        RuntimeError(  # pytorch/xla#3532
            "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 29.80G of 7.98G hbm. Exceeded hbm "
            "capacity by 21.82G."
        ),
        "XLA",
        None,
    ),
    (
        RuntimeError(  # pytorch/xla#1735
            "Resource exhausted: From /job:tpu_worker/replica:0/task:0:\nAttempting to reserve 3.95G at the bottom of "
            "memory. That was not possible. There are 1.92G free, 0B reserved, and 1.92G reservable."
        ),
        "XLA",
        int(3.95 * GIB),
    ),
]


@pytest.mark.parametrize(("error", "source", "asked"), REAL)
def test_a_want_of_memory_is_told_with_its_source_and_size(error, source, asked):
    row = row_of(error)
    assert row is not None
    assert row.source == source
    assert is_out_of_memory(error)
    assert bytes_asked(error) == asked


def test_every_row_of_the_table_is_met_by_a_real_text():
    met = {row_of(error) for error, _, _ in REAL}
    assert [row for row in TABLE if row not in met] == []


@pytest.mark.parametrize("row", TABLE)
def test_rows_are_of_types_that_are_looked_at(row):
    assert issubclass(row.kind, (RuntimeError, MemoryError))
    assert row.pattern or row.kind is not RuntimeError
    re.compile(row.pattern)


NOT = [
    ValueError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    AssertionError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes."),
    KeyError("out of memory"),
    RuntimeError("the memory bank is full: out of memory slots"),
    RuntimeError("out of memory"),
    RuntimeError("could not create a primitive descriptor for the matmul primitive. Run workload with environment ..."),
    RuntimeError("could not create a primitive for my own scene graph"),
    RuntimeError("could not execute a primitive"),
    RuntimeError("Storage size calculation overflowed with sizes=[4611686018427387904]"),
    RuntimeError("Trying to create tensor with negative dimension -1: [-1]"),
    RuntimeError("canUse32BitIndexMath(input) INTERNAL ASSERT FAILED: input tensor must fit into 32-bit index math"),
    RuntimeError("MKL FFT error: Intel oneMKL DFTI ERROR: Inconsistent configuration parameters"),
    torch.AcceleratorError("CUDA error: an illegal memory access was encountered"),
    torch.AcceleratorError("CUDA error: device-side assert triggered"),
    RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasSgemm( handle, opa, opb, m, n, k)`"),
    RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm( handle, opa, opb, m, n, k)`"),
    RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear if you passed in a ..."),
    RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR"),
    RuntimeError("cuFFT error: CUFFT_INTERNAL_ERROR"),
    RuntimeError("cusolver error: CUSOLVER_STATUS_INTERNAL_ERROR, when calling `cusolverDnXsyevd( handle, params)`"),
    RuntimeError("level_zero backend failed with error: 40 (UR_RESULT_ERROR_OUT_OF_RESOURCES)"),
    RuntimeError("level_zero backend failed with error: 20 (UR_RESULT_ERROR_DEVICE_LOST)"),
    RuntimeError("Invalid buffer size: 19.45 GB"),
    RuntimeError(
        "Bad StatusOr access: RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory "
        "space vmem."
    ),
    RuntimeError("RESOURCE_EXHAUSTED: Received message larger than max (5000000 vs. 4194304)"),
    torch.distributed.DistBackendError(
        "NCCL error in: NCCLUtils.hpp:275, unhandled cuda error\nncclUnhandledCudaError: Call to CUDA function "
        "failed.\nLast error:\nCuda failure 2 'out of memory'"
    ),
    RuntimeError(
        "DataLoader worker (pid 4242) is killed by signal: Bus error. It is possible that dataloader's workers are "
        "out of shared memory. Please try to raise your shared memory limit."
    ),
    RuntimeError("Pin memory thread exited unexpectedly"),
    RuntimeError(
        "Caught RuntimeError in DataLoader worker process 0.\nOriginal Traceback (most recent call last):\n"
        "RuntimeError: " + ENFORCE + "you tried to allocate 8 bytes."
    ),
    MemoryError("Caught MemoryError in DataLoader worker process 0.\nOriginal Traceback (most recent call last):\n"),
    OSError(errno.ENOSPC, "No space left on device"),
    OSError(errno.ENOMEM, "Cannot allocate memory"),
    pickle.PicklingError("Can't pickle <function f>: out of memory"),
    ReplayError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    KeyboardInterrupt("out of memory"),
]


@pytest.mark.parametrize("error", NOT)
def test_what_only_sounds_like_it_is_not(error):
    assert not is_out_of_memory(error)
    assert row_of(error) is None


def test_an_error_raised_from_one_or_quoting_one_is_what_its_author_made_of_it():
    oom = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    def step():
        try:
            raise oom
        except torch.OutOfMemoryError as error:
            raise RuntimeError(f"could not embed the batch: {error}") from error

    with pytest.raises(RuntimeError) as caught:
        step()
    assert caught.value.__cause__ is oom
    assert not is_out_of_memory(caught.value)


def test_the_hosts_memory_is_not_the_accelerators():
    host = [RuntimeError(ENFORCE + "you tried to allocate 8 bytes."), MemoryError(), RuntimeError("std::bad_alloc")]
    for error in host:
        assert is_out_of_memory(error)
        assert is_out_of_memory(error, CPU)
        assert is_out_of_memory(error, torch.device("mps"))
        assert not is_out_of_memory(error, GPU)
    for device in (None, CPU, GPU):
        assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory."), device)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("tried to allocate 1 bytes", 1),
        ("tried to allocate 1,024.50 MiB.", int(1024.5 * MIB)),
        ("you tried to allocate 1,234,567 bytes.", 1234567),
        ("Tried to allocate 512 KiB", 512 * 1024),
        ("Tried to allocate 0 bytes", 0),
        ("Unable to allocate 1.50 TiB for an array with shape (3,)", int(1.5 * 1024**4)),
        ("tried to allocate more than that", None),
        ("tried to allocate 12 monkeys", None),
        ("", None),
    ],
)
def test_sizes_are_read_in_every_unit(text, size):
    assert bytes_asked(RuntimeError(text)) == size


def test_an_error_that_cannot_be_printed_is_no_want_of_memory():
    class Mute(RuntimeError):
        def __str__(self):
            raise TypeError

    assert not is_out_of_memory(Mute())
    assert bytes_asked(Mute()) is None


def test_numpys_own():
    with pytest.raises(MemoryError) as caught:
        np.zeros(2**58, dtype=np.uint8)
    assert is_out_of_memory(caught.value)
    assert bytes_asked(caught.value) == 2**58


def test_pytorchs_own_allocator_also_inside_torchscript():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**58, dtype=torch.uint8)
    assert is_out_of_memory(caught.value, CPU)
    assert bytes_asked(caught.value) == 2**58
    scripted = RuntimeError(
        "The following operation failed in the TorchScript interpreter.\nTraceback of TorchScript (most recent call "
        'last):\n  File "model.py", line 35, in forward\n    return torch.empty(n)\n           ~~~~~~~~~~~ <--- HERE\n'
        f"RuntimeError: {caught.value}"
    )
    assert is_out_of_memory(scripted)
    assert bytes_asked(scripted) == 2**58


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the limit is set as Linux has it")
def test_what_the_installed_libraries_really_say_under_a_limit():
    """Kernels that allocate by themselves, in a process whose address space is nearly used up."""
    code = """
    import resource, torch
    from lightning_remat.engine.out_of_memory import is_out_of_memory, row_of
    torch.set_num_threads(1)
    x = torch.randn(2**20)
    square = torch.ones(2048, 2048, dtype=torch.bfloat16)
    made = {}
    def under(limit, name, op):
        used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + limit, -1))
        try:
            op()
        except Exception as error:
            made[name] = error
        resource.setrlimit(resource.RLIMIT_AS, (-1, -1))
    under(2**26, "empty", lambda: torch.empty(2**27))
    under(2**24, "python", lambda: bytearray(2**25))
    under(2**22, "topk", lambda: torch.topk(x, 2**19))
    under(2**24, "matmul", lambda: square @ square)
    for name, error in made.items():
        assert is_out_of_memory(error), (name, error)
        print(name, "|", row_of(error).source)
    """
    out = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=False)
    assert out.returncode == 0, out.stderr
    assert "empty | the CPU's allocator" in out.stdout
    assert "python | Python" in out.stdout
