"""Room in a file: never handed out twice, nothing lost, refused only if there is too little of it."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from lightning_remat.engine.offload.extents import BLOCK, Extents, rounded
from lightning_remat.engine.offload.transfer import steps_of


def test_sizes_are_rounded_up_to_blocks():
    extents = Extents()
    assert extents.take(0) == []
    assert extents.take(1) == [(0, BLOCK)]
    assert extents.take(BLOCK) == [(BLOCK, BLOCK)]
    assert extents.take(BLOCK + 1) == [(2 * BLOCK, 2 * BLOCK)]
    assert extents.used == extents.end == 4 * BLOCK


def test_the_smallest_hole_that_fits_is_taken():
    extents = Extents()
    taken = [extents.take(size * BLOCK) for size in (3, 1, 2, 1)]
    extents.give_back(taken[0])
    extents.give_back(taken[2])
    assert extents.take(2 * BLOCK) == taken[2]
    assert extents.take(BLOCK) == [(0, BLOCK)]


def test_neighbours_merge_and_the_end_comes_down():
    extents = Extents()
    taken = [extents.take(BLOCK) for _ in range(4)]
    for index in (0, 2, 1):
        extents.give_back(taken[index])
    assert extents.take(3 * BLOCK) == [(0, 3 * BLOCK)]
    extents.give_back(taken[3])
    assert extents.end == 3 * BLOCK
    extents.give_back([(0, 3 * BLOCK)])
    assert (extents.used, extents.end, extents._holes) == (0, 0, [])


def test_over_the_budget_nothing_changes():
    extents = Extents(budget=2 * BLOCK)
    first = extents.take(BLOCK + 1)
    assert extents.take(1) is None
    assert extents.used == 2 * BLOCK
    extents.give_back(first)
    assert extents.take(1) == [(0, BLOCK)]


def test_scattered_holes_are_used_before_anything_is_refused():
    extents = Extents(budget=5 * BLOCK)
    taken = [extents.take(BLOCK) for _ in range(5)]
    for index in (0, 2, 4):
        extents.give_back(taken[index])
    assert sorted(extents.take(3 * BLOCK)) == [(0, BLOCK), (2 * BLOCK, BLOCK), (4 * BLOCK, BLOCK)]
    assert extents.end == 5 * BLOCK


def test_the_limit_is_asked_for_growth_only():
    asked = []

    def limit(end):
        asked.append(end)
        return 3 * BLOCK

    extents = Extents()
    first = extents.take(2 * BLOCK, limit)
    assert extents.take(2 * BLOCK, limit) is None
    assert asked == [2 * BLOCK, 4 * BLOCK]
    second = extents.take(BLOCK, limit)
    extents.give_back(first)
    assert extents.take(2 * BLOCK, limit) == first
    assert len(asked) == 3
    assert second == [(2 * BLOCK, BLOCK)]


@given(
    actions=st.lists(st.tuples(st.booleans(), st.integers(0, 6 * BLOCK), st.integers(0, 1 << 20)), max_size=60),
    budget=st.none() | st.integers(0, 20 * BLOCK),
    most=st.none() | st.integers(0, 20 * BLOCK),
)
def test_any_order_of_taking_and_giving_back(actions, budget, most):
    extents = Extents(budget)
    held = []
    caps = [cap for cap in (budget, most) if cap is not None]
    for give, size, which in actions:
        if give and held:
            extents.give_back(held.pop(which % len(held)))
        else:
            before = extents.used
            taken = extents.take(size, lambda end: most)
            fits = all(before + rounded(size) <= cap // BLOCK * BLOCK for cap in caps)
            assert (taken is not None) == (fits or size == 0)
            if taken is not None:
                assert sum(length for _, length in taken) == rounded(size)
                held.append(taken)
        flat = sorted(extent for taken in held for extent in taken)
        assert all(begin + size <= after for (begin, size), (after, _) in pairwise(flat))
        assert extents.used == sum(size for _, size in flat)
        assert extents.end == max((begin + size for begin, size in flat), default=0)
        assert sum(size for _, size in extents._holes) == extents.end - extents.used
    for taken in held:
        extents.give_back(taken)
    assert (extents.used, extents.end, extents._holes) == (0, 0, [])


@given(st.lists(st.integers(1, 5), min_size=1, max_size=5), st.integers(1, BLOCK), st.integers(1, 3))
def test_steps_cover_every_byte_once(blocks, cut, chunk):
    extents, at = [], 0
    for count in blocks:
        extents.append((at, count * BLOCK))
        at += (count + 1) * BLOCK
    nbytes = sum(blocks) * BLOCK - (BLOCK - cut)
    steps = steps_of(extents, nbytes, chunk * BLOCK)
    assert [step.begin for step in steps] == [sum(s.nbytes for s in steps[:i]) for i in range(len(steps))]
    assert sum(step.nbytes for step in steps) == nbytes
    for step in steps:
        assert step.offset % BLOCK == 0
        assert 0 < step.nbytes <= chunk * BLOCK
        end = step.offset + rounded(step.nbytes)
        assert any(begin <= step.offset and end <= begin + size for begin, size in extents)
