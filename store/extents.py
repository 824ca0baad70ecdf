"""Extents: pieces of a segment. Shared words of master, node and client. Pure.

Knows: addresses, lengths, the granule. Does not know: objects, who owns what.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

GRANULE_BYTES = 256
"""Allocations start and end on multiples of this, counted from the segment's first byte. Part of the protocol: a new
master must round the extents that a node reports as the old one did."""


class Extent(NamedTuple):
    """`length` bytes at `address` in the segment owner's address space."""

    address: int
    length: int

    @property
    def end(self) -> int:
        return self.address + self.length


def round_up(length: int) -> int:
    """To whole granules."""
    return -(-length // GRANULE_BYTES) * GRANULE_BYTES


def total_bytes(extents: Iterable[Extent]) -> int:
    return sum(extent.length for extent in extents)


def trim(extents: Sequence[Extent], length: int) -> tuple[Extent, ...]:
    """The first `length` bytes of `extents`. Raises ValueError when there are fewer."""
    kept: list[Extent] = []
    left = length
    for extent in extents:
        if left <= 0:
            break
        kept.append(Extent(extent.address, min(left, extent.length)))
        left -= kept[-1].length
    if left > 0:
        raise ValueError(f"{length} bytes do not fit in {len(extents)} extents")
    return tuple(kept)
