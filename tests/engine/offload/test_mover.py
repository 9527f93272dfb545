"""When contents leave and come back: the window, reading ahead, and what happens if something does not work."""

from __future__ import annotations

from weakref import ref as weakref

import pytest
import torch
from torch import Tensor

from lightning_remat.engine.offload.moved import Moved, fetch_op
from lightning_remat.engine.offload.mover import LEAST_WINDOW, Mover
from lightning_remat.engine.replay import run
from lightning_remat.engine.values import OWNED, PACKED, Value
from lightning_remat.errors import OffloadError, ReplayError
from tests.helpers.places import MemoryPlace

N = 100  # bytes of a content


def content(fill: int = 1) -> Tensor:
    return torch.full((N,), fill, dtype=torch.uint8)


def mover_over(place: MemoryPlace, window: int, ahead: int, order: list[int] | None = None) -> Mover:
    mover = Mover(place, min_bytes=1, in_flight=0)
    mover.begin(order, window, ahead)
    return mover


def leave(mover: Mover, tensor: Tensor) -> Moved:
    moved = mover.leave(tensor)
    assert moved is not None
    return moved


def value_of(moved: Moved) -> Value:
    value = Value()
    value.flags = 0
    value.tensor = value.version = None
    value.geometry = moved.geometry
    value.op = fetch_op(moved, value, 0)
    return value


def test_the_window_is_first_in_first_out() -> None:
    """What younger contents push out is written, and its tensor let go of; the others are still there."""
    place = MemoryPlace()
    mover = mover_over(place, window=2 * N, ahead=0)
    some = [leave(mover, content(i)) for i in range(4)]
    assert [moved.resident is not None for moved in some] == [False, False, True, True]
    assert place.log == [("out", 0), ("out", 1)]
    assert mover.resident_bytes == 2 * N


def test_memory_is_free_once_it_is_out() -> None:
    """Nothing but the window holds what the program has let go of."""
    mover = mover_over(MemoryPlace(), window=N, ahead=0)
    tensor = content()
    storage = weakref(tensor.untyped_storage())
    first = leave(mover, tensor)
    del tensor
    assert storage() is not None
    second = leave(mover, content())
    assert storage() is None
    assert (first.resident, second.resident is not None) == (None, True)


def test_what_is_in_the_window_is_handed_back_as_it_is() -> None:
    """No copy, and nobody may write into it: it may be the program's."""
    mover = mover_over(MemoryPlace(), window=N, ahead=0)
    tensor = content(7)
    value = value_of(leave(mover, tensor))
    run(value.op)
    assert value.tensor is not None
    assert value.tensor.data_ptr() == tensor.data_ptr()
    assert not value.flags & OWNED
    assert (value.op, mover.resident_bytes) == (None, 0)


def test_what_is_out_is_read() -> None:
    """In memory of its own, with the geometry that it had."""
    mover = mover_over(MemoryPlace(), window=0, ahead=0)
    tensor = torch.arange(24.0).reshape(4, 6).t()[1:, 2:]
    value = value_of(leave(mover, tensor.detach()))
    run(value.op)
    back = value.tensor
    assert back is not None
    assert torch.equal(back, tensor)
    assert (back.stride(), back.storage_offset(), back.untyped_storage().nbytes()) == ((1, 6), 13, 96)
    assert value.flags & OWNED


def test_contents_that_nobody_wants_leave_window_and_place() -> None:
    """By reference count alone, whether they are in the window, out, or on their way back."""
    place = MemoryPlace()
    mover = mover_over(place, window=N, ahead=N)
    some = [leave(mover, content(i)) for i in range(3)]
    mover.pump()
    assert some[1].coming is not None
    some.clear()
    assert (place.used_bytes, mover.resident_bytes) == (0, 0)
    leave(mover, content())
    assert mover.resident_bytes == 0


def ahead_of(place: MemoryPlace) -> list[int]:
    return [number for what, number in place.log if what == "ahead"]


def test_reading_ahead_stays_below_its_limit() -> None:
    """The last first, as long as no more bytes are early than allowed; one at least."""
    place = MemoryPlace()
    mover = mover_over(place, window=0, ahead=2 * N)
    values = [value_of(leave(mover, content(i))) for i in range(5)]
    mover.pump()
    assert ahead_of(place) == [4, 3]
    mover.pump()
    assert ahead_of(place) == [4, 3]
    run(values[4].op)
    mover.pump()
    assert ahead_of(place) == [4, 3, 2]
    small = mover_over(place, window=0, ahead=1)
    kept = leave(small, content())
    small.pump()
    assert kept.coming is not None


