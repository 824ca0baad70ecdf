"""Memory of the pool: segments, the index of objects, and the ways memory changes hands.

Knows: records, holes, LRU, pins. Does not know: time, who reads, who writes, when a lease ends (core.py).
Invariant: every byte of an alive segment is either free or belongs to one record or to one quarantine of the core.
Paper: 4.2 (KVCache pool).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from store.extents import Extent, total_bytes, trim
from store.master.drop_log import DropLog
from store.master.eviction import Lru, footprint_bytes
from store.master.replicas import Record, Replica, Segment, State

Memory = tuple[Segment, tuple[Extent, ...]]
"""Extents that belong to no record any more and are not free yet."""

PREFERRED_MAX_EXTENTS = 64
"""More splinters than this only when nothing can be evicted instead."""


class Pool:
    """All segments and objects of one master's life."""

    def __init__(self, max_dropped: int) -> None:
        self.segments: dict[str, Segment] = {}
        self.index: dict[bytes, Record] = {}  # WRITING and LIVE
        self.lru = Lru()
        self.evictions = 0
        self.evicted_bytes = 0
        self._max_dropped = max_dropped
        self._drop_logs: dict[str, DropLog] = {}

    # --- segments ---

    def add_segment(self, segment: Segment) -> None:
        """Replaces what was known under that name."""
        old = self.segments.get(segment.name)
        if old is not None:
            self.drop_segment(old)
        self.segments[segment.name] = segment
        log = self._drop_logs.get(segment.name)
        if log is None or log.instance_id != segment.instance_id:
            self._drop_logs[segment.name] = DropLog(segment.instance_id, self._max_dropped)

    def drop_segment(self, segment: Segment) -> None:
        """Its node is gone, or reports anew: replicas there are forgotten, and objects without another one."""
        if not segment.alive:
            return
        segment.alive = False
        del self.segments[segment.name]
        for record in list(segment.records.values()):
            self.lru.remove(record)
            record.replicas = [r for r in record.replicas if r.segment is not segment]
            if not record.replicas:
                self._unlist(record)
                record.state = State.GONE
            elif record.evictable:
                self.lru.add(record)
        segment.records.clear()

    def drop_log(self, segment: Segment) -> DropLog:
        return self._drop_logs[segment.name]

    def adopt(
        self,
        segment: Segment,
        key: bytes,
        version: int,
        length: int,
        extents: Sequence[Extent],
        *,
        removed: bool = False,
    ) -> Record | None:
        """An object that a node reports. The record is pinned (for the caller to unpin), and GONE when it is older than
        what is known or was removed meanwhile: somebody may still read it. None when the report is broken."""
        if length <= 0 or total_bytes(extents) != length or not segment.allocator.reserve_all(extents):
            return None
        log, known = self.drop_log(segment), self.index.get(key)
        stale = removed or version in log
        if not stale and known is not None and known.state is State.LIVE and known.version < version:
            self.remove(known)
            known = None
        if stale or (known is not None and not _joins(known, segment, version, length)):
            record = Record(key, version, length, state=State.GONE)
            if not removed:
                log.add(version, dropped=False)
        elif known is None:
            record = self.index[key] = Record(key, version, length, state=State.LIVE)
        else:
            record = known
        self.pin(record)  # also takes it out of the LRU, which must not see it change
        record.replicas.append(Replica(segment, tuple(extents)))
        segment.records[version] = record
        return record

    # --- memory ---

    def allocate(self, order: Sequence[Segment], key: bytes, version: int, length: int, replicas: int) -> Record | None:
        """A WRITING record with up to `replicas` replicas on distinct segments of `order`; evicts when all are full."""
        record = Record(key, version, length)
        left = list(order)
        while left and len(record.replicas) < replicas:
            place = self._place(left, length)
            if place is None:
                break
            segment, extents = place
            left.remove(segment)
            record.replicas.append(Replica(segment, trim(extents, length)))
            segment.records[version] = record
        if not record.replicas:
            return None
        self.index[key] = record
        return record

    def _place(self, order: Sequence[Segment], length: int) -> tuple[Segment, list[Extent]] | None:
        place = _first_fit(order, length, PREFERRED_MAX_EXTENTS)
        if place is not None:
            return place
        # Only where evicting can help at all: a hopeless put must not flush the cache.
        could = [s for s in order if s.allocator.free_bytes + self.lru.evictable_bytes(s) >= length]
        while (victim := self.lru.oldest(could)) is not None:
            touched = {replica.segment for replica in victim.replicas}
            self._evict(victim)
            place = _first_fit([s for s in could if s in touched], length, PREFERRED_MAX_EXTENTS)
            if place is not None:
                return place
        return _first_fit(could, length, None)

    def _evict(self, record: Record) -> None:
        self.evictions += 1
        self.evicted_bytes += sum(footprint_bytes(replica.extents) for replica in record.replicas)
        self.remove(record)

    def free(self, memory: Iterable[Memory]) -> None:
        for segment, extents in memory:
            if segment.alive:
                segment.allocator.free(extents)

    # --- lives of records ---

    def publish(self, record: Record) -> None:
        """WRITING -> LIVE."""
        record.state = State.LIVE
        self.lru.add(record)

    def revoke(self, record: Record, where: Callable[[Segment], bool]) -> list[Memory]:
        """Takes the replicas on the segments `where` from a WRITING record; without any left it is GONE. The caller
        has to `free` the memory, when nobody can write there any more."""
        taken = [r for r in record.replicas if where(r.segment)]
        record.replicas = [r for r in record.replicas if not where(r.segment)]
        for replica in taken:
            replica.segment.records.pop(record.version, None)
        if not record.replicas:
            self._unlist(record)
            record.state = State.GONE
        return [(r.segment, r.extents) for r in taken]

    def remove(self, record: Record) -> None:
        """LIVE -> GONE. Its memory is free at once, or when its last pin goes."""
        self.lru.remove(record)
        self._unlist(record)
        record.state = State.GONE
        if not record.pins:
            self._release(record)
            return
        for replica in record.replicas:
            self.drop_log(replica.segment).add(record.version, dropped=False)

    def pin(self, record: Record) -> None:
        self.lru.remove(record)
        record.pins += 1

    def unpin(self, record: Record) -> None:
        """With the last pin a LIVE record becomes the most recently used one, a GONE one gives its memory back."""
        record.pins -= 1
        if record.pins:
            return
        if record.state is State.LIVE:
            self.lru.add(record)
        elif record.state is State.GONE:
            self._release(record)

    def _release(self, record: Record) -> None:
        for replica in record.replicas:
            replica.segment.records.pop(record.version, None)
            self.drop_log(replica.segment).add(record.version, dropped=True)
        self.free((r.segment, r.extents) for r in record.replicas)
        record.replicas = []

    def _unlist(self, record: Record) -> None:
        if self.index.get(record.key) is record:
            del self.index[record.key]


def _joins(known: Record, segment: Segment, version: int, length: int) -> bool:
    """Whether a reported copy is a further replica of the known object."""
    same = known.state is State.LIVE and known.version == version and known.length == length
    return same and all(replica.segment is not segment for replica in known.replicas)


def _first_fit(order: Iterable[Segment], length: int, max_extents: int | None) -> tuple[Segment, list[Extent]] | None:
    for segment in order:
        extents = segment.allocator.allocate(length, max_extents)
        if extents is not None:
            return segment, extents
    return None
