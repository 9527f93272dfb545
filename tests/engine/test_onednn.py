"""oneDNN after it ran out of memory once, in a process of its own: the harm is done for good."""

import os
import subprocess
import sys
import textwrap

import pytest
import torch

from lightning_remat.engine.onednn import failed_in_onednn, kernels_made

aten = torch.ops.aten


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the limit is set as Linux has it")
def test_an_op_whose_kernel_could_not_be_made_runs_after_a_fresh_thread_has_made_it(tmp_path):
    code = """
    import resource, torch
    from lightning_remat.engine.onednn import failed_in_onednn, kernels_made
    torch.set_num_threads(1)
    conv = torch.ops.aten.convolution.default
    def args(size):
        torch.manual_seed(size)
        image, weight = torch.randn(4, 64, size, size), torch.randn(64, 64, 3, 3, requires_grad=True)
        return image, weight, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1
    first, second = args(16), args(24)
    spare = [torch.empty(2**14) for _ in range(100)]  # results fit into what these leave behind
    del spare
    failed = None
    for pages in (30, 60, 120):
        used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + pages * 4096, -1))
        try:
            conv(*first)
        except RuntimeError as error:
            failed = error
        resource.setrlimit(resource.RLIMIT_AS, (-1, -1))
        if failed is not None and failed_in_onednn(failed):
            break
    print("failed in oneDNN:", failed is not None and failed_in_onednn(failed))
    for call in (first, second):
        try:
            conv(*call)
            print("again: ran")
        except RuntimeError as error:
            assert failed_in_onednn(error), error
            print("again: failed")
        assert kernels_made(conv, call)
        result = conv(*call)
        assert result.grad_fn is not None
        torch.save(result.detach(), f"{call[0].shape[-1]}.pt")
    """
    out = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([os.getcwd(), *sys.path])},
    )
    assert out.returncode == 0, out.stdout + out.stderr
    for size in (16, 24):
        torch.manual_seed(size)
        image, weight = torch.randn(4, 64, size, size), torch.randn(64, 64, 3, 3)
        plain = torch.nn.functional.conv2d(image, weight, padding=1)
        assert torch.equal(torch.load(tmp_path / f"{size}.pt"), plain)
    print(out.stdout)  # whether it still is as the module says


def test_the_op_runs_with_the_callers_threads_and_leaves_nothing_behind():
    x = torch.randn(3, 3, requires_grad=True)
    seen = []

    class Op:
        _schema = aten.mm.default._schema

        def __call__(self, *args):
            seen.append((torch.get_num_threads(), torch.is_grad_enabled(), [a.requires_grad for a in args]))
            return aten.mm.default(*args)

    with torch.no_grad():
        assert kernels_made(Op(), (x, x))
    assert kernels_made(Op(), (x, x))
    assert seen == [(torch.get_num_threads(), False, [False, False]), (torch.get_num_threads(), True, [False, False])]
    assert x.grad is None


def test_an_op_that_writes_or_fails_is_not_made():
    x = torch.ones(2, 2)
    assert not kernels_made(aten.add_.Tensor, (x, x))
    assert torch.equal(x, torch.ones(2, 2))
    assert not kernels_made(aten.mm.out, (x, x), {"out": x})
    assert not kernels_made(lambda: None)
    assert not kernels_made(aten.mm.default, (x, torch.ones(3, 3)))
    assert kernels_made(aten.mm.default, (x, x))


def test_only_onednns_own_text_asks_for_it():
    assert failed_in_onednn(RuntimeError("could not create a primitive"))
    assert not failed_in_onednn(RuntimeError("std::bad_alloc"))
    assert not failed_in_onednn(MemoryError())
    assert not failed_in_onednn(ValueError("could not create a primitive"))
