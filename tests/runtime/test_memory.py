"""`measure_peak` against allocations whose sum is worked out by hand."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
import torch
from torch import distributed
from torch._C._profiler import _ProfilerEvent

from lightning_remat.runtime.memory import Recorder, measure_peak
from tests.helpers import RunIf

KB = 1000


def block(kilobytes: int) -> torch.Tensor:
    return torch.empty(kilobytes * KB, dtype=torch.uint8)


def test_overlapping_lifetimes_are_added_and_released_ones_are_not() -> None:
    """Two live blocks count together; a block taken after one went counts with what is left."""

    def work() -> None:
        a = block(4)  # 4
        b = block(2)  # 6, the peak
        del a  # 2
        c = block(3)  # 5
        del b, c  # 3, then 0

    result = measure_peak(work)

    assert result.peak_bytes == 6 * KB
    assert [live // KB for _, live in result.timeline] == [0, 4, 6, 2, 5, 3, 0]
    assert result.left_bytes == 0


def test_times_never_run_backwards() -> None:
    """The timeline starts at zero and is in order, so that it can be drawn as it is."""
    result = measure_peak(lambda: [block(1) for _ in range(20)])

    seconds = [at for at, _ in result.timeline]
    assert seconds[0] == 0.0
    assert seconds == sorted(seconds)


def test_what_lived_before_is_not_counted() -> None:
    """Neither the bytes of an older tensor nor its release show in the result."""
    older = [block(50)]

    def work() -> None:
        older.clear()
        block(1)

    result = measure_peak(work)

    assert result.peak_bytes == KB
    assert min(live for _, live in result.timeline) == 0


def test_what_an_earlier_measurement_left_is_not_counted() -> None:
    """The CPU's allocator remembers what it handed out under an earlier profile and reports its release."""
    left: list[torch.Tensor] = []
    measure_peak(lambda: left.append(block(50)))

    def work() -> None:
        left.clear()
        block(1)

    assert [live // KB for _, live in measure_peak(work).timeline] == [0, 1, 0]


def test_what_stays_alive_is_left_over() -> None:
    """Memory that outlives the code is in the last entry; a returned value is dropped."""
    kept: list[torch.Tensor] = []

    def work() -> torch.Tensor:
        kept.append(block(7))
        return block(2)

    result = measure_peak(work)

    assert result.peak_bytes == 9 * KB
    assert result.left_bytes == 7 * KB


def test_activations_that_autograd_saves_are_counted() -> None:
    """A chain of `neg` and `exp` keeps each exponential for backward; without autograd only the last links are live."""
    x = torch.zeros(KB // 4, requires_grad=True)  # 1 kB in float32
    links = 10

    def chain() -> torch.Tensor:
        h = x
        for _ in range(links):
            h = h.neg().exp()
        return h

    # At the last exponential: all exponentials, and the negative that the last one is made from.
    assert measure_peak(chain).peak_bytes == (links + 1) * KB
    with torch.no_grad():
        # At any exponential but the first: it, its negative, and the one before, to which `h` still refers.
        assert measure_peak(chain).peak_bytes == 3 * KB


def test_an_error_passes_through_and_the_next_measurement_works() -> None:
    """The profiler is switched off when the code raises."""

    def fail() -> None:
        block(5)
        raise KeyError("on purpose")

    with pytest.raises(KeyError, match="on purpose"):
        measure_peak(fail)
    assert measure_peak(lambda: block(3)).peak_bytes == 3 * KB


def test_an_unknown_device_names_the_supported_ones() -> None:
    """Devices whose allocators are not counted are refused before the code runs."""
    ran: list[bool] = []
    with pytest.raises(ValueError, match=r"device='meta'.*cpu and cuda"):
        measure_peak(lambda: ran.append(True), "meta")
    assert not ran


def test_a_running_profiler_is_not_disturbed() -> None:
    """A second profiler would take the first one's events away, so this is refused."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        with pytest.raises(RuntimeError, match="running already"):
            measure_peak(lambda: block(1))
        block(1)

    assert any(event.name == "aten::empty" for event in profiler.events())


def _names(events: list[_ProfilerEvent]) -> Iterator[str]:
    for event in events:
        yield event.name
        yield from _names(event.children)


@pytest.mark.usefixtures("one_process")
def test_collectives_under_way_do_not_write_into_a_profile_that_has_ended() -> None:
    """Their thread would note their end there, and the process crash now and then: they may not be in it at all."""
    recorder = Recorder()
    recorder.start()
    recorder.mark()
    work = distributed.all_reduce(torch.ones(4), async_op=True)
    recorder.stop()
    work.wait()

    assert recorder.complete
    names = set(_names(recorder._profiler.profiler.kineto_results.experimental_event_tree()))
    assert "c10d::allreduce_" in names  # the call, which ended on this thread
    assert not [name for name in names if name.startswith("gloo")]  # the work, which may not have


def test_what_others_profile_afterwards_is_whole() -> None:
    """Only our own profiles leave out what users name."""
    measure_peak(lambda: block(1))

    theirs = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
    with theirs as profiler, torch.profiler.record_function("mine"):
        block(1)

    assert any(event.name == "mine" for event in profiler.events())


def test_stderr_of_the_code_stays_and_the_profilers_own_lines_do_not(capfd: pytest.CaptureFixture[str]) -> None:
    """The messages of Kineto and of the allocator would break a progress bar."""
    older = [block(1)]

    def work() -> None:
        older.clear()
        sys.stderr.write("mine\n")

    measure_peak(work)
    sys.stderr.flush()

    assert capfd.readouterr().err == "mine\n"


@RunIf(cuda=True)
def test_cuda_counts_its_own_device() -> None:
    """CUDA blocks are rounded up to 512 bytes by the allocator; host memory does not count."""

    def work() -> None:
        block(64)
        a = torch.empty(512 * 10, dtype=torch.uint8, device="cuda")
        b = torch.empty(512 * 4, dtype=torch.uint8, device="cuda")
        del a, b

    result = measure_peak(work, "cuda")

    assert result.peak_bytes == 512 * 14
    assert max(live for _, live in result.timeline) == 512 * 14
