"""The extent allocator against a naive model: one flag a granule."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from store.extents import GRANULE_BYTES as G
from store.extents import Extent, round_up, total_bytes, trim
from store.master.allocator import ExtentAllocator

BASE = 0x7F0000001000 + 64  # mappings are page-aligned, but nothing may depend on it


class Naive:
    def __init__(self, granules: int) -> None:
        self.used = [False] * granules

    def granules(self, extents: list[Extent]) -> list[int]:
        found = []
        for extent in extents:
            assert (extent.address - BASE) % G == 0
            first = (extent.address - BASE) // G
            found += range(first, first + round_up(extent.length) // G)
        return found

    def take(self, extents: list[Extent]) -> None:
        for at in self.granules(extents):
            assert not self.used[at], "handed out twice"
            self.used[at] = True

    def give(self, extents: list[Extent]) -> None:
        for at in self.granules(extents):
            assert self.used[at]
            self.used[at] = False

    def holes(self) -> list[int]:
        text = "".join("x" if used else "." for used in self.used)
        return [len(run) * G for run in text.split("x") if run]


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("allocate"), st.integers(1, 40 * G), st.none() | st.integers(1, 3)),
        st.tuples(st.just("free"), st.integers(0, 10**6), st.none()),
        st.tuples(st.just("reserve"), st.integers(0, 63), st.integers(1, 20 * G)),
    ),
    max_size=50,
)


@settings(max_examples=100, deadline=None)
@given(OPERATIONS)
def test_like_the_naive_one(operations: list[tuple[str, int, int | None]]) -> None:
    allocator, naive, held = ExtentAllocator(BASE, 64 * G + 100), Naive(64), []
    for kind, first, second in operations:
        if kind == "allocate":
            holes = sorted(naive.holes(), reverse=True)
            extents = allocator.allocate(first, second)
            usable = sum(holes) if second is None else sum(holes[:second])
            assert (extents is not None) == (round_up(first) <= usable)
            if extents is not None:
                assert total_bytes(extents) == round_up(first)
                naive.take(extents)
                held.append(list(trim(extents, first)))
        elif kind == "reserve":
            assert second is not None
            extent = Extent(BASE + first * G, second)
            fits = first * G + round_up(second) <= 64 * G and not any(
                naive.used[at] for at in naive.granules([extent]) if at < 64
            )
            assert allocator.reserve(extent) == fits
            if fits:
                naive.take([extent])
                held.append([extent])
        elif held:
            extents = held.pop(first % len(held))
            allocator.free(extents)
            naive.give(extents)
        assert allocator.free_bytes == sum(naive.holes())
        assert allocator.largest_hole_bytes == max(naive.holes(), default=0)
        assert allocator.allocated_bytes + allocator.free_bytes == 64 * G


def test_an_object_larger_than_the_largest_hole_fits() -> None:
    allocator = ExtentAllocator(0, 10 * G)
    pieces = [allocator.allocate(G) for _ in range(10)]
    for piece in pieces[::2]:
        assert piece is not None
        allocator.free(piece)
    extents = allocator.allocate(5 * G)
    assert extents is not None and len(extents) == 5
    assert allocator.allocate(1) is None


def test_reserve_all_is_all_or_nothing() -> None:
    allocator = ExtentAllocator(0, 8 * G)
    assert allocator.reserve(Extent(4 * G, G))
    assert not allocator.reserve_all([Extent(0, G), Extent(4 * G, 1)])
    assert allocator.free_bytes == 7 * G
    assert not allocator.reserve(Extent(1, G)), "off the granule"


@pytest.mark.parametrize("bad", [Extent(0, G), Extent(7 * G, 2 * G), Extent(-G, G), Extent(3 * G, 2 * G)])
def test_freeing_what_is_not_held_is_an_error(bad: Extent) -> None:
    allocator = ExtentAllocator(0, 8 * G)
    assert allocator.reserve(Extent(4 * G, 2 * G))
    with pytest.raises(ValueError, match=r"free already|not of this segment"):
        allocator.free([bad])
    assert allocator.free_bytes == 6 * G
