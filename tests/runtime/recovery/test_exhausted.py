"""The error when no plan fits, its figures and its advice; notes on errors that are nobody's to repeat."""

import copy
import pickle
import traceback

import pytest
import torch

from lightning_remat.engine.out_of_memory import is_out_of_memory
from lightning_remat.errors import NoMemoryLeft, RematError
from lightning_remat.runtime.recovery.exhausted import THE_STEP, append_note, exhausted, note_outside, with_note
from lightning_remat.runtime.room import Room

MIB, GIB = 1024**2, 1024**3
CPU = torch.device("cpu")
GPU = torch.device("cuda", 0)
ASKED = torch.OutOfMemoryError(
    "CUDA out of memory. Tried to allocate 512.00 MiB. GPU 0 has a total capacity of 8.00 GiB of which 100.00 MiB "
    "is free. Of the allocated memory 6.00 GiB is allocated by PyTorch, and 1.50 GiB is reserved by PyTorch but "
    "unallocated."
)
PARTS = {"parameters": GIB, "buffers": 0, "gradients": GIB, "optimizer state": 0, "other": 5 * MIB}


def told(error=ASKED, *, device=GPU, parts=PARTS, peak=4 * GIB, tries=("the plan for 6.0 GiB",), batch=32, room=None):
    room = Room(8 * GIB, 2 * GIB, "the device's memory") if room is None else room
    return exhausted(error, device=device, static_parts=parts, plan_peak=peak, tries=tries, batch=batch, room=room)


def test_pytorchs_handlers_and_ours_both_catch_it():
    for kind in (torch.OutOfMemoryError, torch.cuda.OutOfMemoryError, RematError, RuntimeError, NoMemoryLeft):
        with pytest.raises(kind):
            raise told() from ASKED


def test_it_is_the_last_word_and_not_one_more_failure_to_try_again():
    assert not is_out_of_memory(told())
    assert not is_out_of_memory(told(), GPU)


def test_it_travels_between_processes_with_its_figures():
    error = told()
    for other in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(other) is NoMemoryLeft
        assert str(other) == str(error)
        assert vars(other) == vars(error)
    assert vars(pickle.loads(pickle.dumps(NoMemoryLeft("none")))) == vars(NoMemoryLeft("none"))


def test_its_figures():
    error = told(tries=["the plan for 6.0 GiB", "the tightest plan"])
    assert error.asked_bytes == 512 * MIB
    assert error.free_bytes == 2 * GIB
    assert error.held == {"parameters": GIB, "gradients": GIB, "other": 5 * MIB, THE_STEP: 4 * GIB}
    assert error.tries == ("the plan for 6.0 GiB", "the tightest plan")


def test_its_text_says_what_is_needed_there_held_and_tried():
    text = str(told(tries=["the plan for 6.0 GiB", "the tightest plan"]))
    assert "does not fit on cuda:0" in text
    assert "512.0 MiB (536,870,912 bytes) could not be had" in text
    assert "2.0 GiB of 8.0 GiB are free, limited by the device's memory" in text
    assert "needs 4.0 GiB beside the 2.0 GiB that are there between steps" in text
    assert "2.0 GiB (2,147,483,648 bytes) are missing" in text
    assert "What holds memory: the step itself 4.0 GiB, parameters 1.0 GiB, gradients 1.0 GiB, other 5.0 MiB." in text
    assert "What was tried: (1) the plan for 6.0 GiB; (2) the tightest plan." in text
    assert "No batch was skipped: training stops at this one." in text


def test_without_figures_it_says_so_and_still_helps():
    error = told(
        RuntimeError("std::bad_alloc"),
        device=CPU,
        parts={},
        peak=None,
        tries=(),
        batch=None,
        room=Room(None, None, "x"),
    )
    assert (error.asked_bytes, error.free_bytes, error.held, error.tries) == (None, None, {}, ())
    text = str(error)
    assert "The allocator named no figures." in text
    assert "What holds memory: nothing that is known." in text
    assert "What was tried: nothing." in text
    assert "What would help: a smaller batch or shorter sequences" in text


def test_the_room_is_looked_up_if_it_is_not_given():
    error = exhausted(
        RuntimeError("could not create a primitive"), device=CPU, static_parts={}, plan_peak=None, tries=(), batch=1
    )
    assert error.free_bytes is not None
    assert error.free_bytes > 0


def test_a_smaller_batch_by_about_how_much():
    # 2 GiB are free for 4 GiB, all of which grow: half, and a little less since it is an estimate.
    assert "about 15 examples instead of 32" in str(told())
    assert "by about 52 %" in str(told(batch=None))
    # A gradient is made for each parameter, however small the batch: 1 of 3 GiB that grow has room.
    fresh = {**PARTS, "gradients": 0}
    assert "about 10 examples instead of 32" in str(told(parts=fresh))
    assert "shorter sequences, by about 52 % (one example is too large)" in str(told(batch=1))


