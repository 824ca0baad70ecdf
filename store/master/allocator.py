"""Extent allocator of one segment: best fit, else several holes, so that whatever is free can be used.

Knows: holes, by address (to join neighbours) and by length (to fit). Does not know: objects, time, other segments.
Lengths are rounded up to the granule; `free` and `reserve` round the same way, so trimmed extents can be given back.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence

from store.extents import GRANULE_BYTES, Extent, round_up


class ExtentAllocator:
    """The free memory of `[address, address + length)`; a tail below one granule is never used."""

    def __init__(self, address: int, length: int) -> None:
        self.address = address
        self.capacity_bytes = length // GRANULE_BYTES * GRANULE_BYTES
        self.free_bytes = self.capacity_bytes
        self._length: dict[int, int] = {}  # hole start -> length
        self._starts: list[int] = []
        self._sizes: list[tuple[int, int]] = []  # (length, start)
        if self.capacity_bytes:
            self._add_hole(address, self.capacity_bytes)

    @property
    def allocated_bytes(self) -> int:
        return self.capacity_bytes - self.free_bytes

    @property
    def largest_hole_bytes(self) -> int:
        return self._sizes[-1][0] if self._sizes else 0

    def allocate(self, length: int, max_extents: int | None = None) -> list[Extent] | None:
        """Extents of at least `length` bytes in all (whole granules), or None. More than `max_extents` pieces: None."""
        wanted = round_up(length)
        if wanted <= 0 or wanted > self.free_bytes:
            return None
        chosen = self._choose(wanted, max_extents)
        if chosen is None:
            return None
        for start, taken in chosen:
            self._take(start, start, taken)
        return [Extent(start, taken) for start, taken in chosen]

    def _choose(self, wanted: int, max_extents: int | None) -> list[tuple[int, int]] | None:
        """Largest holes first; the last piece goes into the smallest hole that holds it."""
        chosen: list[tuple[int, int]] = []
        at = len(self._sizes)
        while wanted:
            if max_extents is not None and len(chosen) >= max_extents:
                return None
            fit = bisect.bisect_left(self._sizes, (wanted, -1), 0, at)
            if fit < at:
                chosen.append((self._sizes[fit][1], wanted))
                break
            at -= 1
            size, start = self._sizes[at]
            chosen.append((start, size))
            wanted -= size
        return chosen

    def reserve(self, extent: Extent) -> bool:
        """Takes just this range (rounded up to granules). False, and nothing happens, when part of it is not free."""
        length = round_up(extent.length)
        if length <= 0 or (extent.address - self.address) % GRANULE_BYTES:
            return False
        at = bisect.bisect_right(self._starts, extent.address) - 1
        if at < 0:
            return False
        hole = self._starts[at]
        if extent.address + length > hole + self._length[hole]:
            return False
        self._take(hole, extent.address, length)
        return True

    def reserve_all(self, extents: Sequence[Extent]) -> bool:
        """All or nothing."""
        for done, extent in enumerate(extents):
            if not self.reserve(extent):
                self.free(extents[:done])
                return False
        return True

    def free(self, extents: Sequence[Extent]) -> None:
        """Gives back what `allocate` or `reserve` gave. Raises ValueError for memory that is free or foreign."""
        for extent in extents:
            self._free_one(extent.address, round_up(extent.length))

    def _free_one(self, start: int, length: int) -> None:
        end = start + length
        at = bisect.bisect_left(self._starts, start)
        before = self._starts[at - 1] if at else None
        after = self._starts[at] if at < len(self._starts) else None
        if start < self.address or end > self.address + self.capacity_bytes or length <= 0:
            raise ValueError(f"[{start:#x}, +{length}) is not of this segment")
        if (before is not None and before + self._length[before] > start) or (after is not None and after < end):
            raise ValueError(f"[{start:#x}, +{length}) is free already")
        self.free_bytes += length
        if before is not None and before + self._length[before] == start:
            start, length = before, self._remove_hole(before) + length
        if after is not None and after == end:
            length += self._remove_hole(after)
        self._add_hole(start, length)

    def _take(self, hole: int, start: int, length: int) -> None:
        """Cuts `[start, +length)` out of the hole that begins at `hole`."""
        size = self._remove_hole(hole)
        self.free_bytes -= length
        if start > hole:
            self._add_hole(hole, start - hole)
        if start + length < hole + size:
            self._add_hole(start + length, hole + size - start - length)

    def _add_hole(self, start: int, length: int) -> None:
        self._length[start] = length
        bisect.insort(self._starts, start)
        bisect.insort(self._sizes, (length, start))

    def _remove_hole(self, start: int) -> int:
        length = self._length.pop(start)
        del self._starts[bisect.bisect_left(self._starts, start)]
        del self._sizes[bisect.bisect_left(self._sizes, (length, start))]
        return length