def test_the_order_is_that_of_the_last_step() -> None:
    """What was never asked for comes last; another number of contents is another step."""
    place = MemoryPlace()
    mover = mover_over(place, window=0, ahead=10 * N)
    values = [value_of(leave(mover, content(i))) for i in range(4)]
    for i in (1, 3, 0):
        run(values[i].op)
    mover.begin(None, 0, 10 * N)
    place.log.clear()
    kept = [leave(mover, content(i)) for i in range(4)]
    mover.pump()
    assert ahead_of(place) == [4 + i for i in (1, 3, 0, 2)]
    mover.begin(None, 0, 10 * N)
    place.log.clear()
    kept = [leave(mover, content(i)) for i in range(3)]
    mover.pump()
    assert ahead_of(place) == [10, 9, 8]
    assert len(kept) == 3


def test_the_order_may_be_given() -> None:
    """A plan knows it; a step that stopped short has fewer."""
    place = MemoryPlace()
    mover = mover_over(place, window=0, ahead=10 * N, order=[2, 0, 3, 1])
    kept = [leave(mover, content(i)) for i in range(3)]
    mover.pump()
    assert ahead_of(place) == [2, 0, 1]
    assert len(kept) == 3


def test_giving_way() -> None:
    """When memory is short, the window is emptied, and nothing is read ahead in this step; in the next it is."""
    place = MemoryPlace()
    mover = mover_over(place, window=10 * N, ahead=10 * N)
    some = [leave(mover, content(i)) for i in range(3)]
    assert mover.give_way() == 3 * N
    assert all(moved.resident is None for moved in some)
    mover.pump()
    assert not ahead_of(place)
    mover.begin(None, 0, N)
    kept = leave(mover, content())
    mover.pump()
    assert kept.coming is not None


def test_what_cannot_be_written_stays() -> None:
    """It is said, the content is what it was, and nothing more leaves in this step."""
    place = MemoryPlace()
    place.write_fails = lambda number: number == 0
    said: list[str] = []
    mover = Mover(place, 1, 0, lambda topic, text: said.append(text))
    mover.begin(None, 0, 0)
    tensor = content(3)
    value = value_of(leave(mover, tensor))
    assert mover.leave(content()) is None
    assert "is kept" in said[0]
    run(value.op)
    assert value.tensor is not None
    assert value.tensor.data_ptr() == tensor.data_ptr()
    assert (mover.resident_bytes, place.used_bytes) == (0, 0)
    mover.begin(None, 0, 0)
    assert mover.leave(content()) is not None


def test_a_full_place_takes_what_still_fits() -> None:
    """What has no room stays; later contents are offered all the same."""
    place = MemoryPlace(most=2 * N)
    mover = mover_over(place, window=0, ahead=0)
    some = [mover.leave(content(i)) for i in range(3)]
    assert [moved is not None for moved in some] == [True, True, False]
    some[0] = None
    assert mover.leave(content()) is not None


def test_what_cannot_be_read_is_an_error() -> None:
    """Where nobody knows how it was made; the text says what to do."""
    place = MemoryPlace()
    place.read_fails = lambda number: True
    mover = mover_over(place, window=0, ahead=0)
    value = value_of(leave(mover, content()))
    with pytest.raises(OffloadError, match=r"Remat\.attempt"):
        run(value.op)


def test_a_write_waits_for_the_transfer() -> None:
    """After a seal the storage may be written to, whether the content could leave or not."""
    place = MemoryPlace()
    place.write_fails = lambda number: number == 1
    mover = mover_over(place, window=10 * N, ahead=0)
    tensors = [content(5), content(6)]
    values = [value_of(leave(mover, tensor)) for tensor in tensors]
    for value, tensor in zip(values, tensors, strict=True):
        value.op.func.seal()
        tensor.fill_(0)
    for value, fill in zip(values, (5, 6), strict=True):
        run(value.op)
        assert value.tensor is not None
        assert value.tensor.eq(fill).all()


def test_a_write_that_nobody_saw_is_refused() -> None:
    """While the content is in the window, and when it changed on its way out: PyTorch's own words."""
    mover = mover_over(MemoryPlace(), window=N, ahead=0)
    tensor = content()
    first = value_of(leave(mover, tensor))
    tensor.add_(1)
    with pytest.raises(ReplayError, match="changed in place"):
        run(first.op)  # only a replay reads it, which PyTorch knows nothing of
    first.flags |= PACKED
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        run(first.op)
    second = leave(mover, content())
    assert second.resident is not None
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        run(first.op)


def test_small_contents_stay() -> None:
    """And so does what has no bytes."""
    mover = Mover(MemoryPlace(), min_bytes=N + 1, in_flight=0)
    assert mover.leave(content()) is None
    assert Mover(MemoryPlace(), min_bytes=0).leave(torch.empty(0)) is None


def test_bounds_follow_the_largest_content() -> None:
    """Where nobody says how much may be in flight: twice the largest, and not less than some MiB."""
    mover = Mover(MemoryPlace(), min_bytes=1)
    mover.begin()
    assert mover.window == mover.ahead == LEAST_WINDOW
    kept = leave(mover, torch.zeros(LEAST_WINDOW, dtype=torch.uint8))
    assert mover.window == mover.ahead == 2 * LEAST_WINDOW
    assert kept.resident is not None