def test_no_batch_is_advised_where_none_is_small_enough():
    parts = {"parameters": 3 * GIB, "gradients": 0, "optimizer state": 6 * GIB}
    text = str(told(parts=parts))
    assert "smaller batch" not in text
    assert "an optimizer with less state" in text
    assert "sharding over several devices (FSDP, DeepSpeed): 9.0 GiB are there between steps" in text


def test_what_is_static_comes_first_where_it_is_most():
    text = str(told(parts={"parameters": 5 * GIB, "gradients": 5 * GIB, "optimizer state": GIB}))
    assert "What would help: (1) sharding over several devices" in text
    assert "(2) a smaller batch" in text
    assert "less state" not in text  # a tenth of it is not worth another optimizer
    assert "sharding" not in str(told())


def test_one_huge_tensor_is_no_matter_of_optimizer_state() -> None:
    """More is between steps than the plan needs, and yet far less than what one op asked for."""
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")
    parts = {"parameters": 3 << 20, "optimizer state": 6 << 20}
    found = exhausted(error, device=CPU, static_parts=parts, plan_peak=1 << 20, tries=(), batch=None)
    assert "optimizer with less state" not in str(found)
    assert "smaller batch" in str(found)


def test_fragmentation_is_named_on_cuda_where_pytorch_holds_enough_in_pieces(monkeypatch):
    assert "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True" in str(told())
    assert "PyTorch holds 1.5 GiB in pieces" in str(told())
    little = torch.OutOfMemoryError(str(ASKED).replace("and 1.50 GiB is", "and 100.00 MiB is"))
    assert "expandable_segments" not in str(told(little))
    assert "expandable_segments" not in str(told(device=CPU))
    # A library's own text does not say; the allocator can be asked.
    other = RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 6 * GIB)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 4 * GIB)
    assert "PyTorch holds 2.0 GiB in pieces" in str(told(other))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 1 / 0)
    assert "expandable_segments" not in str(told(other))


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        ("the limit on address space (ulimit -v)", "a higher limit: it is the limit on address space (ulimit -v) (now"),
        (
            "the control group /job (memory.max)",
            "a higher limit of the container or job: it is the control group /job (memory.max) (now 3.0 GiB)",
        ),
    ],
)
def test_on_the_cpu_the_limit_that_is_met_is_named(limit, expected):
    text = str(told(device=CPU, room=Room(3 * GIB, GIB, limit)))
    assert expected in text
    assert "a higher limit" not in str(told(device=CPU, room=Room(3 * GIB, GIB, "the machine's memory")))


def test_a_text_with_two_meanings_says_the_other():
    text = str(told(RuntimeError("GET was unable to find an engine to execute this computation"), room=None))
    assert "cuDNN said" in text
    assert "a kind of number, a shape or a driver that cuDNN cannot work with" in text
    assert "if it comes at any batch size, that is it" in text
    assert "is also its word for" not in str(told())


def test_a_note_stays_with_the_same_error():
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.")
    with pytest.raises(torch.OutOfMemoryError) as caught:
        raise with_note(error, note_outside("the optimizer step"))
    assert caught.value is error
    assert is_out_of_memory(error)
    shown = "".join(traceback.format_exception(error))
    assert "out of memory in the optimizer step" in shown


@pytest.mark.parametrize("args", [("first",), ("first", 2), (), (7, "x")])
def test_without_notes_the_text_goes_to_the_end(args):
    error = RuntimeError(*args)
    append_note(error, "one")
    append_note(error, "two")
    assert error.__notes__ == ["one", "two"]
    assert error.args[1:] == args[1:]
    assert str(error.args[0]).endswith("one\ntwo")
    assert str(error.args[0]).startswith(str(args[0]) if args else "one")


def test_a_text_that_grew_is_still_told_from_others():
    error = RuntimeError("could not create a primitive")
    append_note(error, note_outside("validation"))
    assert "validation" in str(error)
    assert is_out_of_memory(error)


@pytest.mark.parametrize("where", ["the optimizer step", "validation", "data loading", "a callback", "my own loop"])
def test_notes_say_where_why_and_what_was_tried(where):
    text = note_outside(where, ["the cache was emptied", "the tightest plan"])
    assert f"out of memory in {where}, which is not run again: " in text
    assert "What was tried: (1) the cache was emptied; (2) the tightest plan." in text
    assert "No batch was skipped." in text
    assert "What was tried" not in note_outside(where)
