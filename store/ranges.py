"""From local ranges and remote extents to the pieces that a transfer copies. Pure.

Knows: two lists of ranges that name the same bytes in the same order. Does not know: handles, directions, engines.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

Range = tuple[int, int]
"""(address, length)."""


class Pieces(NamedTuple):
    """Columns of contiguous copies, in order: local address, remote address, length."""

    local: list[int]
    remote: list[int]
    length: list[int]


def length_of(ranges: Iterable[Range]) -> int:
    return sum(length for _, length in ranges)


def zip_ranges(local: Sequence[Range], remote: Sequence[Range]) -> Pieces:
    """The fewest pieces that are contiguous on both sides: neighbours are joined, empty ranges vanish.

    Raises ValueError when the two sides differ in length, or for a negative one.
    """
    pieces = Pieces([], [], [])
    if length_of(local) != length_of(remote):
        raise ValueError(f"{length_of(local)} bytes here but {length_of(remote)} there")
    there = iter(remote)
    remote_at, remote_left = 0, 0
    for at, left in local:
        if left < 0:
            raise ValueError(f"a range of {left} bytes")
        while left:
            while not remote_left:
                remote_at, remote_left = next(there)
                if remote_left < 0:
                    raise ValueError(f"a range of {remote_left} bytes")
            step = min(left, remote_left)
            _append(pieces, at, remote_at, step)
            at, left = at + step, left - step
            remote_at, remote_left = remote_at + step, remote_left - step
    return pieces


def _append(pieces: Pieces, local: int, remote: int, length: int) -> None:
    if pieces.length:
        before = pieces.length[-1]
        if pieces.local[-1] + before == local and pieces.remote[-1] + before == remote:
            pieces.length[-1] = before + length
            return
    pieces.local.append(local)
    pieces.remote.append(remote)
    pieces.length.append(length)
