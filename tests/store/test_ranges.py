"""Zipping local ranges with remote extents, against a copy byte by byte."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from store.ranges import length_of, zip_ranges

LENGTHS = st.lists(st.integers(0, 9), max_size=12)
GAPS = st.integers(0, 2**30 - 1)  # a bit a gap
CUTS = st.lists(st.integers(0, 200), max_size=12)


def laid_out(lengths: list[int], gaps: int) -> list[tuple[int, int]]:
    at, ranges = 100, []
    for n, length in enumerate(lengths):
        ranges.append((at, length))
        at += length + (gaps >> n & 1)
    return ranges


@settings(deadline=None)
@given(LENGTHS, CUTS, GAPS, GAPS)
def test_like_byte_by_byte(lengths: list[int], cuts: list[int], here_gaps: int, there_gaps: int) -> None:
    total = sum(lengths)
    edges = [0, *sorted(cut % (total + 1) for cut in cuts), total]
    local = laid_out(lengths, here_gaps)
    remote = laid_out([b - a for a, b in itertools.pairwise(edges)], there_gaps)
    here = [at + n for at, length in local for n in range(length)]
    there = [at + n for at, length in remote for n in range(length)]
    pieces = zip_ranges(local, remote)
    copied = [(a + n, b + n) for a, b, length in zip(*pieces, strict=True) for n in range(length)]
    assert copied == list(zip(here, there, strict=True))
    assert sum(pieces.length) == length_of(local) and all(pieces.length)
    for n in range(1, len(pieces.length)):
        joins = (
            pieces.local[n - 1] + pieces.length[n - 1] == pieces.local[n]
            and pieces.remote[n - 1] + pieces.length[n - 1] == pieces.remote[n]
        )
        assert not joins, "two pieces that are one"


def test_neighbours_are_joined() -> None:
    assert zip_ranges([(0, 4), (4, 4), (16, 8)], [(100, 6), (106, 10)]) == ([0, 16], [100, 108], [8, 8])


@pytest.mark.parametrize("remote", [[(0, 7)], [(0, 9)], [], [(0, -1), (0, 9)]])
def test_lengths_must_agree(remote: list[tuple[int, int]]) -> None:
    with pytest.raises(ValueError):
        zip_ranges([(0, 8)], remote)
