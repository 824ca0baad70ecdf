"""The truth of one node: which objects its memory holds whole, and who is overwriting what. Pure: `now` comes in.

Knows: entries (complete objects), open puts (announced writes), the number of the current report. Does not know: bytes,
gRPC, how a writer is fenced. DESIGN.md section 4 "Store".

Why a report never names bytes that are half overwritten: a writer writes only after `begin` took every overlapping
entry out, and an object gets in only by `end`, after its last byte. Why a new master never gives out memory that
somebody still writes: open puts are part of the report, and a put that rests on an older one can neither begin nor end.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from store.extents import Extent, total_bytes

OK = 0
REFUSED = -700
BUSY = -703
BROKEN = -600
FULL = -1010


@dataclass(frozen=True, slots=True)
class Entry:
    """One object that is held whole."""

    key: bytes
    version: int
    length: int
    extents: tuple[Extent, ...]
    removed: bool = False
    """The master has removed it, but somebody may still read it."""


@dataclass(frozen=True, slots=True)
class OpenPut:
    """One announced write. After `ends_s` its writer does not write any more, by its own clock."""

    put_id: int
    group: int
    writer_address: str
    writer_instance_id: str
    objects: tuple[Entry, ...]
    ends_s: float


class Intervals:
    """Disjoint ranges with an owner each; finds the owners that a range touches."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._of: dict[int, tuple[int, int]] = {}  # start -> (end, owner)

    def add(self, extent: Extent, owner: int) -> None:
        bisect.insort(self._starts, extent.address)
        self._of[extent.address] = (extent.end, owner)

    def remove(self, extent: Extent) -> None:
        del self._of[extent.address]
        del self._starts[bisect.bisect_left(self._starts, extent.address)]

    def owners(self, extent: Extent) -> set[int]:
        found: set[int] = set()
        at = max(0, bisect.bisect_right(self._starts, extent.address) - 1)
        while at < len(self._starts) and self._starts[at] < extent.end:
            end, owner = self._of[self._starts[at]]
            if end > extent.address:
                found.add(owner)
            at += 1
        return found


class Manifest:
    """Entries and open puts of `[address, address + length)`. `mount` is the number of the current report."""

    def __init__(self, address: int, length: int, *, put_grace_s: float, max_open_puts: int = 65536) -> None:
        self.address = address
        self.length = length
        self.mount = 0
        self.entries: dict[int, Entry] = {}  # by version
        self.open_puts: dict[int, OpenPut] = {}
        self._held = Intervals()
        self._open = Intervals()
        self._grace_s = put_grace_s
        self._max_open_puts = max_open_puts

    def begin(self, now: float, mount: int, put: OpenPut) -> tuple[int, list[OpenPut]]:
        """Announces a write. OK: overlapping entries are forgotten and the writer may write. BUSY: the returned open
        puts have to be fenced first (then `forget_open`), then ask again. REFUSED: it rests on an older report."""
        self._expire(now)
        if mount != self.mount or put.put_id in self.open_puts:
            return REFUSED, []
        if not self._well_formed(put.objects):
            return BROKEN, []
        touched = [extent for item in put.objects for extent in item.extents]
        older = set().union(*(self._open.owners(extent) for extent in touched))
        if older:
            return BUSY, [self.open_puts[put_id] for put_id in sorted(older)]
        if len(self.open_puts) >= self._max_open_puts:
            return FULL, []
        self.forget({version for extent in touched for version in self._held.owners(extent)})
        self._keep_open(put)
        return OK, []

    def end(self, mount: int, put_id: int, written: Sequence[bool], *, quiesced: bool) -> int:
        """What is written whole is held from now on; the rest stays open unless nobody can write it any more
        (`quiesced`). REFUSED: nothing is held, it came too late."""
        put = self.forget_open(put_id)
        if put is None:
            return REFUSED
        done = [entry for entry, whole in zip(put.objects, written, strict=False) if whole and mount == self.mount]
        rest = tuple(entry for entry in put.objects if entry not in done)
        if rest and not quiesced:
            self._keep_open(replace(put, objects=rest))
        for entry in done:
            self.entries[entry.version] = entry
            for extent in entry.extents:
                self._held.add(extent, entry.version)
        return OK if mount == self.mount else REFUSED

    def _keep_open(self, put: OpenPut) -> None:
        self.open_puts[put.put_id] = put
        for item in put.objects:
            for extent in item.extents:
                self._open.add(extent, put.put_id)

    def forget_open(self, put_id: int) -> OpenPut | None:
        """No byte of that put will be written any more, and none counts. Returns it, None when it is unknown."""
        put = self.open_puts.pop(put_id, None)
        for item in put.objects if put else ():
            for extent in item.extents:
                self._open.remove(extent)
        return put

    def forget(self, versions: Iterable[int]) -> None:
        """These objects do not exist any more."""
        for version in versions:
            entry = self.entries.pop(version, None)
            for extent in entry.extents if entry else ():
                self._held.remove(extent)

    def mark_removed(self, versions: Iterable[int]) -> None:
        """These are not to be found any more; their bytes stay as they are."""
        for version in versions:
            entry = self.entries.get(version)
            if entry is not None:
                self.entries[version] = replace(entry, removed=True)

    def report(self, now: float, mount: int) -> tuple[list[Entry], list[tuple[tuple[Extent, ...], float]]]:
        """Everything held, oldest first, and open writes with the seconds until their end (negative: in their grace).
        From this moment puts that rest on an older report are refused."""
        self._expire(now)
        self.mount = mount
        puts = list(self.open_puts.values())
        writes = [(tuple(e for item in p.objects for e in item.extents), p.ends_s - now) for p in puts]
        return list(self.entries.values()), writes

    def _expire(self, now: float) -> None:
        """Puts whose writer has long stopped by its own word (they never said `end`)."""
        for put in list(self.open_puts.values()):
            if put.ends_s + self._grace_s < now:
                self.forget_open(put.put_id)

    def _well_formed(self, items: Sequence[Entry]) -> bool:
        own = Intervals()
        for item in items:
            if item.length <= 0 or total_bytes(item.extents) != item.length or item.version in self.entries:
                return False
            for extent in item.extents:
                inside = self.address <= extent.address and extent.end <= self.address + self.length
                if extent.length <= 0 or not inside or own.owners(extent):
                    return False
                own.add(extent, 0)
        return True
