"""Which object goes first: least recently used, one at a time, and how much could go.

Knows: evictable records (live, read by nobody) in order of their last use. Does not know: time, holes, why.
Records that are being read or written are simply not in here, so they cannot be chosen. Paper: 4.2 (LRU), Table 1.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from store.extents import Extent, round_up
from store.master.replicas import Record, Segment


def footprint_bytes(extents: Iterable[Extent]) -> int:
    """What giving these extents back would free."""
    return sum(round_up(extent.length) for extent in extents)


class Lru:
    """Per segment the evictable records, oldest first; stamps order them across segments."""

    def __init__(self) -> None:
        self._of: dict[Segment, OrderedDict[int, Record]] = {}
        self._bytes: dict[Segment, int] = {}
        self._clock = 0
        self.count = 0

    def add(self, record: Record) -> None:
        """As the most recently used one. The record must not be in here."""
        self._clock += 1
        self.count += 1
        record.stamp = self._clock
        for replica in record.replicas:
            self._of.setdefault(replica.segment, OrderedDict())[record.version] = record
            self._bytes[replica.segment] = self._bytes.get(replica.segment, 0) + footprint_bytes(replica.extents)

    def remove(self, record: Record) -> None:
        """It is read, or leaves. Nothing happens when it is not in here."""
        if not record.stamp:
            return
        record.stamp = 0
        self.count -= 1
        for replica in record.replicas:
            records = self._of[replica.segment]
            del records[record.version]
            self._bytes[replica.segment] -= footprint_bytes(replica.extents)
            if not records:
                del self._of[replica.segment], self._bytes[replica.segment]

    def evictable_bytes(self, segment: Segment) -> int:
        return self._bytes.get(segment, 0)

    def oldest(self, segments: Iterable[Segment]) -> Record | None:
        """The least recently used record that has a replica on one of `segments`."""
        heads = [next(iter(self._of[s].values())) for s in segments if s in self._of]
        return min(heads, key=lambda record: record.stamp, default=None)
